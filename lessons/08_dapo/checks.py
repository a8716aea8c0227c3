"""Checks of lesson 08, shared by exercise.py and solution.py. Values by hand, and against nanorl's own functions."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Failed, gradient, require, require_close, run

import nanorl.losses

__all__ = ["CHECKS", "run"]

NAN = float("nan")
LENGTHS = [5, 1, 3, 2]  # of the random batches


def double(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double)


def mask_of(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).double()


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    """Random log-probs, old log-probs, advantages and mask, float64; many ratios leave the band."""
    generator = torch.Generator().manual_seed(seed)
    mask = mask_of(LENGTHS)
    logprobs = -torch.rand(mask.shape, generator=generator, dtype=torch.double) * 3
    old = logprobs + 0.4 * torch.randn(mask.shape, generator=generator, dtype=torch.double)
    logprobs, old = (x.masked_fill(mask == 0, NAN) for x in (logprobs, old))
    return logprobs.requires_grad_(), old, double([1.5, -0.5, -0.5, -0.5]), mask


def check_room_to_grow(room_to_grow):
    """The clip bounds the ratio: the new probability is at most p (1 + clip_high). And no probability is above 1."""
    p = double([0.01, 0.9, 0.5, 0.8, 1.0, 0.0])
    require_close(room_to_grow(p, 0.2), [0.002, 0.1, 0.1, 0.16, 0.0, 0.0], f"p {p.tolist()}, clip_high 0.2")
    require_close(room_to_grow(p, 0.28), [0.0028, 0.1, 0.14, 0.2, 0.0, 0.0], f"p {p.tolist()}, clip_high 0.28")


def check_soft_overlong_penalty(soft_overlong_penalty):
    """((max_length - buffer) - length) / buffer between the two ends: negative, and never below -1 or above 0."""
    lengths = torch.tensor([1, 16_384, 16_385, 18_432, 20_480, 20_481])
    case = f"lengths {lengths.tolist()}, longest 20480, buffer 4096 (the paper's)"
    require_close(soft_overlong_penalty(lengths, 20_480, 4096), [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0], case)
    lengths = torch.tensor([3, 25, 26, 27])
    case = f"lengths {lengths.tolist()}, longest 27, buffer 2"
    require_close(soft_overlong_penalty(lengths, 27, 2), [0.0, 0.0, -0.5, -1.0], case)


def check_groups_that_teach(groups_that_teach):
    """A group teaches if its largest reward exceeds its smallest: all right and all wrong are both out. Rounding can
    put the mean of equal rewards beside them, so do not ask the mean. Keep the order, cut behind `wanted`."""
    rewards = double([[1, 1, 1], [0, 1, 0], [0, 0, 0], [0.1, 0.1, 0.1], [1, 1, 0], [0.5, 0.25, 0.5]])
    for wanted, want in ((2, [1, 4]), (3, [1, 4, 5]), (8, [1, 4, 5])):
        got = groups_that_teach(rewards, wanted)
        case = f"rewards {rewards.tolist()}, {wanted} wanted"
        require(isinstance(got, torch.Tensor) and got.dtype == torch.long, f"{case}: expected a tensor of integers")
        require_close(got, want, case)
    require_close(groups_that_teach(torch.full((4, 7), 0.1), 2), [], "28 rewards of 0.1 (float32): no group teaches")


def check_dapo_loss(dapo_loss):
    """The ratio, the clip with its two bounds, the smaller of the two products, then one sum over all tokens divided by
    one count of tokens. Choose with torch.where before exp and before the sum; detach the old log-probs."""
    mask = mask_of([1, 1, 1, 1])
    logprobs = double([1.5, 1.5, 0.5, 0.5]).log()[:, None].requires_grad_()
    old = torch.zeros_like(mask).requires_grad_()
    advantages = double([1.0, -1.0, -1.0, 1.0])
    case = "ratios [1.5, 1.5, 0.5, 0.5], advantages [1, -1, -1, 1], one token each, clip 0.2 / 0.28"
    loss = dapo_loss(logprobs, old, advantages, mask)
    require_close(loss, (-1.28 + 1.5 + 0.8 - 0.5) / 4, case)
    require_close(gradient(loss, logprobs, case), [[0.0], [1.5 / 4], [0.0], [-0.5 / 4]], case + ", gradient")
    leaked = torch.autograd.grad(dapo_loss(logprobs, old, advantages, mask), old, allow_unused=True)[0]
    require(leaked is None or not leaked.any(), f"{case}: a gradient reaches the old log-probs")
    mask = mask_of([2, 6])
    logprobs = torch.full((2, 6), -1.0, dtype=torch.double, requires_grad=True)
    case = "ratio 1, lengths 2 and 6, advantages [1, -1]"
    loss = dapo_loss(logprobs, logprobs.detach(), double([1.0, -1.0]), mask)
    require_close(loss, 0.5, case)
    want = mask * double([[-0.125], [0.125]])
    require_close(gradient(loss, logprobs, case), want, case + ", gradient")
    for seed in (1, 2, 3):
        policy, *inputs = batch(seed)
        want, _ = nanorl.losses.dapo_loss(policy, *inputs)
        case = f"random inputs, lengths {LENGTHS}, NaN in the padding, clip 0.2 / 0.28"
        loss = dapo_loss(policy, *(x.clone() for x in inputs))
        require_close(loss, want.detach(), case)
        require_close(gradient(loss, policy, case), gradient(want, policy, ""), case + ", gradient")


def check_loss_that_depends_on_the_micro_batch(loss_that_depends_on_the_micro_batch):
    """What does a micro-batch of one row of 2 tokens divide by, and one of 6? By how many tokens would the whole batch
    have divided each of them?"""
    try:
        mask = mask_of([2, 6])
        per_token = double([[-1.0], [1.0]]).expand(2, 6).clone().requires_grad_()
        for micro_batch in (2, 1):
            case = f"lengths 2 and 6, losses of a token -1 and 1, micro-batches of {micro_batch}"
            loss = loss_that_depends_on_the_micro_batch(per_token, mask, micro_batch)
            require_close(loss, 0.5, case)
            require_close(gradient(loss, per_token, case), mask / 8, case + ", gradient")
        generator = torch.Generator().manual_seed(1)
        mask = mask_of(LENGTHS)
        per_token = torch.randn(mask.shape, generator=generator, dtype=torch.double)
        whole = (per_token * mask).sum() / sum(LENGTHS)
        for micro_batch in (1, 2, 3, 4):
            case = f"random losses, lengths {LENGTHS}, micro-batches of {micro_batch}"
            require_close(loss_that_depends_on_the_micro_batch(per_token, mask, micro_batch), whole, case)
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


def check_loss_that_fades_as_the_task_is_mastered(loss_that_fades_as_the_task_is_mastered):
    """Which groups are in the sum, and which in the denominator?"""
    try:
        generator = torch.Generator().manual_seed(1)
        per_token = torch.randn(16, 2, 3, generator=generator, dtype=torch.double)
        mask = mask_of([3, 1]).expand(16, 2, 3).clone()
        rewards = torch.ones(16, 2, dtype=torch.double)
        rewards[:2, 1] = 0  # two groups teach, fourteen are solved
        want = (per_token * mask)[:2].sum() / 8
        for groups in (2, 3, 16):
            case = f"two groups that teach, {groups - 2} solved ones, lengths 3 and 1 in each"
            values = per_token[:groups].clone().requires_grad_()
            loss = loss_that_fades_as_the_task_is_mastered(values, mask[:groups], rewards[:groups])
            require_close(loss, want, case)
            found = gradient(loss, values, case)
            require_close(found[:2], mask[:2] / 8, case + ", gradient")
            require(not found[2:].any(), f"{case}: a solved group has a gradient")
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_room_to_grow,
    check_soft_overlong_penalty,
    check_groups_that_teach,
    check_dapo_loss,
    check_loss_that_depends_on_the_micro_batch,
    check_loss_that_fades_as_the_task_is_mastered,
]
