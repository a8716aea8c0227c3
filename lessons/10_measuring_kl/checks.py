"""Checks of lesson 10, shared by exercise.py and solution.py. Values by hand, and true gradients of a small world."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Failed, gradient, require, require_close, run

import nanorl.kl
from nanorl.exact import World

__all__ = ["CHECKS", "run"]

NAN = float("nan")
INF = float("inf")
LOGPROBS = [-1.0, -1.5, -0.7]
REF_LOGPROBS = [-1.5, -1.0, -0.7]
CASE = f"log-probs {LOGPROBS}, reference {REF_LOGPROBS}"


def triple(got, case: str):
    require(isinstance(got, tuple) and len(got) == 3, f"{case}: expected k1, k2, k3 in a tuple of three")
    return got


def check_estimates(estimates):
    """d = ref_logprobs - logprobs, in this order, since the tokens were drawn from the policy. k1 = -d,
    k2 = d^2 / 2, k3 = exp(d) - d - 1. The reference is frozen: detach it."""
    logprobs = torch.tensor(LOGPROBS, dtype=torch.double, requires_grad=True)
    ref_logprobs = torch.tensor(REF_LOGPROBS, dtype=torch.double, requires_grad=True)
    want = [[0.5, -0.5, 0.0], [0.125, 0.125, 0.0], [0.106530659713, 0.148721270700, 0.0]]
    wanted_slopes = [[1.0, 1.0, 1.0], [0.5, -0.5, 0.0], [0.393469340287, -0.648721270700, 0.0]]
    for i, got in enumerate(triple(estimates(logprobs, ref_logprobs), CASE)):
        case = f"k{i + 1} of {CASE}"
        require_close(got, want[i], case)
        require_close(gradient(got.sum(), logprobs, case), wanted_slopes[i], case + ", gradient")
        leaked = torch.autograd.grad(estimates(logprobs, ref_logprobs)[i].sum(), ref_logprobs, allow_unused=True)[0]
        require(leaked is None or not leaked.any(), f"{case}: a gradient reaches the frozen reference")


def check_slopes(slopes):
    """d = ref_logprobs - logprobs falls by as much as the log-prob grows: each derivative by d changes its sign. That
    of exp(d) - d - 1 by d is exp(d) - 1."""
    logprobs, ref_logprobs = torch.tensor([LOGPROBS, REF_LOGPROBS], dtype=torch.double)
    want = [[1.0, 1.0, 1.0], [0.5, -0.5, 0.0], [0.393469340287, -0.648721270700, 0.0]]
    for i, got in enumerate(triple(slopes(logprobs, ref_logprobs), CASE)):
        require_close(got, want[i], f"derivative of k{i + 1}, {CASE}")


def check_exact_kl(exact_kl):
    """log_softmax both along the last dimension; sum of probability x difference of log-probs, the probability being
    the policy's. -inf minus -inf is NaN: choose 0 where the probability is 0."""
    logits = torch.tensor([0.2, -0.1, 0.4], dtype=torch.double)
    ref_logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.double).log()
    want = nanorl.kl.exact_kl(logits, ref_logits)
    case = "logits [0.2, -0.1, 0.4], reference probabilities [0.5, 0.3, 0.2]"
    require_close(exact_kl(logits, ref_logits), want, case)
    two = exact_kl(torch.stack([logits, ref_logits]), torch.stack([ref_logits, ref_logits]))
    require_close(two, [want.item(), 0.0], "two rows at once, the second with equal policies")
    banned = [torch.tensor([*x.tolist(), -INF], dtype=torch.double) for x in (logits, ref_logits)]
    require_close(exact_kl(*banned), want, case + ", and a fourth token that neither can choose")


def check_returns_with_kl(returns_with_kl):
    """k1 = logprobs - ref_logprobs; sum it over the tokens where mask is 1 (torch.where, since NaN * 0 is NaN), take
    beta times that from the reward, and detach: the policy gradient wants a number."""
    logprobs = torch.tensor([[-1.0, -1.5, -2.0], [-0.5, NAN, NAN]], dtype=torch.double, requires_grad=True)
    ref_logprobs = torch.tensor([[-1.5, -1.0, -3.0], [-0.7, NAN, NAN]], dtype=torch.double)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.double)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.double)
    got = returns_with_kl(rewards, logprobs, ref_logprobs, mask, 0.1)
    case = "rewards [1, 0], k1 [[0.5, -0.5, 1], [0.2, padding]], beta 0.1"
    require_close(got, [0.9, -0.02], case)
    require(not got.requires_grad, f"{case}: the returns carry a gradient")


def check_kl_to_come(kl_to_come):
    """A cumulative sum from behind: flip along the tokens, cumsum, flip back. Put the padding to 0 first."""
    logprobs = torch.tensor([[-1.0, -1.5, -2.0], [-0.5, NAN, NAN]], dtype=torch.double, requires_grad=True)
    ref_logprobs = torch.tensor([[-1.5, -1.0, -3.0], [-0.7, NAN, NAN]], dtype=torch.double)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.double)
    got = kl_to_come(logprobs, ref_logprobs, mask)
    case = "k1 [[0.5, -0.5, 1], [0.2, padding]]"
    require_close(got, [[1.0, 0.5, 1.0], [0.2, 0.0, 0.0]], case)
    require(not got.requires_grad, f"{case}: it carries a gradient")
    world = World(stop=0)
    logits, ref_logits = world.random_logits(0).requires_grad_(), world.random_logits(1)
    logprobs = world.logprobs(logits)
    weights = kl_to_come(logprobs, world.logprobs(ref_logits), world.mask)
    surrogate = (world.probs(logits).detach() * (weights * logprobs).sum(1)).sum()
    want = gradient(world.kl(logits, ref_logits), logits, "")
    require_close(gradient(surrogate, logits, ""), want, "mean over a small world against the true gradient of its KL")


def check_loss_that_holds_nothing_back(loss_that_holds_nothing_back):
    """Take every token as often as the policy would, so that nothing is noise, and look at the gradient of the KL term
    alone, by the logits. What does it know of the reference?"""
    counts = torch.tensor([5, 3, 2])  # of ten responses: exactly the policy's probabilities
    tokens = torch.arange(3).repeat_interleave(counts)
    logits = (counts.double() / 10).log().requires_grad_()
    ref_logits = torch.tensor([0.2, 0.2, 0.6], dtype=torch.double).log()
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.double)

    def expected(beta: float) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)[tokens]
        loss = loss_that_holds_nothing_back(logprobs, ref_logits[tokens], advantages[tokens], beta)
        return gradient(loss, logits, f"ten responses, beta {beta:g}")

    probs = logits.softmax(-1)
    reward_alone = gradient(-(probs * advantages).sum(), logits, "")
    require_close(expected(0.0), reward_alone, "expected gradient without KL (beta 0)")
    true = gradient(nanorl.kl.exact_kl(logits, ref_logits), logits, "")
    try:
        for beta in (0.1, 1.0):
            require_close(
                expected(beta) - reward_alone, beta * true, f"expected gradient of the KL term, beta {beta:g}"
            )
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_estimates,
    check_slopes,
    check_exact_kl,
    check_returns_with_kl,
    check_kl_to_come,
    check_loss_that_holds_nothing_back,
]
