"""Solutions of lesson 14. They pass the checks of exercise.py:

python lessons/14_reward_hacking/solution.py
"""

from __future__ import annotations

import math

import checks
import torch
from torch import Tensor


def best_of_n(probs: Tensor, scores: Tensor, n: int) -> Tensor:
    """probs, scores (N,) -> (N,). The best of n has at most this score where all n have: P(at most)^n."""
    order = scores.argsort()
    at_most = probs[order].cumsum(0)
    below = at_most - probs[order]
    kept = torch.empty_like(probs)
    kept[order] = at_most**n - below**n
    return kept


def best_of_n_kl(n: int) -> float:
    """The density of the best one's quantile u is n u^(n-1): its mean logarithm is log n - (n - 1) / n."""
    return math.log(n) - (n - 1) / n


def turning_point(kl: Tensor, gold: Tensor) -> float:
    """kl, gold (points,) -> a number"""
    d = kl.sqrt()
    columns = torch.stack([d, -(d**2)], 1)  # (points, 2)
    a, b = torch.linalg.lstsq(columns, (gold - gold[0])[:, None]).solution[:, 0].tolist()
    return (a / (2 * b)) ** 2 if a > 0 and b > 0 else math.inf


def length_bias(score: Tensor, gold: Tensor, length: Tensor) -> float:
    """score, gold, length (N,) -> a number"""
    centered = gold - gold.mean()

    def rest(values: Tensor) -> Tensor:
        values = values - values.mean()
        return values - (values @ centered) / (centered @ centered) * centered

    x, y = rest(score), rest(length)
    return (x @ y / (x.norm() * y.norm())).item()


def gold_of_best(scores: Tensor, gold: Tensor, n: int) -> Tensor:
    """scores, gold (prompts, N) -> (prompts,)

    The bug: gold was sorted by itself, so it was gold that chose. It has to stand in the order of the scores.
    """
    N = scores.shape[1]
    weights = [math.comb(below, n - 1) / math.comb(N, n) for below in range(N)]
    gold = gold.gather(1, scores.argsort(1))
    return (gold * torch.tensor(weights, dtype=gold.dtype)).sum(1)


if __name__ == "__main__":
    checks.run("Lesson 14: reward hacking", globals(), checks.CHECKS)
