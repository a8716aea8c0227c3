"""Solutions of lesson 10. They pass the checks of exercise.py:

python lessons/10_measuring_kl/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor


def estimates(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs, ref_logprobs: one shape -> three of that shape"""
    d = ref_logprobs.detach() - logprobs
    return -d, d**2 / 2, d.exp() - d - 1


def slopes(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs, ref_logprobs: one shape -> three of that shape; d falls by as much as the log-prob grows."""
    d = ref_logprobs - logprobs
    return torch.ones_like(d), -d, 1 - d.exp()


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """logits, ref_logits (..., V) -> (...)"""
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    probs = logprobs.exp()
    return torch.where(probs > 0, probs * (logprobs - ref_logprobs), 0.0).sum(-1)


def returns_with_kl(rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float) -> Tensor:
    """rewards (B,), logprobs, ref_logprobs, mask (B, T) -> (B,)"""
    k1 = torch.where(mask.bool(), logprobs - ref_logprobs, 0.0)  # (B, T)
    return rewards - beta * k1.sum(1).detach()


def kl_to_come(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """logprobs, ref_logprobs, mask (B, T) -> (B, T)"""
    k1 = torch.where(mask.bool(), logprobs - ref_logprobs, 0.0).detach()  # (B, T)
    return k1.flip(1).cumsum(1).flip(1)  # from behind


def loss_that_holds_nothing_back(logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """The bug: the gradient of k1 is that of the log-prob, whatever the reference; on average 0. That of k2 is right.
    (k1 in the advantages, detached, is the other mend.)"""
    kl = (logprobs - ref_logprobs.detach()) ** 2 / 2  # (B,)
    return (beta * kl - advantages * logprobs).mean()


if __name__ == "__main__":
    checks.run("Lesson 10: measuring KL", globals(), checks.CHECKS)
