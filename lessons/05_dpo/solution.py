"""Solutions of lesson 05. They pass the checks of exercise.py:

python lessons/05_dpo/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor


def best_policy(ref_probs: Tensor, rewards: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """ref_probs, rewards (N,) -> (N,), scalar. E[r] - beta KL is beta (log Z - KL(policy || best)): see the README."""
    scores = ref_probs.log() + rewards / beta
    return scores.softmax(0), beta * scores.logsumexp(0)


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """log-probs (B,) -> scalar"""
    h = (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())  # (B,)
    return -torch.nn.functional.logsigmoid(beta * h).mean()


def drift(probs: Tensor, ref_probs: Tensor, wins: Tensor) -> tuple[Tensor, Tensor]:
    """probs, ref_probs (N,), wins (N, N) -> scalar, scalar"""
    ratio = (probs / ref_probs).log()  # (N,)
    pairs = 2 * ref_probs[:, None] * ref_probs * wins  # (N, N), sums to 1: i is chosen, j rejected
    return (pairs.sum(1) * ratio).sum(), (pairs.sum(0) * ratio).sum()


def resting_margins(p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """p (B,) -> (B,), (B,)"""
    return p.logit() / beta, (2 * p - 1) / (2 * beta)


def response_logprobs(logprobs: Tensor, tokens: Tensor, eos_id: int) -> Tensor:
    """logprobs, tokens (B, T) -> (B,)

    The bug: the sum ended before the stop token. To stop is a choice of the policy like any other, and the one in
    which such a pair differs. The first stop token belongs to the response, those behind it do not.
    """
    stops = (tokens == eos_id).int()
    before = stops.cumsum(1) - stops  # (B, T): stop tokens before this one
    return (logprobs * (before == 0)).sum(1)


def train_on_pairs(
    logits: Tensor, chosen: Tensor, rejected: Tensor, beta: float, *, updates: int, learning_rate: float
) -> Tensor:
    """logits (N,), chosen, rejected (B,) -> (N,)

    The bug: the reference was the policy of the same update, so h was 0 whatever had been learned, and nothing ever
    said enough. The reference is the first policy, and frozen.
    """
    policy = logits.clone()
    reference = logits.detach().log_softmax(0)
    for _ in range(updates):
        policy = policy.detach().requires_grad_()
        logprobs = policy.log_softmax(0)  # (N,)
        h = (logprobs - reference)[chosen] - (logprobs - reference)[rejected]  # (B,)
        loss = -torch.nn.functional.logsigmoid(beta * h).mean()
        (gradient,) = torch.autograd.grad(loss, policy)
        policy = policy - learning_rate * gradient
    return policy.detach()


if __name__ == "__main__":
    checks.run("Lesson 05: DPO", globals(), checks.CHECKS)
