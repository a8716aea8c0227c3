"""Exercises of lesson 07: the advantages and the loss of Dr. GRPO, the drift of the length, and a silent bug. Fill the
blanks, run this file: it checks itself.

    python lessons/07_dr_grpo/exercise.py

P prompts, G responses to each, B = P x G responses of at most T tokens. `mask` is 1 for a token of the response and 0
for padding, which may hold anything, NaN included.
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor

# ---- Part 1: four blanks


def centered_advantages(rewards: Tensor) -> Tensor:
    """Dr. GRPO's advantage: the distance to the mean of the group, and nothing else.

    rewards (P, G) -> (P, G)
    """
    raise NotImplementedError


def batch_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """The other fix: the distance to the mean of the GROUP, divided by (std + eps) of all rewards of the BATCH. std has
    the divisor B - 1.

    rewards (P, G) -> (P, G)
    """
    raise NotImplementedError


def dr_grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    max_length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Minus the clipped objective, summed over all tokens, divided by B x max_length.

    logprobs, old_logprobs, mask (B, T), advantages (B,) -> scalar, with a gradient to `logprobs` alone
    """
    raise NotImplementedError


def push_on_going_on(stop: float, limit: int, divide_by_length: bool) -> float:
    """Which way a loss pushes the length of a response with advantage 1. A response is a digit, then at most `limit`
    decisions: stop with probability `stop` (a token), or go on (a filler, a token too). After `limit` fillers it is cut
    off. z is the logit of going on, the same everywhere: p(go on) = 1 / (1 + exp(-z)) = 1 - stop.

    Returns the expectation, over all responses, of (sum over its decisions of d log p(decision) / dz), divided by the
    number of its tokens, the digit included, if `divide_by_length`. Add up all responses; there are limit + 1.
    """
    raise NotImplementedError


# ---- Part 2: a silent bug. The function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def loss_that_minds_its_company(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    max_length: int,
    sequences: int,
) -> Tensor:
    """Dr. GRPO's loss of a micro-batch. `sequences` is the number of responses of the whole batch, so that the parts
    add up. The padding holds finite numbers. Shapes as above.

    The symptom: in the test, where some response always runs on to the limit, it agrees with the paper to the last
    digit. In training the curve depends on --micro-batch, and the gradient norm is smallest in the steps where a single
    response is very long, even one with advantage 0.
    """
    ratio = (logprobs - old_logprobs.detach()).exp()  # (B, T)
    objective = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    longest = min(max_length, mask.shape[1])
    return -(objective * mask).sum() / (sequences * longest)


if __name__ == "__main__":
    checks.run("Lesson 07: Dr. GRPO", globals(), checks.CHECKS)
