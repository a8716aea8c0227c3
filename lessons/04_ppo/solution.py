"""Solutions of lesson 04. They pass the checks of exercise.py:

python lessons/04_ppo/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor


def token_rewards(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float) -> Tensor:
    """scores (B,), logprobs, ref_logprobs, mask (B, T) -> (B, T)"""
    rewards = torch.where(mask.bool(), -beta * (logprobs - ref_logprobs), 0.0).detach()
    last = mask.long().sum(1) - 1
    rewards[torch.arange(len(scores)), last] += scores.detach()
    return rewards


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor
) -> tuple[Tensor, Tensor]:
    """rewards, values, mask (B, T), bootstrap (B,) -> (B, T), (B, T)"""
    mask = mask.bool()
    advantages = torch.zeros_like(values)
    later, next_value = torch.zeros_like(bootstrap), bootstrap
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        later = torch.where(mask[:, t], delta + gamma * lam * later, later)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = later
    return torch.where(mask, advantages, 0.0), torch.where(mask, advantages + values, 0.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """values, old_values, returns, mask (B, T) -> scalar"""
    values, old_values, returns = (torch.where(mask.bool(), x, 0.0) for x in (values, old_values, returns))
    old_values, returns = old_values.detach(), returns.detach()
    clipped = values.clamp(old_values - clip, old_values + clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum() / mask.sum()


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """values, mask (B, T) -> (B, T)"""
    chosen = values[mask.bool()]
    white = (values - chosen.mean()) / (chosen.var() + 1e-8).sqrt()
    return torch.where(mask.bool(), white, 0.0)


def targets_never_reached(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The bug: the targets were made of whitened advantages. Those have mean 0 and variance 1 by construction, so the
    targets lay at a distance of 1 from the values (1/2 of the square: 0.5) and had lost the reward's unit and level."""
    reward_to_go = (rewards * mask).flip(1).cumsum(1).flip(1)  # (B, T)
    advantages = torch.where(mask.bool(), reward_to_go - values, 0.0)
    returns = (advantages + values) * mask
    mean = advantages.sum() / mask.sum()
    variance = ((advantages - mean) ** 2 * mask).sum() / (mask.sum() - 1)
    advantages = (advantages - mean) / (variance + 1e-8).sqrt() * mask
    return advantages, returns


if __name__ == "__main__":
    checks.run("Lesson 04: PPO for RLHF", globals(), checks.CHECKS)
