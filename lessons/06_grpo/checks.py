"""Checks of lesson 06, shared by exercise.py and solution.py. Values by hand, and against nanorl's own functions."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Failed, gradient, require, require_close, run

import nanorl.advantages
import nanorl.losses
from nanorl.losses.aggregate import sequence_mean as reference_mean

__all__ = ["CHECKS", "run"]

NAN = float("nan")


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Random inputs of the loss, float64, B = 4, T = 5; what lies outside the mask is NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 1, 3, 2])
    mask = (torch.arange(5) < lengths[:, None]).double()
    logprobs = -torch.rand(4, 5, generator=generator, dtype=torch.double) * 3
    old = logprobs + 0.4 * torch.randn(4, 5, generator=generator, dtype=torch.double)  # many ratios are clipped
    reference = logprobs + 0.4 * torch.randn(4, 5, generator=generator, dtype=torch.double)
    advantages = torch.tensor([1.5, -0.5, -0.5, -0.5], dtype=torch.double)
    padded = {name: x.masked_fill(mask == 0, NAN) for name, x in (("logprobs", logprobs), ("old", old))}
    return padded | {"ref": reference.masked_fill(mask == 0, NAN), "advantages": advantages, "mask": mask}


def check_group_advantages(group_advantages):
    """Mean and std along the last dimension, one row is one group; torch's std divides by G - 1. For equal rewards ask
    whether the largest equals the smallest: rounding can leave a std of 1e-17, and then eps does not make 0 of it."""
    got = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.double))
    # by hand: mean 1/4, std 1/2
    require_close(got, [[0.75 / 0.5001, *[-0.25 / 0.5001] * 3]], "rewards [1, 0, 0, 0]")
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 5.0, 7.0, 9.0]], dtype=torch.double)
    want = nanorl.advantages.group_advantages(rewards.flatten(), torch.arange(2).repeat_interleave(4)).view(2, 4)
    require_close(group_advantages(rewards.clone()), want, "two groups at once, [1, 0, 0, 0] and [3, 5, 7, 9]")
    for equal in (0.0, 1.0, 0.1):
        got = group_advantages(torch.full((1, 7), equal))
        require_close(got, [[0.0] * 7], f"seven rewards of {equal:g} (float32)", tolerance=0.0)


def check_clipped_objective(clipped_objective):
    """Two products, ratio x A and clamped ratio x A, and the smaller of them. For a negative A the smaller product is
    the more negative one: do not clip twice and do not take the maximum."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1], dtype=torch.double, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 2.0], dtype=torch.double)
    got = clipped_objective(ratio, advantages, 0.2, 0.28)
    case = "ratios [1.5, 1.5, 0.5, 0.5, 1.1], advantages [1, -1, -1, 1, 2], clip 0.2 / 0.28"
    require_close(got, [1.28, -1.5, -0.8, 0.5, 2.2], case)
    require_close(gradient(got.sum(), ratio, case), [0.0, -1.0, 0.0, 1.0, 2.0], case + ", gradient to the ratios")


def check_kl_k3(kl_k3):
    """d = ref_logprobs - logprobs, in this order: the tokens were drawn from the policy. It is never negative. The
    reference is frozen: detach it."""
    logprobs = torch.tensor([-1.0, -1.5, -0.7], dtype=torch.double, requires_grad=True)
    ref_logprobs = torch.tensor([-1.5, -1.0, -0.7], dtype=torch.double, requires_grad=True)
    got = kl_k3(logprobs, ref_logprobs)
    case = "log-probs [-1, -1.5, -0.7], reference [-1.5, -1, -0.7]"
    require_close(got, [0.106530659713, 0.148721270700, 0.0], case)
    want = [0.393469340287, -0.648721270700, 0.0]
    require_close(gradient(got.sum(), logprobs, case), want, case + ", gradient to the log-probs")
    leaked = torch.autograd.grad(kl_k3(logprobs, ref_logprobs).sum(), ref_logprobs, allow_unused=True)[0]
    require(leaked is None or not leaked.any(), f"{case}: a gradient reaches the frozen reference")


