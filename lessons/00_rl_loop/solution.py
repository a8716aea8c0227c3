"""Solutions of lesson 00. They pass the checks of exercise.py:

python lessons/00_rl_loop/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """logits (B, T, V), tokens (B, T) -> (B, T)"""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def grad_log_prob(logits: Tensor, token: int) -> Tensor:
    """logits (V,) -> (V,): one-hot minus probabilities, since log p(a) = logit(a) - log sum exp(logits)."""
    result = -logits.softmax(-1)
    result[token] += 1
    return result


def expected_gradient(logits: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    """logits (V,), rewards (V,) -> (V,)"""
    probs = logits.softmax(-1)
    parts = [probs[a] * (rewards[a] - baseline) * grad_log_prob(logits, a) for a in range(len(logits))]
    return torch.stack(parts).sum(0)


def leave_one_out(rewards: Tensor) -> Tensor:
    """rewards (P, G) -> (P, G)"""
    others = (rewards.sum(-1, keepdim=True) - rewards) / (rewards.shape[-1] - 1)  # (P, G)
    return rewards - others


def reinforce_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """logprobs, mask (B, T), advantages (B,) -> scalar"""
    chosen = torch.where(mask.bool(), logprobs, 0.0)  # (B, T)
    return -(advantages[:, None] * chosen).sum(1).mean()


if __name__ == "__main__":
    checks.run("Lesson 00: the RL loop for language models", globals(), checks.CHECKS)
