"""Solutions of lesson 07. They pass the checks of exercise.py:

python lessons/07_dr_grpo/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor


def centered_advantages(rewards: Tensor) -> Tensor:
    """rewards (P, G) -> (P, G)"""
    return rewards - rewards.mean(-1, keepdim=True)


def batch_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """rewards (P, G) -> (P, G)"""
    return centered_advantages(rewards) / (rewards.std() + eps)


def dr_grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    max_length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """logprobs, old_logprobs, mask (B, T), advantages (B,) -> scalar"""
    ratio = torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0).exp()
    advantages = advantages[:, None]
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return -torch.where(mask.bool(), objective, 0.0).sum() / (len(logprobs) * max_length)


def push_on_going_on(stop: float, limit: int, divide_by_length: bool) -> float:
    """d log p(go on) / dz is `stop`, d log p(stop) / dz is -(1 - stop)."""
    total = 0.0
    for fillers in range(limit):  # those that stop
        probability = (1 - stop) ** fillers * stop
        score = fillers * stop - (1 - stop)
        total += probability * score / (fillers + 2 if divide_by_length else 1)  # digit and stop token
    cut_off = (1 - stop) ** limit * limit * stop
    return total + cut_off / (limit + 1 if divide_by_length else 1)


def loss_that_minds_its_company(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    max_length: int,
    sequences: int,
) -> Tensor:
    """The bug: the width of this batch as the divisor. It is a constant only if it depends on no response."""
    ratio = (logprobs - old_logprobs.detach()).exp()  # (B, T)
    objective = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    longest = max_length
    return -(objective * mask).sum() / (sequences * longest)


if __name__ == "__main__":
    checks.run("Lesson 07: Dr. GRPO", globals(), checks.CHECKS)
