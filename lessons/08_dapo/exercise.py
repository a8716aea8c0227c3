"""Exercises of lesson 08: the parts of DAPO, and two silent bugs. Fill the blanks, run this file: it checks itself.

    python lessons/08_dapo/exercise.py

B responses of at most T tokens. `mask` is 1 for a token of the response and 0 for padding, which may hold anything,
NaN included, unless the exercise says otherwise.
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor

# ---- Part 1: four blanks


def room_to_grow(p: Tensor, clip_high: float) -> Tensor:
    """By how much a token's probability may rise above `p`, that of the policy that sampled it, before the clip takes
    its gradient away. A probability ends at 1.

    p (...) -> (...)
    """
    raise NotImplementedError


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Yu et al. 2025, eq. 13: 0 up to max_length - buffer tokens, then linearly down to -1 at max_length, and -1
    beyond. In floating point, whatever the type of `lengths`.

    lengths (B,) integers -> (B,)
    """
    raise NotImplementedError


def groups_that_teach(rewards: Tensor, wanted: int) -> Tensor:
    """The numbers of the first `wanted` groups, in order, whose rewards are not all the same (eq. 11); fewer where
    there are fewer, none where there are none.

    rewards (groups, G) -> (at most wanted,) integers
    """
    raise NotImplementedError


def dapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """Minus the mean over all tokens of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with the gradient to
    `logprobs` alone (eq. 12, its sum taken over the whole batch).

    logprobs, old_logprobs, mask (B, T), advantages (B,) -> scalar
    """
    raise NotImplementedError


# ---- Part 2: silent bugs. Each function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def loss_that_depends_on_the_micro_batch(per_token: Tensor, mask: Tensor, micro_batch: int) -> Tensor:
    """The token mean of a batch that does not fit into memory: it comes in micro-batches of `micro_batch` rows, whose
    losses are added up. The padding holds finite numbers.

    per_token, mask (B, T) -> scalar

    The symptom: a run on a small GPU learns another thing than the same run on a large one. With all rows in one
    micro-batch the loss agrees with the paper. With one row in each it is that of GRPO: short responses count as much
    as long ones.
    """
    parts = list(zip(per_token.split(micro_batch), mask.split(micro_batch), strict=True))
    loss = torch.zeros((), dtype=per_token.dtype)
    for values, kept in parts:
        loss = loss + (values * kept).sum() / kept.sum() / len(parts)
    return loss


def loss_that_fades_as_the_task_is_mastered(per_token: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
    """Dynamic sampling and the token mean: groups whose rewards are all the same are dropped, the others are trained
    on. The padding holds finite numbers.

    per_token, mask (groups, G, T), rewards (groups, G) -> scalar; some group teaches

    The symptom: the later in the run, the smaller the gradient, although every batch is filled with groups that teach.
    The same two groups give an eighth of the gradient if fourteen solved ones were sampled along with them.
    """
    teaches = rewards.amax(1) > rewards.amin(1)  # (groups,)
    kept = per_token[teaches] * mask[teaches]
    return kept.sum() / mask.sum()


if __name__ == "__main__":
    checks.run("Lesson 08: DAPO", globals(), checks.CHECKS)
