"""What several seeds say, and how sure they are: means with 95 % intervals (Student's t over seeds)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

POINTS = 20_001  # of the numerical integral: seven digits of the quantile
TAIL = 0.05  # outside the interval


@functools.cache
def student_t(degrees: int) -> float:
    """The t that a t-distributed number with `degrees` (>= 1) of freedom exceeds in size with probability 5 %."""
    norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)

    def inside(t: float) -> float:
        x = torch.linspace(-t, t, POINTS, dtype=torch.float64)
        return norm * torch.trapezoid((1 + x**2 / degrees) ** (-(degrees + 1) / 2), x).item()

    low, high = 1.9, 13.0  # of infinitely many degrees 1.96, of one 12.71
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 1 - TAIL else (low, middle)
    return high


def mean_and_half(values: Tensor | Sequence[float]) -> tuple[Tensor, Tensor]:
    """(seeds, ...) -> the mean over seeds and half the width of its 95 % interval, which is NaN for a single seed."""
    values = torch.as_tensor(values, dtype=torch.float64)
    n = len(values)
    if n < 2:
        return values.mean(0), torch.full(values.shape[1:], math.nan, dtype=torch.float64)
    return values.mean(0), student_t(n - 1) * values.std(0, correction=1) / math.sqrt(n)
