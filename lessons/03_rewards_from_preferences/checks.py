"""Checks of lesson 03, shared by exercise.py and solution.py. Values by hand, and against nanorl's own functions."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Failed, gradient, require, require_close, run

import nanorl.losses

__all__ = ["CHECKS", "run"]

NAN = float("nan")
TWO = "scores 2 against 0, and 0 against 1"
EOS = 2


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.double)


def pairs(seed: int, n: int = 200) -> tuple[Tensor, Tensor]:
    """Random scores of chosen and rejected, float64; the chosen ones are mostly higher."""
    generator = torch.Generator().manual_seed(seed)
    chosen = 1 + 2 * torch.randn(n, generator=generator, dtype=torch.double)
    return chosen.requires_grad_(), 2 * torch.randn(n, generator=generator, dtype=torch.double).requires_grad_()


def check_bradley_terry_loss(bradley_terry_loss):
    """The sigmoid of -1000 is 0 and its logarithm infinite; torch.nn.functional.logsigmoid takes both at once. Mean
    over pairs, with a minus in front."""
    chosen, rejected = f64([2.0, 0.0]), f64([0.0, 1.0])
    require_close(bradley_terry_loss(chosen, rejected), (0.126928011 + 1.313261688) / 2, TWO, tolerance=1e-8)
    require_close(bradley_terry_loss(f64([5.0]), f64([5.0])), math.log(2), "equal scores")
    chosen = f64([-1000.0, 1000.0]).requires_grad_()
    case = "scores -1000 against 0, and 1000 against 0"
    loss = bradley_terry_loss(chosen, f64([0.0, 0.0]))
    require_close(loss, 500.0, case)
    require_close(gradient(loss, chosen, case), [-0.5, 0.0], case + ", gradient")
    chosen, rejected = pairs(1)
    want, _ = nanorl.losses.bradley_terry_loss(chosen, rejected)
    require_close(bradley_terry_loss(chosen, rejected), want.detach(), "200 random pairs")


def check_bradley_terry_gradient(bradley_terry_gradient):
    """d/dx -log sigmoid(x) = -(1 - sigmoid(x)): minus the probability the model gave the other answer. Divide by N. The
    rejected score enters with the opposite sign."""

    def require_both(chosen: Tensor, rejected: Tensor, want: tuple, case: str) -> None:
        found = bradley_terry_gradient(chosen.detach(), rejected.detach())
        require(isinstance(found, tuple) and len(found) == 2, f"{case}: expected two tensors")
        for name, got, expected in zip(("chosen", "rejected"), found, want, strict=True):
            require_close(got, expected, f"{case}, by the {name} scores")

    require_both(f64([0.0]), f64([0.0]), ([-0.5], [0.5]), "equal scores")
    p = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))]  # of the chosen ones
    want = [-(1 - p[0]) / 2, -(1 - p[1]) / 2]
    require_both(f64([2.0, 0.0]), f64([0.0, 1.0]), (want, [-x for x in want]), TWO)
    chosen, rejected = pairs(2)
    loss, _ = nanorl.losses.bradley_terry_loss(chosen, rejected)
    require_both(chosen, rejected, torch.autograd.grad(loss, (chosen, rejected)), "200 random pairs")


def check_outcome_scores(outcome_scores):
    """The last place where the mask is 1, row by row: with padding on the left the number of tokens is not that place.
    Choose the state first, then multiply: NaN times 0 is NaN."""
    hidden = torch.arange(24, dtype=torch.double).view(3, 4, 2)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    hidden[mask == 0] = NAN
    weight = f64([1.0, -10.0])
    want = [2 - 30.0, 14 - 150.0, 22 - 230.0]
    require_close(outcome_scores(hidden, weight, mask), want, "padding on the right, on the left, nowhere")
    require_close(outcome_scores(hidden, weight, mask.double()), want, "the same, the mask as numbers")
    require_close(outcome_scores(hidden[:1], weight, mask[:1]), want[:1], "the first row of these")
    require_close(outcome_scores(hidden[:1, :2], weight, mask[:1, :2]), want[:1], "the same row without its padding")


def check_calibration_error(calibration_error):
    """p = sigmoid of the absolute difference; its bin is floor((p - 0.5) * 2 * bins), the last one for p = 1. A bin's
    distance counts once for each of its pairs; empty bins do not count."""

    def require_number(chosen: Tensor, rejected: Tensor, want: float, case: str, **options) -> None:
        got = calibration_error(chosen.detach(), rejected.detach(), **options)
        require_close(torch.as_tensor(got, dtype=torch.double), want, case)

    sure = math.log(0.75 / 0.25)  # p = 0.75
    chosen, nothing = f64([sure, sure, sure, -sure]), torch.zeros(4, dtype=torch.double)
    require_number(chosen, nothing, 0.0, "p = 0.75 four times, right three times")
    require_number(-chosen, nothing, 0.5, "p = 0.75 four times, right once")
    ties = f64([0.0, 0.0, math.log(0.55 / 0.45), math.log(0.55 / 0.45)])
    require_number(ties, nothing, 0.025, "two ties (p = 0.5, and not right), p = 0.55 twice, right twice")
    require_number(f64([1000.0, 1000.0]), nothing[:2], 0.0, "p = 1 twice, right twice")
    require_number(f64([-1000.0, math.log(19)]), nothing[:2], 0.475, "p = 1, wrong, and p = 0.95, right: one bin")
    certain = f64([sure, sure, -sure, 1000.0])
    require_number(certain, nothing, 3 / 4 * (0.75 - 2 / 3), "p = 0.75 three times, right twice; p = 1 once, right")
    far = f64([math.log(0.55 / 0.45), math.log(0.95 / 0.05)])
    require_number(far, nothing[:2], (0.45 + 0.05) / 2, "p = 0.55 and 0.95, both right")
    require_number(far, nothing[:2], 0.25, "p = 0.55 and 0.95, both right, a single bin", bins=1)
    generator = torch.Generator().manual_seed(3)
    difference = 3 * torch.rand(2000, generator=generator, dtype=torch.double)
    labels = torch.rand(2000, generator=generator, dtype=torch.double) < difference.sigmoid()
    honest = torch.where(labels, difference, -difference)
    bins = ((difference.sigmoid() - 0.5) * 10).long()
    distances = [(difference.sigmoid() - labels.double())[bins == b].sum().abs().item() for b in range(5)]
    require_number(honest, torch.zeros_like(honest), sum(distances) / 2000, "2000 pairs labelled as the model believes")


def check_scores_that_depend_on_their_company(scores_that_depend_on_their_company):
    """What is `last` for a batch of one? And for a row that is shorter than the longest?"""
    try:
        scores = torch.arange(12, dtype=torch.double).view(3, 4)
        lengths = torch.tensor([2, 4, 1])
        case = "lengths 2, 4, 1"
        require_close(scores_that_depend_on_their_company(scores, lengths), [1.0, 7.0, 8.0], case)
        alone = [scores_that_depend_on_their_company(scores[i : i + 1], lengths[i : i + 1]) for i in range(3)]
        require_close(torch.cat(alone), [1.0, 7.0, 8.0], "each row alone")
        dirty = scores.clone()
        dirty[0, 2:], dirty[2, 1:] = NAN, NAN
        require_close(scores_that_depend_on_their_company(dirty, lengths), [1.0, 7.0, 8.0], case + ", padding NaN")
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


def check_scores_that_tie(scores_that_tie):
    """How many stop tokens has a conversation of two turns, and which of them is the first? Which has a response that
    was cut off? And if the padding is the stop token too?"""
    try:
        scores = torch.arange(18, dtype=torch.double).view(3, 6)
        ids = torch.tensor([[5, 6, 7, EOS, 0, 0], [5, EOS, 6, 7, EOS, 0], [5, 6, 7, 8, 9, 4]])
        mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
        case = "one turn, two turns, cut off"
        want = [3.0, 10.0, 17.0]
        require_close(scores_that_tie(scores, ids, mask, EOS), want, case)
        padded = ids.masked_fill(mask == 0, EOS)
        require_close(scores_that_tie(scores, padded, mask, EOS), want, case + ", padded with the stop token")
        left = [torch.cat([x[:1, 4:], x[:1, :4]], dim=1) for x in (scores, ids, mask)]
        require_close(scores_that_tie(*left, EOS), want[:1], "one turn, padded on the left")
        cut = torch.tensor([[5, EOS, 6, 7, 8, EOS]]), torch.tensor([[1, 1, 1, 1, 1, 0]])
        require_close(scores_that_tie(scores[:1], *cut, EOS), [4.0], "two turns, cut off, padded with the stop token")
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_bradley_terry_loss,
    check_bradley_terry_gradient,
    check_outcome_scores,
    check_calibration_error,
    check_scores_that_depend_on_their_company,
    check_scores_that_tie,
]
