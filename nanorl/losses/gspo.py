"""GSPO: Group Sequence Policy Optimization (Zheng et al. 2025, eq. 5, 7 and 14; arXiv:2507.18071).

    J = 1/G sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i),    s_i = exp(1/|o_i| sum_t log r_it)

The reward belongs to the whole response, so the importance weight does too: the geometric mean of the token ratios.
Averaging logarithms keeps s_i very close to 1, hence the tiny clip range, 3e-4 and 4e-4. A clipped response is left
out whole. With one update a rollout every ratio is 1, and value and gradient are GRPO's.

The token variant (`token_level=True`, eq. 14) allows another advantage for each token: its ratio has the value of s_i
and the gradient of the token, s_it = sg(s_i) r_it / sg(r_it), where sg stops the gradient.

Where implementations differ: TRL needs `importance_sampling_level="sequence"` and `loss_type="grpo"`; its default
token-weighted mean weighs long responses more than the paper does. verl computes the token variant alone.
"""

from __future__ import annotations

from torch import Tensor

from nanorl.kl import clamp_log_ratio, k3
from nanorl.losses.aggregate import masked, sequence_mean
from nanorl.losses.surrogate import check_inputs, clipped_surrogate, kl_penalty, ratio_metrics


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    token_level: bool = False,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative of J for one batch or micro-batch.

    logprobs, old_logprobs, ref_logprobs, mask (B, T); advantages (B,), or (B, T) with `token_level`. `beta` weighs the
    k3 estimate of KL(policy || reference) a token. `denominator`: sequences of the whole batch when this is a part of
    it. Returns the scalar loss, with a gradient to `logprobs` alone, and detached metrics: means over sequences, each
    counting once.
    """
    if not token_level and advantages.dim() != 1:
        raise ValueError(
            f"a sequence has one advantage: expected advantages (B,), got {tuple(advantages.shape)}; an advantage for "
            "each token needs token_level=True"
        )
    advantages = check_inputs(logprobs, old_logprobs, advantages, mask, ref_logprobs)
    log_r = masked(logprobs, mask) - masked(old_logprobs.detach(), mask)  # (B, T)
    length = mask.bool().sum(1, keepdim=True).clamp(min=1)
    log_s = log_r.sum(1, keepdim=True) / length  # (B, 1)
    if token_level:
        log_s = log_s.detach() + (log_r - log_r.detach())  # (B, T): the value of s, the gradient of the token
    log_s = clamp_log_ratio(log_s).expand_as(logprobs)  # (B, T): the mean is clamped, not the tokens
    per_token = clipped_surrogate(log_s.exp(), advantages, clip_low, clip_high, dual_clip)  # (B, T)
    kl, kl_metrics = kl_penalty(logprobs, ref_logprobs, beta, mask, sequence_mean)
    metrics = ratio_metrics(log_s.detach(), advantages, mask, clip_low, clip_high, sequence_mean) | kl_metrics
    metrics["kl_old"] = sequence_mean(k3(log_r.detach()), mask)  # of the tokens: k3 of their mean would hide most of it
    return sequence_mean(per_token + kl, mask, denominator), metrics