def check_sequence_mean(sequence_mean):
    """First the mean over each row's own tokens, then the mean over rows. Divide by mask.sum(1), not by T. Choose with
    torch.where: NaN * 0 is NaN."""
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, NAN, NAN, NAN]], dtype=torch.double, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.double)
    got = sequence_mean(values, mask)
    case = "values [[1, 1, 1, 1], [3, padding]]"
    require_close(got, 2.0, case)
    require_close(gradient(got, values, case), [[0.125] * 4, [0.5, 0.0, 0.0, 0.0]], case + ", gradient")
    made = batch(1)
    want = reference_mean(made["logprobs"], made["mask"])
    require_close(sequence_mean(made["logprobs"].clone(), made["mask"]), want, "random values, lengths 5, 1, 3, 2")


def check_grpo_loss(grpo_loss):
    """-sequence_mean(clipped_objective - beta x kl_k3). The ratio is exp(logprobs - old_logprobs), old_logprobs
    detached; advantages (B,) need a dimension to go with (B, T). Put the padding to 0 before anything else, or its NaN
    comes back in the backward pass."""
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.double)
    logprobs = torch.full((2, 3), -1.0, dtype=torch.double, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.double)
    loss = grpo_loss(
        logprobs, logprobs, advantages, mask, logprobs, 0.0
    )  # old and reference: detaching is the loss's job
    case = "before the first update, lengths 2 and 3, advantages [1, -1]"
    require_close(loss, 0.0, case)
    want = [[-0.25, -0.25, 0.0], [1 / 6, 1 / 6, 1 / 6]]
    require_close(gradient(loss, logprobs, case), want, case + ", gradient (the loss is 0, this is not)")
    for seed, beta in ((2, 0.0), (3, 0.04), (4, 1.0)):
        made = batch(seed)
        policy = made["logprobs"].clone().requires_grad_()
        inputs = (made["old"], made["advantages"], made["mask"])
        case = f"random inputs, lengths 5, 1, 3, 2, beta {beta:g}"
        loss = grpo_loss(policy, *(x.clone() for x in inputs), made["ref"].clone(), beta)
        reference, _ = nanorl.losses.grpo_loss(policy, *inputs, ref_logprobs=made["ref"], beta=beta)
        require_close(loss, reference.detach(), case)
        require_close(gradient(loss, policy, case), gradient(reference, policy, ""), case + ", gradient")


def check_loss_that_never_learns(loss_that_never_learns):
    """The loss should be 0 here; what else must the loss have? Print the gradient norm. Then ask of every tensor in the
    ratio: is it a number that was stored when the batch was sampled, or does it move with the weights?"""
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], dtype=torch.double, requires_grad=True)
    case = "log-probs [[-1, -2], [-0.5, -3]], advantages [1, -1]"
    loss = loss_that_never_learns(logprobs, torch.tensor([1.0, -1.0], dtype=torch.double))
    require_close(loss, 0.0, case)
    found = gradient(loss, logprobs, case)
    require_close(found, [[-0.25, -0.25], [0.25, 0.25]], f"{case}: the loss is 0 as it should be, but its gradient")


def check_loss_that_depends_on_its_neighbors(loss_that_depends_on_its_neighbors):
    """Which number in this function changes when a longer response joins the batch? Compute the loss of one response of
    2 tokens alone, then pad it to 10 columns: nothing may change."""
    generator = torch.Generator().manual_seed(5)
    logprobs = -torch.rand(2, 3, generator=generator, dtype=torch.double)
    old = logprobs + 0.1 * torch.randn(2, 3, generator=generator, dtype=torch.double)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.double)
    advantages = torch.tensor([1.0, -0.5], dtype=torch.double)
    for columns in (3, 10):
        width = (0, columns - 3)
        padded = [torch.nn.functional.pad(x, width) for x in (logprobs, old)]
        wide = torch.nn.functional.pad(mask, width)
        policy = padded[0].requires_grad_()
        loss = loss_that_depends_on_its_neighbors(policy, padded[1], advantages, wide)
        want, _ = nanorl.losses.grpo_loss(policy, padded[1], advantages, wide)
        case = f"two responses of 2 and 3 tokens in a batch of {columns} columns"
        try:
            require_close(loss, want.detach(), case)
            require_close(gradient(loss, policy, case), gradient(want, policy, ""), case + ", gradient")
        except Failed as failure:
            raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_group_advantages,
    check_clipped_objective,
    check_kl_k3,
    check_sequence_mean,
    check_grpo_loss,
    check_loss_that_never_learns,
    check_loss_that_depends_on_its_neighbors,
]
