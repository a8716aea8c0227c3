"""The importance ratio and PPO's clipped surrogate, shared by the group-policy losses.

Schulman et al. 2017, eq. 7: maximise min(r A, clip(r, 1 - low, 1 + high) A) with r = pi(a) / pi_old(a).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanorl.kl import clamp_log_ratio, k3, kl_estimate
from nanorl.losses.aggregate import masked, token_mean


def check_inputs(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, ref_logprobs: Tensor | None = None
) -> Tensor:
    """Shapes of the loss contract; returns advantages that broadcast over tokens, (B, 1) or (B, T), detached."""
    if logprobs.dtype not in (torch.float32, torch.float64, torch.bfloat16):  # the bound on ratios overflows float16
        raise ValueError(
            f"expected log-probs in float32, float64 or bfloat16, got {logprobs.dtype}: convert them with .float()"
        )
    if logprobs.dim() != 2 or old_logprobs.shape != logprobs.shape or mask.shape != logprobs.shape:
        raise ValueError(
            "expected logprobs, old_logprobs and mask of one shape (B, T), got "
            f"{tuple(logprobs.shape)}, {tuple(old_logprobs.shape)}, {tuple(mask.shape)}"
        )
    if advantages.shape not in (logprobs.shape[:1], logprobs.shape):
        raise ValueError(
            f"expected advantages (B,) or (B, T) beside logprobs {tuple(logprobs.shape)}, got {tuple(advantages.shape)}"
        )
    if ref_logprobs is not None and ref_logprobs.shape != logprobs.shape:
        raise ValueError(f"expected ref_logprobs (B, T) = {tuple(logprobs.shape)}, got {tuple(ref_logprobs.shape)}")
    advantages = advantages.detach()
    return advantages[:, None] if advantages.dim() == 1 else advantages


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_old) (B, T): 0 outside the mask, bounded, without gradient to the old policy."""
    return clamp_log_ratio(masked(logprobs, mask) - masked(old_logprobs.detach(), mask))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """-min(r A, clip(r) A), elementwise. With `dual_clip` c > 1 the loss of a negative advantage is at most -c A
    (Ye et al. 2020, eq. 5), so that a huge ratio cannot dominate the batch."""
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be greater than 1, not {dual_clip}")
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"expected 0 <= clip_low <= 1 and clip_high >= 0, got {clip_low} and {clip_high}")
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor | None, beta: float, mask: Tensor, mean: Callable = token_mean
) -> tuple[Tensor | float, dict[str, Tensor]]:
    """beta times the k3 estimate of KL(policy || reference) a token, to be added to a per-token loss, and its metric,
    the `mean` of the estimate.

    Without a reference 0 and no metric; a beta that is not 0 then is an error.
    """
    if ref_logprobs is None:
        if beta:
            raise ValueError(f"beta = {beta} needs ref_logprobs, the log-probs under the reference policy")
        return 0.0, {}
    kl = kl_estimate(masked(logprobs, mask), masked(ref_logprobs, mask), "k3")  # (B, T)
    return beta * kl, {"kl_ref": mean(kl.detach(), mask)}


@torch.no_grad()
def ratio_metrics(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    mean: Callable = token_mean,
) -> dict[str, Tensor]:
    """Means over the trainable tokens, or as `mean` says. A ratio counts as clipped only where clipping changes the
    loss: below the band with a negative advantage, above it with a positive one."""
    ratio = log_ratio.exp()
    low, high = (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)
    per_token = {
        "clip_fraction_low": low.to(ratio.dtype),
        "clip_fraction_high": high.to(ratio.dtype),
        "ratio": ratio,
        "kl_old": k3(log_ratio),  # KL(old || policy), the tokens being the old policy's
    }
    return {name: mean(values, mask) for name, values in per_token.items()}
