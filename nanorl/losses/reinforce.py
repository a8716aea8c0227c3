"""REINFORCE with an advantage (Williams 1992; Sutton et al. 2000).

    J = 1/N sum_it A_it log pi(a_it)        N tokens

The policy gradient itself: no ratio, no clipping. Right for one update a rollout; from the second on the samples come
from a policy that is no longer there, and nothing here corrects it. `old_logprobs` serve the metrics alone.

Where implementations differ: verl calls this loss gpg; TRL has none without a ratio (its RLOO trainer clips one of
whole sequences).
"""

from __future__ import annotations

import math

from torch import Tensor

from nanorl.losses.aggregate import masked, token_mean
from nanorl.losses.surrogate import check_inputs, kl_penalty, log_ratio, ratio_metrics


def reinforce_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative of J for one batch or micro-batch.

    logprobs, old_logprobs, ref_logprobs, mask (B, T); advantages (B,) or (B, T). `beta` weighs the k3 estimate of
    KL(policy || reference). `denominator`: tokens of the whole batch when this is a part of it. Returns the scalar
    loss, with a gradient to `logprobs` alone, and detached metrics: masked means over tokens (nothing is clipped: those
    fractions are 0).
    """
    advantages = check_inputs(logprobs, old_logprobs, advantages, mask, ref_logprobs)
    per_token = -advantages * masked(logprobs, mask)  # (B, T)
    kl, kl_metrics = kl_penalty(logprobs, ref_logprobs, beta, mask)
    log_r = log_ratio(logprobs.detach(), old_logprobs, mask)
    metrics = ratio_metrics(log_r, advantages, mask, clip_low=math.inf, clip_high=math.inf) | kl_metrics
    return token_mean(per_token + kl, mask, denominator), metrics
