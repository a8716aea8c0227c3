"""Exercises of lesson 00: the pieces of REINFORCE. Fill the blanks, then run this file: it checks itself.

    python lessons/00_rl_loop/exercise.py

B responses of T tokens, V tokens in the vocabulary.
"""

from __future__ import annotations

import checks
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token that was chosen.

    logits (B, T, V): logits[b, t] predict tokens[b, t]; tokens (B, T) -> (B, T), with a gradient to the logits.
    """
    raise NotImplementedError


def grad_log_prob(logits: Tensor, token: int) -> Tensor:
    """The gradient of log softmax(logits)[token] with respect to the logits, worked out by hand: no autograd.

    logits (V,) -> (V,)
    """
    raise NotImplementedError


def expected_gradient(logits: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    """What REINFORCE estimates, computed exactly: the mean of (reward - baseline) x grad log-prob over all tokens,
    each weighed by its probability under softmax(logits). One-token responses, so a token is a response.

    logits (V,), rewards (V,): rewards[a] is what token a earns -> (V,)
    """
    raise NotImplementedError


def leave_one_out(rewards: Tensor) -> Tensor:
    """How much better each response was than the mean of the OTHER responses to the same prompt.

    rewards (P, G): G responses to each of P prompts -> (P, G)
    """
    raise NotImplementedError


def reinforce_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The loss whose gradient is minus the policy gradient: advantage x log-prob, summed over the tokens of a
    response, averaged over responses.

    logprobs (B, T), advantages (B,), mask (B, T): 1 for a token of the response, 0 for padding, which may hold
    anything -> scalar
    """
    raise NotImplementedError


if __name__ == "__main__":
    checks.run("Lesson 00: the RL loop for language models", globals(), checks.CHECKS)
