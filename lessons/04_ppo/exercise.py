"""Exercises of lesson 04: PPO's rewards, advantages and value loss, and a silent bug. Fill the blanks, run this file:
it checks itself.

    python lessons/04_ppo/exercise.py

B responses of at most T tokens, padded on the right. `mask` is 1 for a token of the response and 0 for padding, which
may hold anything, NaN included. No row is empty.
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor

# ---- Part 1: four blanks


def token_rewards(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float) -> Tensor:
    """What each token earns: -beta (log pi - log pi_ref), and the last one of a response its score too. 0 for padding,
    no gradient to anything.

    scores (B,), logprobs, ref_logprobs, mask (B, T) -> (B, T)
    """
    raise NotImplementedError


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t, and
    the critic's targets R_t = A_t + V_t. Behind a row's last token A is 0 and V is `bootstrap`. Both 0 for padding.

    rewards, values, mask (B, T), bootstrap (B,) -> (B, T), (B, T)
    """
    raise NotImplementedError


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """The mean over all tokens of 1/2 max((V - R)^2, (V_clipped - R)^2), V_clipped being V within `clip` of V_old.

    values, old_values, returns, mask (B, T) -> scalar, with a gradient to `values` alone
    """
    raise NotImplementedError


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the tokens of the whole batch, the variance with divisor n - 1 (n > 1); 0
    for padding.

    values, mask (B, T) -> (B, T)
    """
    raise NotImplementedError


# ---- Part 2: a silent bug. The function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def targets_never_reached(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages, whitened, and the critic's targets, with gamma = lambda = 1. Every response ended with its stop
    token, and the padding holds finite numbers. rewards, values, mask (B, T) -> (B, T), (B, T).

    The symptom: nothing crashes, and the policy's loss looks as it should. But the critic's first loss on each batch is
    0.50, in every step of every run, whatever its learning rate. Rewards ten times as large leave it at 0.50. And the
    mean of its targets is always the mean of what it says already.
    """
    reward_to_go = (rewards * mask).flip(1).cumsum(1).flip(1)  # (B, T)
    advantages = torch.where(mask.bool(), reward_to_go - values, 0.0)
    mean = advantages.sum() / mask.sum()
    variance = ((advantages - mean) ** 2 * mask).sum() / (mask.sum() - 1)
    advantages = (advantages - mean) / (variance + 1e-8).sqrt() * mask
    returns = (advantages + values) * mask
    return advantages, returns


if __name__ == "__main__":
    checks.run("Lesson 04: PPO for RLHF", globals(), checks.CHECKS)
