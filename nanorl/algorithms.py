"""How the algorithms differ, as one table: name -> loss, advantage, what the loss averages over."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nanorl.losses import grpo_loss
from nanorl.losses.aggregate import sequence_count, token_count


@dataclass(frozen=True)
class Algorithm:
    loss: Callable  # of the loss contract: (logprobs, old_logprobs, advantages, mask, *, ...) -> (loss, metrics)
    advantage_scale: Literal["group", "batch", "none"]
    mean_over: Literal["tokens", "sequences"]  # what `denominator` counts

    def denominator(self, mask: Tensor) -> int:
        """Of the whole batch, mask (B, T): handed to each micro-batch's loss."""
        return max(1, token_count(mask) if self.mean_over == "tokens" else sequence_count(mask))

    def chosen(self, **options) -> dict:
        """The options that are set (not None). Raises ValueError for one that is not in the loss's signature."""
        options = {name: value for name, value in options.items() if value is not None}
        unknown = [name for name in options if name not in inspect.signature(self.loss).parameters]
        if unknown:
            raise ValueError(f"{self.loss.__name__} has no {' and no '.join(unknown)}: leave it away")
        return options


ALGORITHMS = {
    "grpo": Algorithm(grpo_loss, advantage_scale="group", mean_over="sequences"),
}
