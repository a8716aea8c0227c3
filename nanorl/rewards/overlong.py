"""The soft overlong penalty of DAPO (Yu et al. 2025, eq. 13; arXiv:2503.14476)."""

from __future__ import annotations

from torch import Tensor

BUFFER = 0.1  # of the longest response: where the penalty grows. DAPO: 4,096 of 20,480 tokens


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int | None = None) -> Tensor:
    """lengths (B,) in tokens -> (B,): 0 up to max_length - buffer tokens, then linearly down to -1 at max_length.

    A response that is cut off is then worth less than one that ends, and one that nearly is a little less: the reward
    does not jump at the limit. `buffer` in tokens, default: BUFFER of max_length, at least 1.
    """
    buffer = max(1, int(BUFFER * max_length)) if buffer is None else buffer
    if not 1 <= buffer <= max_length:
        raise ValueError(f"the buffer must be 1 to {max_length} tokens, the longest response, not {buffer}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)
