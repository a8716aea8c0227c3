"""Exercises of lesson 14: best-of-n and its KL, where over-optimization begins, a length bias, and a silent bug. Fill
the blanks, run this file: it checks itself.

    python lessons/14_reward_hacking/exercise.py
"""

from __future__ import annotations

import math

import checks
import torch
from torch import Tensor

# ---- Part 1: four blanks


def best_of_n(probs: Tensor, scores: Tensor, n: int) -> Tensor:
    """Draw n responses independently, keep the one with the highest score: how likely is each of all N responses to be
    kept? No two scores are equal.

    probs, scores (N,) -> (N,)
    """
    raise NotImplementedError


def best_of_n_kl(n: int) -> float:
    """KL(best-of-n || policy) in nats, where no response ever comes twice: an upper bound everywhere else."""
    raise NotImplementedError


def turning_point(kl: Tensor, gold: Tensor) -> float:
    """Where over-optimization begins. For best-of-n Gao et al. 2023 fit gold - gold_0 = d (a - b d) with d = sqrt(KL):
    the KL of the top of this curve, a and b by least squares. The first point is the policy before any optimization, KL
    0 and gold gold_0.

    kl, gold (points,) -> a number; inf where the fitted curve has no top at a KL above 0
    """
    raise NotImplementedError


def length_bias(score: Tensor, gold: Tensor, length: Tensor) -> float:
    """Long responses may be better or worse than short ones, and a good reward model says so. The bias is what is left:
    the correlation of score and length between responses of equal gold. Take from each of the two what a straight line
    in gold explains, and correlate the rest (Pearson).

    score, gold, length (N,) -> a number
    """
    raise NotImplementedError


# ---- Part 2: a silent bug. The function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def gold_of_best(scores: Tensor, gold: Tensor, n: int) -> Tensor:
    """Of each prompt the expected gold of that response which the reward model likes best among n, from a pool of N
    responses: the mean over all choices of n of them. The r-th lowest of the pool is the best in C(r - 1, n - 1) of
    the C(N, n).

    scores, gold (prompts, N) -> (prompts,)

    The symptom: best-of-n looks like the perfect method. Gold rises with n and never turns, whatever reward model is
    asked. Even one whose scores are random numbers.
    """
    N = scores.shape[1]
    weights = [math.comb(below, n - 1) / math.comb(N, n) for below in range(N)]
    scores, gold = scores.sort(1).values, gold.sort(1).values
    return (gold * torch.tensor(weights, dtype=gold.dtype)).sum(1)


if __name__ == "__main__":
    checks.run("Lesson 14: reward hacking", globals(), checks.CHECKS)
