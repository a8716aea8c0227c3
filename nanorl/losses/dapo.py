"""DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization (Yu et al. 2025, eq. 8; arXiv:2503.14476).

    J = 1/(sum_i |o_i|) sum_i sum_t min(r_it A_i, clip(r_it, 1 - low, 1 + high) A_i),    low 0.2, high 0.28

Two of DAPO's ideas live here. Clip-higher: the upper bound is wider than the lower one, so that a token of small
probability may grow, and the entropy does not collapse. Token mean: every token of the batch counts the same, so a
long response weighs as much as its tokens. There is no KL term by default (`beta` is kept for experiments). The other
ideas are not in the loss: dynamic sampling, the soft overlong penalty and overlong filtering.

Where implementations differ: the paper divides by the tokens of one prompt's group and averages over prompts; the
frameworks, and this file, divide by the tokens of the whole batch.
"""

from __future__ import annotations

from torch import Tensor

from nanorl.losses.aggregate import token_mean
from nanorl.losses.surrogate import check_inputs, clipped_surrogate, kl_penalty, log_ratio, ratio_metrics


def dapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative of J for one batch or micro-batch.

    logprobs, old_logprobs, ref_logprobs, mask (B, T); advantages (B,) or (B, T). `beta` weighs the k3 estimate of
    KL(policy || reference). `denominator`: tokens of the whole batch when this is a part of it. Returns the scalar
    loss, with a gradient to `logprobs` alone, and detached metrics: masked means over tokens.
    """
    advantages = check_inputs(logprobs, old_logprobs, advantages, mask, ref_logprobs)
    log_r = log_ratio(logprobs, old_logprobs, mask)  # (B, T)
    per_token = clipped_surrogate(log_r.exp(), advantages, clip_low, clip_high, dual_clip)  # (B, T)
    kl, kl_metrics = kl_penalty(logprobs, ref_logprobs, beta, mask)
    metrics = ratio_metrics(log_r.detach(), advantages, mask, clip_low, clip_high) | kl_metrics
    return token_mean(per_token + kl, mask, denominator), metrics
