"""What a step logs about its batch. docs/metrics.md says in plain words what each number means."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from nanorl.advantages import teaching_groups
from nanorl.losses.aggregate import token_mean
from nanorl.rollout import Rollout


class Means:
    """Means over a batch that comes in micro-batches: each weighs as many tokens, or sequences, as it has."""

    def __init__(self):
        self.sums: dict[str, Tensor | float] = defaultdict(float)
        self.weight = 0

    def add(self, means: dict[str, Tensor], weight: int) -> None:
        for name, mean in means.items():
            self.sums[name] += mean * weight
        self.weight += weight

    def result(self) -> dict[str, float]:
        """NaN where nothing had a weight: no mean, not one of 0."""
        return {name: float(total) / self.weight if self.weight else math.nan for name, total in self.sums.items()}


def lengths_by_answer(rewards: Tensor, lengths: Tensor) -> dict[str, float]:
    """Mean tokens of the right responses (reward at least 1) and of the others; NaN where there is none."""
    right, lengths = rewards >= 1, lengths.double()
    return {"length_right": lengths[right].mean().item(), "length_wrong": lengths[~right].mean().item()}


def rollout_metrics(rollout: Rollout, described: dict[str, list[float]]) -> dict[str, float]:
    """Rewards and lengths of one batch of rollouts."""
    rewards, lengths = rollout.rewards, rollout.lengths.double()
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "zero_variance_share": 1 - len(teaching_groups(rewards, rollout.groups)) / len(rollout.groups.unique()),
        "length": lengths.mean().item(),
        "length_max": lengths.max().item(),
        **lengths_by_answer(rewards, lengths),
        "truncated_share": rollout.finish.count("length") / len(rollout),
        **{name: sum(values) / len(values) for name, values in described.items()},
    }


@torch.no_grad()
def token_metrics(logprobs: Tensor, entropy: Tensor, rollout: Rollout) -> dict[str, Tensor]:
    """Means over tokens: entropy, and |scored - sampled| log-prob, which before the update is rounding or a bug."""
    mismatch = (logprobs - rollout.behavior_logprobs).abs()
    return {"entropy": token_mean(entropy, rollout.mask), "mismatch": token_mean(mismatch, rollout.mask)}


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the trainable tokens, values and returns (B, T): how much the critic knows.

    1: every return is foreseen but for a constant; 0: no better than a constant; NaN where all returns are equal. Of a
    whole batch, since it is no mean that parts of one could add up to.
    """
    values, returns = values[mask.bool()].double(), returns[mask.bool()].double()
    if len(returns) == 0 or returns.min() == returns.max():
        return math.nan
    return 1 - ((returns - values).var(correction=0) / returns.var(correction=0)).item()
