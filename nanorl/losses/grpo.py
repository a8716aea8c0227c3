"""GRPO: Group Relative Policy Optimization (DeepSeekMath, Shao et al. 2024, eq. 3; arXiv:2402.03300).

    J = 1/G sum_i 1/|o_i| sum_t { min(r_it A_i, clip(r_it, 1 - low, 1 + high) A_i) - beta KL_it }

PPO's clipped surrogate without a critic: the advantage of a response is its reward's z-score in the group of G
responses to the same prompt (`nanorl.advantages.group_advantages`), the same for each of its tokens. Each response
counts equally, however long it is: that is the 1/|o_i| which Dr. GRPO removes and DAPO replaces.

Where implementations differ: TRL 1.16 multiplies the KL term by the ratio unless told otherwise, and counts rows
without trainable tokens in the mean over sequences (here: `denominator=B`).
"""

from __future__ import annotations

from torch import Tensor

from nanorl.losses.aggregate import sequence_mean
from nanorl.losses.surrogate import check_inputs, clipped_surrogate, kl_penalty, log_ratio, ratio_metrics


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative of J for one batch or micro-batch.

    logprobs, old_logprobs, ref_logprobs, mask (B, T); advantages (B,) or (B, T). `beta` weighs the k3 estimate of
    KL(policy || reference), a paper's constant in nats^-1. `denominator`: sequences of the whole batch when this is a
    part of it (None: those of this one). Returns the scalar loss, in the dtype of the inputs and with a gradient to
    `logprobs` alone, and detached metrics: masked means over tokens.
    """
    advantages = check_inputs(logprobs, old_logprobs, advantages, mask, ref_logprobs)
    log_r = log_ratio(logprobs, old_logprobs, mask)  # (B, T)
    per_token = clipped_surrogate(log_r.exp(), advantages, clip_low, clip_high, dual_clip)  # (B, T)
    kl, kl_metrics = kl_penalty(logprobs, ref_logprobs, beta, mask)
    metrics = ratio_metrics(log_r.detach(), advantages, mask, clip_low, clip_high) | kl_metrics
    return sequence_mean(per_token + kl, mask, denominator), metrics
