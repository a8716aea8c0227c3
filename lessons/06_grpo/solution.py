"""Solutions of lesson 06. They pass the checks of exercise.py:

python lessons/06_grpo/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor


def group_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """rewards (P, G) -> (P, G)"""
    z = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + eps)
    equal = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)  # (P, 1)
    return torch.where(equal, 0.0, z)  # the mean of equal floats may differ from them in the last digit


def clipped_objective(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    d = ref_logprobs.detach() - logprobs
    return d.exp() - d - 1


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """values, mask (B, T) -> scalar"""
    chosen = torch.where(mask.bool(), values, 0.0)
    return (chosen.sum(1) / mask.sum(1)).mean()


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logprobs: Tensor,
    beta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """logprobs, old_logprobs, mask, ref_logprobs (B, T), advantages (B,) -> scalar"""
    # Padding is put to 0 first: a NaN that only the forward pass drops comes back in the backward pass as 0 * NaN.
    logprobs, old_logprobs, ref_logprobs = (
        torch.where(mask.bool(), x, 0.0) for x in (logprobs, old_logprobs, ref_logprobs)
    )
    ratio = (logprobs - old_logprobs.detach()).exp()  # (B, T)
    objective = clipped_objective(ratio, advantages[:, None].expand_as(ratio), clip_low, clip_high)
    return -sequence_mean(objective - beta * kl_k3(logprobs, ref_logprobs), mask)


def loss_that_never_learns(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The bug: without detach, numerator and denominator move together, and the ratio is the constant 1."""
    old_logprobs = logprobs.detach()
    ratio = (logprobs - old_logprobs).exp()  # (B, T)
    objective = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -objective.mean()


def loss_that_depends_on_its_neighbors(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor):
    """The bug: .mean(1) divides by T, the width of the batch; the response's own length is mask.sum(1)."""
    ratio = (logprobs - old_logprobs.detach()).exp()  # (B, T)
    objective = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    per_response = (objective * mask).sum(1) / mask.sum(1)  # (B,)
    return -per_response.mean()


if __name__ == "__main__":
    checks.run("Lesson 06: GRPO", globals(), checks.CHECKS)
