"""Checks of lesson 14, shared by exercise.py and solution.py. Values by hand and by listing all choices."""

from __future__ import annotations

import math
import sys
from itertools import combinations
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Failed, require, require_close, run

__all__ = ["CHECKS", "run"]


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def require_number(got, want: float, case: str, tolerance: float = 1e-9) -> None:
    require(isinstance(got, float), f"{case}: expected a number (float), got {type(got).__name__}")
    require(got == want or abs(got - want) <= tolerance, f"{case}: expected {want:.6g}, got {got:.6g}")


def check_best_of_n(best_of_n):
    """Sort by score. The best of n scores at most s exactly if all n do: the probability of that is (sum of the probs
    up to s)^n. A response's own is the difference to the one below it."""
    case = "probs [0.2, 0.5, 0.3], scores [1, 0, 2]"
    probs, scores = numbers(0.2, 0.5, 0.3), numbers(1, 0, 2)
    require_close(best_of_n(probs, scores, 1), [0.2, 0.5, 0.3], case + ", n = 1")
    require_close(best_of_n(probs, scores, 2), [0.24, 0.25, 0.51], case + ", n = 2")
    require_close(best_of_n(probs, scores, 3), [0.343 - 0.125, 0.125, 1 - 0.343], case + ", n = 3")


def check_best_of_n_kl(best_of_n_kl):
    """Number the responses by the share u of all responses that score lower. The best of n has the density n u^(n - 1)
    where one response has the density 1. KL: the integral of n u^(n - 1) log(n u^(n - 1)) from 0 to 1; note that -log u
    has the mean 1/n."""
    for n, want in ((1, 0.0), (2, math.log(2) - 1 / 2), (64, math.log(64) - 63 / 64)):
        require_number(best_of_n_kl(n), want, f"n = {n}")


def check_best_of_n_and_best_of_n_kl(best_of_n, best_of_n_kl):
    """As good as exact for 2,000 equally likely responses, a bound for three."""
    many = torch.full((2000,), 1 / 2000, dtype=torch.float64)
    few = numbers(0.2, 0.5, 0.3)
    for n in (2, 8):
        kept = best_of_n(many, torch.arange(2000), n)
        kl = (kept * (kept / many).log()).sum().item()
        require_number(best_of_n_kl(n), kl, f"2,000 equally likely responses, n = {n}: KL", tolerance=1e-3)
        kept = best_of_n(few, numbers(1, 0, 2), n)
        kl = (kept * (kept / few).log()).sum().item()
        require(kl < best_of_n_kl(n), f"probs [0.2, 0.5, 0.3], n = {n}: KL {kl:.4f} is not below the bound")


def check_turning_point(turning_point):
    """Two columns, d and -d^2, against gold - gold_0: torch.linalg.lstsq. The parabola's top is at d = a / (2 b), a KL
    of its square; without a > 0 and b > 0 there is none."""
    kl = numbers(0, 1, 4, 9, 16)
    exact = -0.5 + kl.sqrt() * (2 - 0.5 * kl.sqrt())  # top at d = 2
    require_number(turning_point(kl, exact), 4.0, "gold = -0.5 + d (2 - 0.5 d)")
    noisy = exact + numbers(0, 0.1, -0.1, 0.1, 0.0)
    y, d = noisy + 0.5, kl.sqrt()  # the two normal equations, solved by hand
    s2, s3, s4, t1, t2 = (x.sum().item() for x in (d**2, d**3, d**4, d * y, d**2 * y))
    a, b = (t1 * s4 - t2 * s3) / (s2 * s4 - s3**2), (t1 * s3 - t2 * s2) / (s2 * s4 - s3**2)
    require_number(turning_point(kl, noisy), (a / (2 * b)) ** 2, "the same with noise")
    d = kl.sqrt()
    for gold, case in (
        (d**2, "gold = d^2, which never turns"),
        (-0.5 - d - 0.5 * d**2, "gold = -0.5 - d - 0.5 d^2, which falls from the start (a < 0, b > 0)"),
        (d + 0.5 * d**2, "gold = d + 0.5 d^2, which rises without end (a > 0, b < 0)"),
        (0.5 * d**2 - d, "gold = 0.5 d^2 - d, which turns up and not down (a < 0, b < 0)"),
    ):
        require_number(turning_point(kl, gold), math.inf, case)


def check_length_bias(length_bias):
    """rest(x) = x - mean - slope (gold - mean gold), slope = cov(x, gold) / var(gold). Then Pearson's correlation of
    rest(score) and rest(length)."""
    gold = numbers(-1, -1, 3, 3)
    length = numbers(8, 12, 3, 5)  # good responses are short
    case = "gold [-1, -1, 3, 3], length [8, 12, 3, 5]"
    require_number(length_bias(gold + 0.1 * length, gold, length), 1.0, case + ", score = gold + 0.1 length")
    even = numbers(-1.1, -0.9, 2.6, 3.4)  # what is left of gold: [-0.1, 0.1, -0.4, 0.4]
    want = (0.1 * 2 * 2 + 0.4 * 1 * 2) / math.sqrt((2 * 0.01 + 2 * 0.16) * (2 * 4 + 2 * 1))
    require_number(length_bias(even, gold, length), want, case + ", score [-1.1, -0.9, 2.6, 3.4]")
    generator = torch.Generator().manual_seed(0)
    gold, noise, length = torch.randn(3, 2000, generator=generator, dtype=torch.float64)
    length = length - 2 * gold
    found = length_bias(gold + 0.1 * noise, gold, length)
    raw = torch.corrcoef(torch.stack([gold + 0.1 * noise, length]))[0, 1].item()
    case = f"an honest reward model where good is short (plain correlation {raw:.2f})"
    require(isinstance(found, float) and abs(found) < 0.1, f"{case}: expected about 0, got {found}")


def check_gold_of_best(gold_of_best):
    """Who chooses, and what is then measured? Follow one response through the function: does its gold stay beside its
    score?"""
    try:
        generator = torch.Generator().manual_seed(3)
        scores, gold = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
        for n in (1, 2, 4, 6):
            want = []
            for s, g in zip(scores.tolist(), gold.tolist(), strict=True):
                picks = [g[max(chosen, key=lambda i, s=s: s[i])] for chosen in combinations(range(6), n)]
                want.append(sum(picks) / len(picks))
            require_close(gold_of_best(scores, gold, n), want, f"three prompts, six responses to each, n = {n}")
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_best_of_n,
    check_best_of_n_kl,
    check_best_of_n_and_best_of_n_kl,
    check_turning_point,
    check_length_bias,
    check_gold_of_best,
]
