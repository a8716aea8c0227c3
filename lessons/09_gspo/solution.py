"""Solutions of lesson 09. They pass the checks of exercise.py:

python lessons/09_gspo/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """logprobs, old_logprobs, mask (B, T) -> (B,)"""
    log_ratio = torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0)
    return (log_ratio.sum(1) / mask.sum(1)).exp()


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """logprobs, old_logprobs, mask (B, T), advantages (B,) -> scalar"""
    s = sequence_ratio(logprobs, old_logprobs, mask)
    return -torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages).mean()


def token_variant_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """logprobs, old_logprobs, mask (B, T) -> (B, T)"""
    s = sequence_ratio(logprobs, old_logprobs, mask).detach()  # (B,)
    logprobs = torch.where(mask.bool(), logprobs, 0.0)
    return s[:, None] * (logprobs - logprobs.detach()).exp()


def left_out(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """ratio, advantages (B,) -> bool (B,)"""
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return too_high | too_low


def loss_that_listens_to_the_longest(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The bug: dividing the sum over all tokens by their number gives a response the weight of its length. Each row's
    own mean comes first, then the mean over rows."""
    log_ratio = torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0)
    s = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()  # (B, 1)
    objective = torch.minimum(s * advantages[:, None], s.clamp(1 - clip_low, 1 + clip_high) * advantages[:, None])
    per_token = objective.expand_as(logprobs)  # (B, T)
    return -((per_token * mask).sum(1) / mask.sum(1)).mean()


if __name__ == "__main__":
    checks.run("Lesson 09: GSPO", globals(), checks.CHECKS)
