"""Checks of lesson 09, shared by exercise.py and solution.py. Values by hand, and against nanorl's own functions."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Failed, gradient, require, require_close, run

import nanorl.losses

__all__ = ["CHECKS", "run"]

NAN = float("nan")
S = math.exp(0.1 / 3)  # of the response below
CASE = "log-ratios [0.2, 0, -0.1, padding]"
WIDE = {"clip_low": 1.0, "clip_high": 10.0}  # clips nothing


def one_response() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log-probs, old log-probs and mask, (1, 4)."""
    old = torch.tensor([[-1.0, -1.0, -1.0, NAN]], dtype=torch.double)
    logprobs = torch.tensor([[-0.8, -1.0, -1.1, NAN]], dtype=torch.double, requires_grad=True)
    return logprobs, old, torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.double)


def batch(seed: int, padding: float = NAN) -> tuple[torch.Tensor, ...]:
    """Random log-probs, old log-probs, advantages and mask, float64, B = 4, T = 5; some ratios leave the tiny band."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(5) < torch.tensor([5, 1, 3, 2])[:, None]).double()
    logprobs = -torch.rand(4, 5, generator=generator, dtype=torch.double) * 3
    old = logprobs + 0.001 * torch.randn(4, 5, generator=generator, dtype=torch.double)
    logprobs, old = (x.masked_fill(mask == 0, padding) for x in (logprobs, old))
    return logprobs.requires_grad_(), old, torch.tensor([1.5, -0.5, -0.5, -0.5], dtype=torch.double), mask


def check_sequence_ratio(sequence_ratio):
    """Mean of the log-ratios over the response's own tokens, then exp. Divide by mask.sum(1): not by 1 (that is the
    ratio of the whole response, a product) and not by T. Choose with torch.where, detach the old log-probs."""
    logprobs, old, mask = one_response()
    old.requires_grad_()
    got = sequence_ratio(logprobs, old, mask)
    require_close(got, [S], CASE)
    require_close(gradient(got.sum(), logprobs, CASE), [[S / 3] * 3 + [0.0]], CASE + ", gradient")
    leaked = torch.autograd.grad(sequence_ratio(logprobs, old, mask).sum(), old, allow_unused=True)[0]
    require(leaked is None or not leaked.any(), f"{CASE}: a gradient reaches the old log-probs")


def check_gspo_loss(gspo_loss):
    """-min(s A, clip(s) A) of each response, then the mean over responses: the number of tokens is in s already."""
    logprobs, old, mask = one_response()
    two = torch.tensor([2.0], dtype=torch.double)
    case = f"{CASE}, advantage 2, a wide band"
    loss = gspo_loss(logprobs, old, two, mask, **WIDE)
    require_close(loss, -2 * S, case)
    require_close(gradient(loss, logprobs, case), [[-2 * S / 3] * 3 + [0.0]], case + ", gradient")
    case = f"{CASE}, advantage 2, clip 0.03 / 0.03"
    loss = gspo_loss(logprobs, old, two, mask, 0.03, 0.03)
    require_close(loss, -2.06, case)
    require_close(gradient(loss, logprobs, case), [[0.0] * 4], case + ", gradient: the response is left out whole")
    for seed in (1, 2, 3):
        policy, *inputs = batch(seed)
        want, _ = nanorl.losses.gspo_loss(policy, *inputs)
        case = "random inputs, lengths 5, 1, 3, 2, clip 3e-4 / 4e-4"
        loss = gspo_loss(policy, *(x.clone() for x in inputs))
        require_close(loss, want.detach(), case)
        require_close(gradient(loss, policy, case), gradient(want, policy, ""), case + ", gradient")


def check_token_variant_ratio(token_variant_ratio):
    """sg(s) times pi / sg(pi), where sg is .detach(): the second factor has the value 1 and the gradient of log pi."""
    logprobs, old, mask = one_response()
    ratio = token_variant_ratio(logprobs, old, mask)
    require_close(ratio[:, :3], [[S] * 3], CASE)
    weights = torch.tensor([[3.0, -1.0, 0.5, 0.0]], dtype=torch.double)  # as advantages of the tokens
    case = f"{CASE}, tokens weighed by 3, -1, 0.5"
    found = gradient((ratio * weights).sum(), logprobs, case)
    require_close(found, [[3 * S, -S, 0.5 * S, 0.0]], case + ", gradient")
    for seed in (1, 2):
        policy, old, advantages, mask = batch(seed)
        case = "lengths 5, 1, 3, 2, one advantage a response: the gradient of GSPO itself"
        per_response = torch.where(mask.bool(), token_variant_ratio(policy, old, mask), 0.0).sum(1) / mask.sum(1)
        want, _ = nanorl.losses.gspo_loss(policy, old, advantages, mask, **WIDE)
        found = gradient(-(per_response * advantages).mean(), policy, case)
        require_close(found, gradient(want, policy, ""), case)


def check_left_out(left_out):
    """Only a move in the wanted direction is clipped: up with a positive advantage, down with a negative one."""
    ratio = torch.tensor([1.001, 1.001, 0.999, 0.999, 1.00035, 0.99975, 1.0], dtype=torch.double)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.double)
    got = left_out(ratio, advantages, 3e-4, 4e-4)
    case = f"ratios {ratio.tolist()}, advantages {advantages.tolist()}, clip 3e-4 / 4e-4"
    require(isinstance(got, torch.Tensor) and got.dtype == torch.bool, f"{case}: expected a tensor of bool")
    require_close(got, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], case)


def check_loss_that_listens_to_the_longest(loss_that_listens_to_the_longest):
    """Every token of a response now holds the same number. How often does the mean count a response of 25 tokens, and
    how often one of 3? Which mean counts each once?"""
    try:
        logprobs = torch.full((2, 25), -1.0, dtype=torch.double, requires_grad=True)
        mask = torch.ones(2, 25, dtype=torch.double)
        mask[1, 3:] = 0
        advantages = torch.tensor([1.0, -1.0], dtype=torch.double)
        case = "ratio 1, lengths 25 and 3, advantages [1, -1]"
        loss = loss_that_listens_to_the_longest(logprobs, logprobs.detach(), advantages, mask)
        require_close(loss, 0.0, case)
        want = torch.where(mask.bool(), torch.tensor([[-1 / 50], [1 / 6]], dtype=torch.double), 0.0)
        require_close(gradient(loss, logprobs, case)[:, :4], want[:, :4], case + ", gradient of the first four tokens")
        for seed in (1, 2, 3):
            policy, *inputs = batch(seed, padding=-7.0)
            want, _ = nanorl.losses.gspo_loss(policy, *inputs)
            case = "random inputs, lengths 5, 1, 3, 2"
            loss = loss_that_listens_to_the_longest(policy, *inputs)
            require_close(loss, want.detach(), case)
            require_close(gradient(loss, policy, case), gradient(want, policy, ""), case + ", gradient")
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_sequence_ratio,
    check_gspo_loss,
    check_token_variant_ratio,
    check_left_out,
    check_loss_that_listens_to_the_longest,
]
