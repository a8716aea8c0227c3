"""Dr. GRPO: GRPO done right (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2; arXiv:2503.20783).

    J = 1/G sum_i sum_t min(r_it A_i, clip(r_it, 1 - low, 1 + high) A_i),    A_i = R_i - mean(R)

GRPO without its two biases. The division by the response's own length, 1/|o_i|, makes a token of a long response
count less, so that long wrong answers are punished less than short ones; here every token counts the same, divided by
a constant, the longest response allowed. The division of the advantage by the group's standard deviation weighs
questions that are nearly always, or nearly never, solved more than the others; here it is left out
(`group_advantages(..., scale="none")`).

Where implementations differ: verl divides by the padded width of the batch, which changes from batch to batch, unless
`loss_scale_factor` is set; TRL counts rows without trainable tokens (here: `denominator=B`).
"""

from __future__ import annotations

from torch import Tensor

from nanorl.losses.aggregate import constant_mean
from nanorl.losses.surrogate import check_inputs, clipped_surrogate, kl_penalty, log_ratio, ratio_metrics


def dr_grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    max_length: int,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative of J, divided by `max_length` (tokens), for one batch or micro-batch.

    logprobs, old_logprobs, ref_logprobs, mask (B, T); advantages (B,) or (B, T). `beta` weighs the k3 estimate of
    KL(policy || reference). `denominator`: sequences of the whole batch when this is a part of it. Returns the scalar
    loss, with a gradient to `logprobs` alone, and detached metrics: masked means over tokens.
    """
    advantages = check_inputs(logprobs, old_logprobs, advantages, mask, ref_logprobs)
    log_r = log_ratio(logprobs, old_logprobs, mask)  # (B, T)
    per_token = clipped_surrogate(log_r.exp(), advantages, clip_low, clip_high, dual_clip)  # (B, T)
    kl, kl_metrics = kl_penalty(logprobs, ref_logprobs, beta, mask)
    metrics = ratio_metrics(log_r.detach(), advantages, mask, clip_low, clip_high) | kl_metrics
    return constant_mean(per_token + kl, mask, max_length, denominator), metrics
