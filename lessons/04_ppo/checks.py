"""Checks of lesson 04, shared by exercise.py and solution.py. Values by hand, and against nanorl's own functions."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Failed, gradient, require, require_close, run

import nanorl.advantages
import nanorl.losses

__all__ = ["CHECKS", "run"]

NAN = float("nan")
LENGTHS = [5, 1, 3, 2]
RANDOM = f"random inputs, lengths {LENGTHS}"


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.double)


def random_batch(seed: int, count: int, padding: float = NAN) -> tuple[Tensor, ...]:
    """Mask, then that many random tensors, float64, B = 4, T = 5."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).double()
    values = torch.randn(count, 4, 5, generator=generator, dtype=torch.double)
    return mask, *values.masked_fill(mask == 0, padding)


def require_both(found, want: tuple, case: str) -> None:
    require(isinstance(found, tuple) and len(found) == 2, f"{case}: expected advantages and returns")
    for name, got, expected in zip(("advantages", "returns"), found, want, strict=True):
        require_close(got, expected, f"{case}, {name}")


def check_token_rewards(token_rewards):
    """The KL is paid for token by token, the score comes once, at place mask.sum(1) - 1. Choose with torch.where, since
    NaN * 0 is NaN; detach, since a policy gradient needs a number. Sum over a row: score - beta * sum KL."""
    mask = f64([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    logprobs = f64([[-1, -2, -0.5, NAN], [-1, -1, -1, -1], [-3, NAN, NAN, NAN]]).requires_grad_()
    ref = f64([[-1.5, -2, -1.5, NAN], [-1, -1, -1, -1], [-1, NAN, NAN, NAN]])
    scores = f64([1.0, -2.0, 0.5]).requires_grad_()
    case = "beta 0.1, scores [1, -2, 0.5], lengths 3, 4, 1"
    found = token_rewards(scores, logprobs, ref, mask, 0.1)
    require_close(found, [[-0.05, 0.0, 0.9, 0.0], [0.0, 0.0, 0.0, -2.0], [0.7, 0.0, 0.0, 0.0]], case)
    require(not found.requires_grad, f"{case}: a gradient reaches the scores or the log-probs")
    require_close(token_rewards(scores, logprobs, ref, mask, 0.0).sum(1), [1.0, -2.0, 0.5], "beta 0, sum of each row")
    require_close(scores, [1.0, -2.0, 0.5], "the scores that were given, afterwards")


def check_gae(gae):
    """Go from the last column to the first. Where the mask is 0, leave both the later advantage and the next value as
    they are. At lambda 0 only the next value counts, at lambda 1 only what is really earned."""
    none = torch.zeros(1, dtype=torch.double)
    rewards, values, mask = f64([[0, 1, NAN]]), f64([[0.5, 0.5, 7]]), f64([[1, 1, 0]])
    case = "rewards [0, 1], values [0.5, 0.5], padding 7, lambda 0.95"
    require_both(gae(rewards, values, mask, 1.0, 0.95, none), ([[0.475, 0.5, 0.0]], [[0.975, 1.0, 0.0]]), case)
    rewards, values, mask = f64([[1, 0, 2, 4]]), f64([[3, 5, 1, 2]]), torch.ones(1, 4, dtype=torch.double)
    case = "rewards [1, 0, 2, 4], values [3, 5, 1, 2]"
    one_step = f64([[1 + 5 - 3, 0 + 1 - 5, 2 + 2 - 1, 4 - 2]])
    found = gae(rewards, values, mask, 1.0, 0.0, none)
    require_both(found, (one_step, one_step + values), f"{case}, lambda 0: one step, then the critic")
    earned = f64([[7, 6, 6, 4]])
    found = gae(rewards, values, mask, 1.0, 1.0, none)
    require_both(found, (earned - values, earned), f"{case}, lambda 1: all that was earned from there on")
    found = gae(rewards, values, mask, 0.5, 1.0, none)
    earned = f64([[1 + 0 + 0.5 + 0.5, 0 + 1 + 1, 2 + 2, 4]])
    require_both(found, (earned - values, earned), f"{case}, lambda 1, gamma 0.5")
    found = gae(rewards, values, mask, 1.0, 1.0, f64([10]))
    require_close(found[1], [[17.0, 16.0, 16.0, 14.0]], f"{case}, lambda 1, cut off with 10 to come, returns")
    for seed in (1, 2):
        mask, rewards, values = random_batch(seed, 2)
        bootstrap = f64([0.0, 1.0, -2.0, 0.0])
        want = nanorl.advantages.gae(rewards, values, mask, gamma=0.9, lam=0.7, bootstrap=bootstrap)
        require_both(gae(rewards, values, mask, 0.9, 0.7, bootstrap), want, RANDOM)


def check_value_loss(value_loss):
    """The larger of the two errors. Clamp V around V_old, not around R. Divide the sum by the number of tokens in the
    batch. Old values and returns are numbers: detach."""
    one = torch.ones(1, 1, dtype=torch.double)
    for v, old, target, loss, slope in (
        (2, 1, 3, 1.62, 0.0),
        (2, 1, 0.5, 1.125, 1.5),
        (1.1, 1, 3, 1.805, -1.9),
    ):
        case = f"V = {v}, V_old = {old}, R = {target}, clip 0.2"
        values = f64([[v]]).requires_grad_()
        found = value_loss(values, f64([[old]]), f64([[target]]), one, 0.2)
        require_close(found, loss, case)
        require_close(gradient(found, values, case), [[slope]], case + ", gradient")
    for seed in (1, 2):
        mask, values, old, returns = random_batch(seed, 3)
        values.requires_grad_(), old.requires_grad_(), returns.requires_grad_()
        want, _ = nanorl.losses.value_loss(values, old, returns, mask, clip=0.3)
        found = value_loss(values, old, returns, mask, 0.3)
        require_close(found, want.detach(), RANDOM)
        require_close(gradient(found, values, RANDOM), gradient(want, values, ""), RANDOM + ", gradient")
        leaked = torch.autograd.grad(value_loss(values, old, returns, mask, 0.3), (old, returns), allow_unused=True)
        require(not any(x is not None and x.any() for x in leaked), "a gradient reaches the old values or the returns")


def check_whiten(whiten):
    """Mean and variance of the tokens alone: values[mask.bool()]. One mean for the batch, not one a row."""
    mask = f64([[1, 1, 1, 0, 0]])
    found = whiten(f64([[1, 2, 3, 100, NAN]]), mask)
    require_close(found, [[-1.0, 0.0, 1.0, 0.0, 0.0]], "[1, 2, 3, padding]", tolerance=1e-8)
    found = whiten(f64([[1, NAN], [3, NAN], [2, NAN]]), f64([[1, 0], [1, 0], [1, 0]]))
    require_close(found, [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], "rows of one token: 1, 3, 2", tolerance=1e-8)
    equal = f64([[3, 3]])
    require_close(whiten(equal, torch.ones_like(equal)), [[0.0, 0.0]], "equal values")
    for seed in (1, 2):
        mask, values = random_batch(seed, 1)
        require_close(whiten(values, mask), nanorl.advantages.whiten(values, mask), RANDOM)


def check_targets_never_reached(targets_never_reached):
    """What does the critic learn when its value is right already? With gamma = lambda = 1 its target is what the
    response earned from there on. Is `returns` that?"""
    try:
        rewards, values = f64([[0, 1]]), f64([[0.5, 0.5]])
        case = "rewards [0, 1], values [0.5, 0.5]"
        require_close(
            targets_never_reached(rewards, values, torch.ones_like(values))[1], [[1.0, 1.0]], f"{case}, returns"
        )
        for seed in (1, 2):
            mask, rewards, values = random_batch(seed, 2, padding=5.0)
            advantages, returns = nanorl.advantages.gae(rewards, values, mask, gamma=1.0, lam=1.0)
            want = nanorl.advantages.whiten(advantages, mask), returns
            require_both(targets_never_reached(rewards, values, mask), want, RANDOM)
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_token_rewards,
    check_gae,
    check_value_loss,
    check_whiten,
    check_targets_never_reached,
]
