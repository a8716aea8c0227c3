"""DPO: Direct Preference Optimization (Rafailov et al. 2023, eq. 7; arXiv:2305.18290), and IPO.

    h = log pi(chosen) / pi_ref(chosen) - log pi(rejected) / pi_ref(rejected)

    DPO           -log sigmoid(beta h)
    cDPO          -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)                  (Mitchell 2023)
    robust DPO   (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)     (Chowdhury et al. 2024)
    IPO           (h - 1 / (2 beta))^2                                                   (Azar et al. 2023, eq. 17)

The best policy for reward r under a KL penalty is pi* ~ pi_ref exp(r / beta). Solved for r, and put into the
Bradley-Terry model of preferences, the unknown normalisation cancels: DPO is a reward model's loss with the implied
reward beta log(pi / pi_ref), and no sampling. cDPO and robust DPO suppose that a share e of the labels is flipped.
robust DPO's loss is unbiased: averaged over such flips it is that of the true labels. IPO pulls h to 1 / (2 beta) and
no further, also where a preference is certain.

Where implementations differ: log-probs of responses are sums over tokens, as in the papers, or means, as the caller
passes them; TRL's IPO takes means. Its sigmoid loss ignores label_smoothing.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from nanorl.losses.aggregate import pair_mean
from nanorl.losses.bradley_terry import check_pairs, finite, pair_metrics


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    robust: bool = False,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO, with `label_smoothing` e cDPO, with `robust` robust DPO, for one batch or micro-batch of pairs.

    chosen, rejected, ref_chosen, ref_rejected (B,): log-probs of whole responses under policy and reference, summed, or
    their means a token for the length-normalised form: `aggregate.sequence_logprobs` makes both. `beta`, in 1 / nats,
    is the weight of the KL penalty. `denominator`: pairs of the whole batch when this is a part of it. Returns the
    scalar loss, with a gradient to `chosen` and `rejected` alone, and detached metrics: means over pairs.
    """
    if not 0 <= label_smoothing <= 0.5 or (robust and label_smoothing == 0.5):
        limit = "below" if robust else "at most"
        raise ValueError(f"label_smoothing must be at least 0 and {limit} 0.5, a coin's share, not {label_smoothing}")
    h, metrics = preference(chosen, rejected, ref_chosen, ref_rejected, beta)
    right, flipped = -logsigmoid(beta * h), -logsigmoid(-beta * h)  # (B,)
    if robust:
        per_pair = ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    else:
        per_pair = (1 - label_smoothing) * right + label_smoothing * flipped
    return pair_mean(per_pair, denominator), metrics


def ipo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """IPO (`beta` is the paper's tau); all else as in `dpo_loss`. The margin 1 / (2 beta) is a whole response's with
    summed log-probs, a token's with means."""
    h, metrics = preference(chosen, rejected, ref_chosen, ref_rejected, beta)
    return pair_mean((h - 1 / (2 * beta)) ** 2, denominator), metrics


def preference(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """h (B,), and the metrics: implied rewards, how they compare, and log-probs."""
    check_pairs(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be positive and finite, not {beta}")
    chosen_ratio, rejected_ratio = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()  # (B,)
    h = finite(chosen_ratio - rejected_ratio)
    per_pair = {
        "chosen_reward": beta * chosen_ratio,
        "rejected_reward": beta * rejected_ratio,
        "chosen_logprob": chosen,
        "rejected_logprob": rejected,
    }
    means = {name: pair_mean(values.detach()) for name, values in per_pair.items()}
    return h, means | pair_metrics(beta * h.detach())
