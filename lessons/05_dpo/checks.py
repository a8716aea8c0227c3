"""Checks of lesson 05, shared by exercise.py and solution.py. Values by hand, in a world that can be listed, and
against nanorl's own functions."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Failed, gradient, require, require_close, run

import nanorl.losses
from nanorl.exact import World

__all__ = ["CHECKS", "run"]

WORLD = World()  # 27 responses
REFERENCE = WORLD.random_logits(1)
REWARDS = 3 * torch.rand(27, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def both(answer, case: str) -> tuple:
    require(isinstance(answer, tuple) and len(answer) == 2, f"{case}: expected two results")
    return answer


def check_best_policy(best_policy):
    """pi* is pi_ref exp(r / beta), divided by what makes it sum to 1, Z. Put log pi* back into the objective: what is
    left is beta log Z. Work with logarithms (softmax, logsumexp): exp(r / beta) overflows."""
    case = "reference [0.5, 0.3, 0.2], rewards [0, 1, 2], beta 1"
    probs, value = both(best_policy(numbers(0.5, 0.3, 0.2), numbers(0, 1, 2), 1.0), case)
    weights = [0.5, 0.3 * math.e, 0.2 * math.e**2]
    require_close(probs, [w / sum(weights) for w in weights], case)
    require_close(value, math.log(sum(weights)), case + ", the maximum")
    probs, value = both(best_policy(numbers(0.5, 0.5), numbers(0, 10), 0.01), "rewards [0, 10], beta 0.01")
    require_close(probs, [0.0, 1.0], "rewards [0, 10], beta 0.01")
    require_close(value, 10 - 0.01 * math.log(2), "rewards [0, 10], beta 0.01, the maximum")
    for beta in (0.3, 1.0, 3.0):
        case = f"the world of 27 responses, beta {beta}"
        probs, value = both(best_policy(WORLD.probs(REFERENCE), REWARDS, beta), case)
        require_close(probs, WORLD.optimum(REFERENCE, REWARDS, beta), case)
        objective = (probs * REWARDS).sum() - beta * (probs * (probs / WORLD.probs(REFERENCE)).log()).sum()
        require_close(value, objective, case + ", the maximum")


def check_dpo_loss(dpo_loss):
    """h = log pi / pi_ref of the chosen response, minus that of the rejected one. Take logsigmoid, not the log of a
    sigmoid, and detach the reference."""
    policy = [numbers(-10.0).requires_grad_(), numbers(-14.0).requires_grad_()]
    ref = [numbers(-12.0).requires_grad_(), numbers(-13.0).requires_grad_()]
    case = "chosen -10 (reference -12), rejected -14 (-13), beta 0.1"
    loss = dpo_loss(*policy, *ref, 0.1)
    require_close(loss, math.log(1 + math.exp(-0.3)), case)
    slope = 0.1 / (1 + math.exp(0.3))
    require_close(gradient(loss, policy[0], case), [-slope], case + ", gradient on the chosen log-prob")
    require_close(gradient(dpo_loss(*policy, *ref, 0.1), policy[1], case), [slope], case + ", on the rejected one")
    for leaked in torch.autograd.grad(dpo_loss(*policy, *ref, 0.1), ref, allow_unused=True):
        require(leaked is None or not leaked.any(), f"{case}: a gradient reaches the reference")
    far = [x.clone().requires_grad_() for x in (numbers(-1000.0), numbers(0.0))]
    loss = dpo_loss(*far, numbers(0.0), numbers(0.0), 1.0)
    require_close(loss, 1000.0, "beta h = -1000")
    require_close(gradient(loss, far[0], "beta h = -1000"), [-1.0], "beta h = -1000, gradient on the chosen log-prob")
    for seed in (1, 2):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10
        want, _ = nanorl.losses.dpo_loss(*inputs, beta=0.3)
        require_close(dpo_loss(*inputs, 0.3), want, "random inputs, 5 pairs, beta 0.3")


def check_drift(drift):
    """A pair (i, j) with i chosen comes up with probability 2 pi_ref(i) pi_ref(j) wins[i, j]: either of them may have
    been drawn first. Their sum is 1. Weigh log pi(i) / pi_ref(i) with it for chosen, log pi(j) / pi_ref(j) for
    rejected responses."""
    case = "reference [0.5, 0.5], policy [0.8, 0.2], the first one always wins"
    always = torch.tensor([[0.5, 1.0], [0.0, 0.5]], dtype=torch.float64)
    found = both(drift(numbers(0.8, 0.2), numbers(0.5, 0.5), always), case)
    up, down = math.log(1.6), math.log(0.4)
    require_close(found[0], 0.75 * up + 0.25 * down, case + ", chosen (a pair of two equal ones counts as well)")
    require_close(found[1], 0.25 * up + 0.75 * down, case + ", rejected")
    ref, wins = WORLD.probs(REFERENCE), (REWARDS[:, None] - REWARDS).sigmoid()
    for beta in (0.3, 3.0):
        case = f"the world of 27 responses, the best policy for beta {beta}"
        probs = WORLD.optimum(REFERENCE, REWARDS, beta)
        chosen, rejected = both(drift(probs, ref, wins), case)
        kl = (ref * (ref / probs).log()).sum()
        require_close((chosen + rejected) / 2, -kl, case + ", the mean of the two, which is -KL(reference || policy)")
        margin = 2 * (ref[:, None] * ref * wins * (REWARDS[:, None] - REWARDS)).sum() / beta
        require_close(chosen - rejected, margin, case + ", their difference, which is the mean margin")


def check_resting_margins(resting_margins):
    """Set the derivative of p loss(h) + (1 - p) loss(-h) to 0. For DPO it is -beta p sigmoid(-beta h) + beta (1 - p)
    sigmoid(beta h); for IPO the loss is a parabola."""
    p = numbers(0.5, 0.75, 0.9, 1.0)
    case = "p [0.5, 0.75, 0.9, 1], beta 0.1"
    dpo, ipo = both(resting_margins(p, 0.1), case)
    require_close(dpo[:3], [0.0, 10 * math.log(3), 10 * math.log(9)], case + ", DPO, the first three")
    require(math.isinf(dpo[3].item()) and dpo[3] > 0, f"{case}, DPO, p = 1: expected inf, got {dpo[3].item():.6g}")
    require_close(ipo, [0.0, 2.5, 4.0, 5.0], case + ", IPO")


def check_response_logprobs(response_logprobs):
    """Which decisions does the policy take in a response? In which one do the two responses of the symptom differ?"""
    try:
        stop = 9
        tokens = torch.tensor([[1, 2, 9, 9, 9], [1, 2, 3, 4, 9], [1, 2, 3, 4, 5], [9, 9, 9, 9, 9]])
        logprobs = -torch.tensor([[1, 2, 4, 8, 16]] * 4, dtype=torch.float64)
        case = "log-probs [-1, -2, -4, -8, -16], of which the response has 3, 5, 5 (cut off) and 1"
        require_close(response_logprobs(logprobs, tokens, stop), [-7.0, -31.0, -31.0, -1.0], case)
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


def check_train_on_pairs(train_on_pairs):
    """Print h in the second update. With respect to which policy has it to be measured?"""
    try:
        chosen, rejected = torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, 1, 0])  # 3 of 4 prefer response 0
        start = numbers(0.2, -0.1, 0.4)
        case = "3 of 4 answers prefer response 0 to response 1, beta 0.5, after 2000 updates: h"
        ratio = train_on_pairs(start, chosen, rejected, 0.5, updates=2000, learning_rate=1.0).log_softmax(0)
        ratio = ratio - start.log_softmax(0)
        require_close(ratio[0] - ratio[1], math.log(3) / 0.5, case, tolerance=1e-6)
        require_close(start, [0.2, -0.1, 0.4], "the logits that were given, afterwards")
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_best_policy,
    check_dpo_loss,
    check_drift,
    check_resting_margins,
    check_response_logprobs,
    check_train_on_pairs,
]
