"""Solutions of lesson 03. They pass the checks of exercise.py:

python lessons/03_rewards_from_preferences/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """chosen, rejected (N,) -> scalar"""
    return -logsigmoid(chosen - rejected).mean()


def bradley_terry_gradient(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """chosen, rejected (N,) -> (N,), (N,)"""
    surprise = (rejected - chosen).sigmoid() / len(chosen)  # of the model at the label
    return -surprise, surprise


def outcome_scores(hidden: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """hidden (B, T, D), weight (D,), mask (B, T) -> (B,)"""
    places = torch.arange(mask.shape[1])
    last = torch.where(mask.bool(), places, -1).amax(1)  # (B,)
    return hidden[torch.arange(len(hidden)), last] @ weight


def calibration_error(chosen: Tensor, rejected: Tensor, bins: int = 5) -> float:
    """chosen, rejected (N,) -> a number"""
    sure = (chosen - rejected).abs().sigmoid()  # (N,)
    right = (chosen > rejected).double()
    bin_of = ((sure - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    total = 0.0
    for b in bin_of.unique():
        inside = bin_of == b
        total += (sure[inside].mean() - right[inside].mean()).abs().item() * inside.sum().item()
    return total / len(sure)


def scores_that_depend_on_their_company(scores: Tensor, lengths: Tensor) -> Tensor:
    """The bug: lengths.max() is one place for all rows, the end of the batch. Each row ends where it ends."""
    rows = torch.arange(len(scores))
    last = lengths - 1
    return scores[rows, last]


def scores_that_tie(scores: Tensor, ids: Tensor, mask: Tensor, eos_id: int) -> Tensor:
    """The bug: the first stop token of a conversation ends its first turn, which chosen and rejected share; and a row
    without any has its first at place 0. What a token is does not say where a row ends; the mask does."""
    places = torch.arange(ids.shape[1])
    last = torch.where(mask.bool(), places, -1).amax(1)
    return scores.gather(1, last[:, None]).squeeze(1)


if __name__ == "__main__":
    checks.run("Lesson 03: rewards from preferences", globals(), checks.CHECKS)
