"""From per-token values to one number. Which mean is taken is where the algorithms differ most.

Every mean has one denominator, that of the whole batch. A loop that splits the batch hands it to each micro-batch, and
the parts add up to what the whole would have given. A row without a trainable token is in no denominator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T), 0 where mask is 0: chosen, not multiplied, since NaN * 0 is NaN."""
    if mask.shape != values.shape:
        raise ValueError(f"expected a mask {tuple(values.shape)} like the values, got {tuple(mask.shape)}")
    return torch.where(mask.bool(), values, 0.0)


def token_mean(values: Tensor, mask: Tensor, denominator: float | None = None) -> Tensor:
    """Sum over all tokens / number of tokens. values, mask (B, T); denominator: tokens of the whole batch."""
    return masked(values, mask).sum() / divisor(denominator, token_count(mask))


def sequence_mean(values: Tensor, mask: Tensor, denominator: float | None = None) -> Tensor:
    """Mean over sequences of each one's mean over its tokens. denominator: sequences of the whole batch."""
    means = masked(values, mask).sum(1) / mask.bool().sum(1).clamp(min=1)  # (B,)
    return means.sum() / divisor(denominator, sequence_count(mask))


def constant_mean(values: Tensor, mask: Tensor, max_length: int, denominator: float | None = None) -> Tensor:
    """Sum over all tokens / (sequences x `max_length`), whatever the lengths. denominator: sequences, as above."""
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1 token, not {max_length}")
    return masked(values, mask).sum() / (divisor(denominator, sequence_count(mask)) * max_length)


def pair_mean(values: Tensor, denominator: float | None = None) -> Tensor:
    """Mean over pairs. values (B,), one a pair; denominator: pairs of the whole batch."""
    return values.sum() / divisor(denominator, len(values))


def sequence_logprobs(logprobs: Tensor, mask: Tensor, *, mean: bool = False) -> Tensor:
    """Log-prob of each whole response, (B, T) -> (B,): the sum over its tokens, or with `mean` that a token."""
    sums = masked(logprobs, mask).sum(1)
    return sums / mask.bool().sum(1).clamp(min=1) if mean else sums


def token_count(mask: Tensor) -> int:
    return int(mask.bool().sum())


def sequence_count(mask: Tensor) -> int:
    """Rows with at least one trainable token."""
    return int(mask.bool().any(1).sum())


def divisor(given: float | None, count: int) -> float:
    if given is None:
        return max(count, 1)  # an empty batch has loss 0, not NaN
    if not 0 < given < math.inf:
        raise ValueError(f"denominator must be positive and finite, not {given}: pass the count of the whole batch")
    return given
