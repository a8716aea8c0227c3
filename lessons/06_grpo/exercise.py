"""Exercises of lesson 06: GRPO piece by piece, and two silent bugs. Fill the blanks, run this file: it checks itself.

    python lessons/06_grpo/exercise.py

P prompts, G responses to each, B = P x G responses of at most T tokens. `mask` is 1 for a token of the response and 0
for padding, which may hold anything, NaN included.
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor

# ---- Part 1: five blanks


def group_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """Each reward's z-score in its group: (r - mean) / (std + eps), std with divisor G - 1. A group whose rewards are
    all equal gets exactly 0.

    rewards (P, G) -> (P, G)
    """
    raise NotImplementedError


def clipped_objective(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), elementwise. To be maximised.

    ratio, advantages: one shape -> that shape
    """
    raise NotImplementedError


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) for each token: exp(d) - d - 1 with d = log (reference / policy).

    logprobs, ref_logprobs: one shape -> that shape, with a gradient to `logprobs` alone
    """
    raise NotImplementedError


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """1/B sum_i 1/|o_i| sum_t values[i, t]: |o_i| is the number of tokens of response i.

    values, mask (B, T) -> scalar
    """
    raise NotImplementedError


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logprobs: Tensor,
    beta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Minus the objective of DeepSeekMath, eq. 3, from the pieces above.

    logprobs, old_logprobs, mask, ref_logprobs (B, T), advantages (B,) -> scalar, with a gradient to `logprobs` alone
    """
    raise NotImplementedError


# ---- Part 2: two silent bugs. Each function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def loss_that_never_learns(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """GRPO with one update a batch: the policy that sampled is the policy that is trained, so nothing need be stored.
    Responses of one length, so no mask either. logprobs (B, T), advantages (B,).

    The symptom: the loss is 0.000 at every step, the ratio 1.000, no token is clipped. All that is as it should be.
    But the reward has not moved in 200 updates.
    """
    old_logprobs = logprobs
    ratio = (logprobs - old_logprobs).exp()  # (B, T)
    objective = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -objective.mean()


def loss_that_depends_on_its_neighbors(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor):
    """GRPO's loss without the KL term; the padding holds finite numbers. Shapes as above.

    The symptom: nothing crashes and the reward climbs, but the gradient norm jumps about. It is smallest in the steps
    where a single response ran on to the length limit, even one with advantage 0. Splitting the same batch into
    micro-batches changes the training curve.
    """
    ratio = (logprobs - old_logprobs.detach()).exp()  # (B, T)
    objective = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    per_response = (objective * mask).mean(1)  # (B,)
    return -per_response.mean()


if __name__ == "__main__":
    checks.run("Lesson 06: GRPO", globals(), checks.CHECKS)
