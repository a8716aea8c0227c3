"""CISPO: Clipped Importance Sampling weight Policy Optimization (MiniMax 2025, eq. 4 and 5; arXiv:2506.13585).

    J = 1/N sum_it sg(min(r_it, 1 + high)) A_it log pi(a_it)        N tokens

REINFORCE with an importance weight that is capped and carries no gradient (sg stops it). PPO's clipping throws the
gradient of a token away once its ratio leaves the band; here every token keeps one, a rare but decisive "wait" too.

Where implementations differ: the cap is 1 + `clip_high` here, as in the paper; TRL's `epsilon_high` is the cap itself.
verl bounds the weight from below too, at 1 - `clip_low`, which the paper leaves open.
"""

from __future__ import annotations

import math

from torch import Tensor

from nanorl.losses.aggregate import masked, token_mean
from nanorl.losses.surrogate import check_inputs, kl_penalty, log_ratio, ratio_metrics


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    clip_high: float = 4.0,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative of J for one batch or micro-batch.

    logprobs, old_logprobs, ref_logprobs, mask (B, T); advantages (B,) or (B, T). The weight is at most 1 + `clip_high`;
    the default cap of 5 is ScaleRL's (arXiv:2510.13786; the paper gives none). `beta` weighs the k3 estimate of
    KL(policy || reference). `denominator`: tokens of the whole batch when this is a part of it. Returns the scalar
    loss, with a gradient to `logprobs` alone, and detached metrics: masked means over tokens. `clip_fraction_high`
    counts the capped weights, whatever the sign of the advantage.
    """
    if not clip_high >= 0:
        raise ValueError(f"clip_high must be at least 0, not {clip_high}: the weight is capped at 1 + clip_high")
    advantages = check_inputs(logprobs, old_logprobs, advantages, mask, ref_logprobs)
    log_r = log_ratio(logprobs.detach(), old_logprobs, mask)  # (B, T), without gradient
    weight = log_r.exp().clamp(max=1 + clip_high)  # (B, T)
    per_token = -weight * advantages * masked(logprobs, mask)  # (B, T)
    kl, kl_metrics = kl_penalty(logprobs, ref_logprobs, beta, mask)
    metrics = ratio_metrics(log_r, advantages, mask, clip_low=math.inf, clip_high=math.inf) | kl_metrics
    capped = (log_r.exp() > 1 + clip_high) & (advantages != 0)  # (B, T)
    metrics["clip_fraction_high"] = token_mean(capped.to(weight.dtype), mask)
    return token_mean(per_token + kl, mask, denominator), metrics
