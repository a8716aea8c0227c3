"""Exercises of lesson 09: GSPO's ratio, loss and token variant, and a silent bug. Fill the blanks, run this file: it
checks itself.

    python lessons/09_gspo/exercise.py

B responses of at most T tokens, each with one advantage. `mask` is 1 for a token of the response and 0 for padding,
which may hold anything, NaN included.
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor

# ---- Part 1: four blanks


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The geometric mean of a response's token ratios, exp(1/|o_i| sum_t log r_it).

    logprobs, old_logprobs, mask (B, T) -> (B,), with a gradient to `logprobs` alone
    """
    raise NotImplementedError


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Minus the objective of Zheng et al. 2025, eq. 5: mean over responses of min(s A, clip(s, 1 - low, 1 + high) A).

    logprobs, old_logprobs, mask (B, T), advantages (B,) -> scalar
    """
    raise NotImplementedError


def token_variant_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """GSPO-token's ratio: every token has the value of its response's s, and the gradient s times that of its own
    log-prob. What stands in the padding does not matter, as long as it is finite.

    logprobs, old_logprobs, mask (B, T) -> (B, T), with a gradient to `logprobs` alone
    """
    raise NotImplementedError


def left_out(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Whether the clip takes a response's gradient away.

    ratio, advantages (B,) -> bool (B,)
    """
    raise NotImplementedError


# ---- Part 2: a silent bug. The function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def loss_that_listens_to_the_longest(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """GSPO's loss, in a trainer whose losses are all (B, T): the response's loss is written to each of its tokens, then
    comes the trainer's mean. The padding holds finite numbers. Shapes as above.

    The symptom: in a test with responses of one length it agrees with the paper. In training, a few long responses
    decide the update: with one right answer of 25 tokens and one wrong one of 3, nine tenths of the loss are the first.
    At the first update, when every ratio is 1, the loss is not 0, although the advantages of a group sum to 0.
    """
    log_ratio = torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0)
    s = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()  # (B, 1)
    objective = torch.minimum(s * advantages[:, None], s.clamp(1 - clip_low, 1 + clip_high) * advantages[:, None])
    per_token = objective.expand_as(logprobs)  # (B, T)
    return -(per_token * mask).sum() / mask.sum()


if __name__ == "__main__":
    checks.run("Lesson 09: GSPO", globals(), checks.CHECKS)
