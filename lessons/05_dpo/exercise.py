"""Exercises of lesson 05: the best policy, DPO's loss, what happens to the chosen response, where DPO and IPO stop, and
two silent bugs. Fill the blanks, run this file: it checks itself.

    python lessons/05_dpo/exercise.py

Log-probs are those of whole responses, summed over their tokens.
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor

# ---- Part 1: four blanks


def best_policy(ref_probs: Tensor, rewards: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Of all N responses the probabilities that maximize E[r] - beta KL(policy || reference), and the value of this
    maximum.

    ref_probs, rewards (N,) -> (N,), scalar
    """
    raise NotImplementedError


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """Rafailov et al. 2023, eq. 7: the mean over pairs of -log sigmoid(beta h). It has to stay finite where a pair is
    hopelessly wrong, beta h = -1000.

    log-probs (B,) -> scalar, with a gradient to `chosen` and `rejected` alone
    """
    raise NotImplementedError


def drift(probs: Tensor, ref_probs: Tensor, wins: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of log pi / pi_ref over chosen responses, and over rejected ones. Both responses of a pair are drawn
    from the reference, and i is liked better than j with probability wins[i, j].

    probs, ref_probs (N,), wins (N, N) with wins[i, j] + wins[j, i] = 1 -> scalar, scalar
    """
    raise NotImplementedError


def resting_margins(p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The same pair comes up again and again, and a share p of the answers prefers its first response. At which h
    does DPO's mean loss have its minimum, and at which IPO's, (h - 1 / (2 beta))^2?

    p (B,) between 0 and 1 -> DPO's h (B,), IPO's h (B,)
    """
    raise NotImplementedError


# ---- Part 2: two silent bugs. Each function runs, raises nothing, and is wrong in one place. Find it, mend it.


def response_logprobs(logprobs: Tensor, tokens: Tensor, eos_id: int) -> Tensor:
    """Log-prob of each response: the sum up to its stop token. Behind that stand more stop tokens, as padding; a
    response that was cut off has none at all.

    logprobs, tokens (B, T) -> (B,)

    The symptom: loss, margin and accuracy on held-out pairs look much as they should. But two responses of the same
    words, of which one stops and the other was cut off at that place, keep equal log-probs for ever, however often
    people prefer the one that stops. The trained model has not learned when to stop.
    """
    ended = (tokens == eos_id).int().cumsum(1)  # (B, T)
    return (logprobs * (ended == 0)).sum(1)


def train_on_pairs(
    logits: Tensor, chosen: Tensor, rejected: Tensor, beta: float, *, updates: int, learning_rate: float
) -> Tensor:
    """DPO with gradient descent; the policy is a table of logits, and the first one is the reference.

    logits (N,), numbers of chosen and of rejected responses (B,) -> the trained logits (N,)

    The symptom: the loss is 0.6931 in every update. Still the policy moves, at an even pace and without end: twice the
    updates, twice the margin.
    """
    policy = logits.clone()
    for _ in range(updates):
        policy = policy.detach().requires_grad_()
        logprobs = policy.log_softmax(0)  # (N,)
        reference = policy.detach().log_softmax(0)
        h = (logprobs - reference)[chosen] - (logprobs - reference)[rejected]  # (B,)
        loss = -torch.nn.functional.logsigmoid(beta * h).mean()
        (gradient,) = torch.autograd.grad(loss, policy)
        policy = policy - learning_rate * gradient
    return policy.detach()


if __name__ == "__main__":
    checks.run("Lesson 05: DPO", globals(), checks.CHECKS)
