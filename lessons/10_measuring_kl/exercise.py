"""Exercises of lesson 10: KL by sample and by sum, in the reward and in the loss, and a silent bug. Fill the blanks,
then run this file: it checks itself.

    python lessons/10_measuring_kl/exercise.py

B responses of at most T tokens, V tokens in the vocabulary. `mask` is 1 for a token of the response and 0 for padding,
which may hold anything, NaN included. The tokens were sampled from the policy.
"""

from __future__ import annotations

import checks
from torch import Tensor

# ---- Part 1: five blanks


def estimates(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k1, k2 and k3 of KL(policy || reference), with a gradient to `logprobs` alone.

    logprobs, ref_logprobs: one shape -> three of that shape
    """
    raise NotImplementedError


def slopes(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The derivatives of k1, k2 and k3 with respect to the log-prob, worked out by hand: no autograd.

    logprobs, ref_logprobs: one shape -> three of that shape
    """
    raise NotImplementedError


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(policy || reference) of the next token in nats: the sum over the vocabulary. A token that neither can choose
    (both logits -inf) adds 0.

    logits, ref_logits (..., V) -> (...)
    """
    raise NotImplementedError


def returns_with_kl(rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float) -> Tensor:
    """KL in the reward: what a response earns, minus beta times the sum of its tokens' k1. A number: no gradient.

    rewards (B,), logprobs, ref_logprobs, mask (B, T) -> (B,)
    """
    raise NotImplementedError


def kl_to_come(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """For each token the sum of k1 from that token on, to the end of its response; 0 in the padding. Weighed by it, the
    gradients of the log-probs average to the gradient of the responses' KL.

    logprobs, ref_logprobs, mask (B, T) -> (B, T), without gradient
    """
    raise NotImplementedError


# ---- Part 2: a silent bug. The function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def loss_that_holds_nothing_back(logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """REINFORCE with a KL term, for responses of one token, sampled from the policy. All three tensors (B,).

    The symptom: the KL that is printed is right. The gradient norm grows with beta, so the term does reach the weights.
    But with beta 0.01, 0.1 or 1 the policy drifts away from the reference as if beta were 0; it is only noisier.
    """
    kl = logprobs - ref_logprobs.detach()  # (B,)
    return (beta * kl - advantages * logprobs).mean()


if __name__ == "__main__":
    checks.run("Lesson 10: measuring KL", globals(), checks.CHECKS)
