"""Checks of lesson 07, shared by exercise.py and solution.py. Values by hand, and against nanorl's own functions."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import TOLERANCE, Failed, gradient, require, require_close, run

import nanorl.losses
from nanorl.advantages import group_advantages

__all__ = ["CHECKS", "run"]

NAN = float("nan")
REWARDS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


def doubles(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double)


def batch(seed: int, padding: float = NAN, width: int = 5) -> tuple[torch.Tensor, ...]:
    """Random log-probs, old log-probs, advantages and mask, float64, B = 4, lengths 5, 1, 3, 2; some are clipped."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(width) < torch.tensor([5, 1, 3, 2])[:, None]).double()
    logprobs = -torch.rand(4, width, generator=generator, dtype=torch.double) * 3
    old = logprobs + 0.3 * torch.randn(4, width, generator=generator, dtype=torch.double)
    logprobs, old = (x.masked_fill(mask == 0, padding) for x in (logprobs, old))
    return logprobs.requires_grad_(), old, doubles([0.75, -0.25, -0.25, -0.25]), mask


def check_centered_advantages(centered_advantages):
    """One subtraction. The mean is that of the row, kept as a column (keepdim=True)."""
    want = [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0.0] * 4]
    require_close(centered_advantages(doubles(REWARDS)), want, f"rewards {REWARDS}")
    require_close(centered_advantages(doubles([[2.0, 6.0]])), [[-2.0, 2.0]], "rewards [[2, 6]]")


def check_batch_advantages(batch_advantages):
    """Take .std() of the rewards as they are, not of what is left after the group's mean."""
    # 7 of 12 are right: squares around the mean sum to 7 * 5 / 12
    std = math.sqrt(7 * 5 / 12 / 11)
    want = doubles([[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0.0] * 4]) / (std + 1e-4)
    require_close(batch_advantages(doubles(REWARDS)), want, f"rewards {REWARDS}")
    require_close(batch_advantages(doubles([[1.0, 1.0]])), [[0.0, 0.0]], "rewards [[1, 1]]")
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(3, 5, generator=generator, dtype=torch.double)
    groups = torch.arange(3).repeat_interleave(5)
    want = group_advantages(rewards.flatten(), groups, scale="batch", eps=0.5).view(3, 5)
    require_close(batch_advantages(rewards, 0.5), want, "random rewards (3, 5), eps 0.5")


def check_dr_grpo_loss(dr_grpo_loss):
    """GRPO's loss of lesson 06, but a sum over tokens where that has a mean. Divide by len(logprobs) * max_length.
    Choose with torch.where before exp and before the sum: the padding may be NaN."""
    logprobs = torch.full((2, 4), -1.0, dtype=torch.double, requires_grad=True)
    mask = doubles([[1, 1, 1, 1], [1, 0, 0, 0]])
    case = "ratio 1, lengths 4 and 1, advantages [-1, -3], max_length 4"
    loss = dr_grpo_loss(logprobs, logprobs.detach(), doubles([-1.0, -3.0]), mask, 4)
    require_close(loss, 0.875, case)
    want = [[0.125] * 4, [0.375, 0.0, 0.0, 0.0]]
    require_close(gradient(loss, logprobs, case), want, case + ", gradient")
    for seed in (1, 2, 3):
        policy, *inputs = batch(seed)
        case = "random inputs, lengths 5, 1, 3, 2, max_length 8, clip 0.1 / 0.3"
        want, _ = nanorl.losses.dr_grpo_loss(policy, *inputs, max_length=8, clip_low=0.1, clip_high=0.3)
        loss = dr_grpo_loss(policy, *(x.clone() for x in inputs), 8, 0.1, 0.3)
        require_close(loss, want.detach(), case)
        require_close(gradient(loss, policy, case), gradient(want, policy, ""), case + ", gradient")
        old = inputs[0].clone().requires_grad_()
        loss = dr_grpo_loss(policy, old, *inputs[1:], 8)
        leaked = torch.autograd.grad(loss, old, allow_unused=True)[0]
        require(leaked is None or not leaked.nan_to_num().any(), f"{case}: a gradient reaches the old log-probs")


def check_push_on_going_on(push_on_going_on):
    """With k fillers and a stop token: probability (1 - stop)^k stop, k times d log p(go on)/dz and once
    d log p(stop)/dz, k + 2 tokens. Cut off: probability (1 - stop)^limit, no stop token."""

    def require_number(got, want: float, case: str) -> None:
        require(isinstance(got, (int, float)), f"{case}: expected a number, got {type(got).__name__}")
        require(abs(got - want) <= TOLERANCE, f"{case}: expected {want:.6g}, got {got:.6g}")

    for stop in (0.2, 0.5, 0.9):
        for limit in (1, 2, 62):
            require_number(push_on_going_on(stop, limit, False), 0.0, f"stop {stop}, limit {limit}, a constant")
    # limit 1: both responses have two tokens. limit 2: -s(1-s)/2 + (1-s)s(2s-1)/3 + (1-s)^2 2s/3
    require_number(push_on_going_on(0.2, 1, True), 0.0, "stop 0.2, limit 1, by length")
    require_number(push_on_going_on(0.2, 2, True), -0.2 * 0.8 / 6, "stop 0.2, limit 2, by length")
    for stop in (0.2, 0.5):
        mean_inverse = stop / (1 - stop) ** 2 * (-math.log(stop) - (1 - stop))
        want = stop - (1 + stop) * mean_inverse
        require_number(push_on_going_on(stop, 400, True), want, f"stop {stop}, limit 400, by length")


def check_loss_that_minds_its_company(loss_that_minds_its_company):
    """Put the same responses into a batch with more padding, or one response into a micro-batch of its own. What in the
    divisor changes?"""
    try:
        for seed in (1, 2, 3):
            policy, *inputs = batch(seed, padding=-7.0)
            want, _ = nanorl.losses.dr_grpo_loss(policy, *inputs, max_length=8)
            case = "random inputs, lengths 5, 1, 3, 2, max_length 8"
            loss = loss_that_minds_its_company(policy, *inputs, 8, 4)
            require_close(loss, want.detach(), case)
            require_close(gradient(loss, policy, case), gradient(want, policy, ""), case + ", gradient")
            parts = []
            for rows in (slice(0, 1), slice(1, 4)):
                width = int(inputs[2][rows].sum(1).max())
                part = [x[rows] if x.dim() == 1 else x[rows, :width] for x in (policy, *inputs)]
                parts.append(loss_that_minds_its_company(*part, 8, 4))
            require_close(sum(parts), want.detach(), case + ", in two micro-batches")
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_centered_advantages,
    check_batch_advantages,
    check_dr_grpo_loss,
    check_push_on_going_on,
    check_loss_that_minds_its_company,
]
