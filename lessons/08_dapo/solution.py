"""Solutions of lesson 08. They pass the checks of exercise.py:

python lessons/08_dapo/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor


def room_to_grow(p: Tensor, clip_high: float) -> Tensor:
    """p (...) -> (...)"""
    return (p * (1 + clip_high)).clamp(max=1) - p


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """lengths (B,) integers -> (B,)"""
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


def groups_that_teach(rewards: Tensor, wanted: int) -> Tensor:
    """rewards (groups, G) -> (at most wanted,) integers"""
    return (rewards.amax(1) > rewards.amin(1)).nonzero().flatten()[:wanted]


def dapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """logprobs, old_logprobs, mask (B, T), advantages (B,) -> scalar"""
    ratio = torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0).exp()
    advantages = advantages[:, None]
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return -torch.where(mask.bool(), objective, 0.0).sum() / mask.sum()


def loss_that_depends_on_the_micro_batch(per_token: Tensor, mask: Tensor, micro_batch: int) -> Tensor:
    """The bug: each micro-batch divided by its own tokens. All of them have one denominator, that of the whole
    batch."""
    parts = list(zip(per_token.split(micro_batch), mask.split(micro_batch), strict=True))
    loss = torch.zeros((), dtype=per_token.dtype)
    for values, kept in parts:
        loss = loss + (values * kept).sum() / mask.sum()
    return loss


def loss_that_fades_as_the_task_is_mastered(per_token: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
    """The bug: the sum is over the groups that teach, the denominator counts the tokens of all that were sampled."""
    teaches = rewards.amax(1) > rewards.amin(1)  # (groups,)
    kept = per_token[teaches] * mask[teaches]
    return kept.sum() / mask[teaches].sum()


if __name__ == "__main__":
    checks.run("Lesson 08: DAPO", globals(), checks.CHECKS)
