"""How much better than expected: from rewards to advantages."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from nanorl.kl import clamp_log_ratio

EQUAL = 1e-6  # rewards of a group that differ by less, relative to the largest, count as equal


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-4,
    valid: Tensor | None = None,
) -> Tensor:
    """(r - mean of the group) / (std + eps): GRPO's advantage (DeepSeekMath, Shao et al. 2024, section 4.1.2).

    rewards (B,), groups (B,) integers: rows with one number answered the same prompt -> (B,).

    `scale`: divide by the standard deviation of the group, of the whole batch ("batch": of the raw rewards, the mean
    staying the group's), or not at all ("none", Dr. GRPO). `ddof` 1 is the sample standard deviation (as in TRL; verl
    too), 0 the population's. A group of equal rewards, or of one, gets exactly 0. `valid` (B,) bool: the other rows
    take no part and get 0; without it a reward that is not finite is an error that names the row.
    """
    if rewards.dim() != 1 or groups.shape != rewards.shape or (valid is not None and valid.shape != rewards.shape):
        shapes = [tuple(x.shape) for x in (rewards, groups, valid) if x is not None]
        raise ValueError(f"expected rewards, groups (and valid) of one shape (B,), got {shapes}")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"unknown scale {scale!r}: choose one of group, batch, none")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, not {ddof}")
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    broken = (valid & ~rewards.isfinite()).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"reward of row {broken[0]} is {rewards[broken[0]].item()}: mend it, or leave it out with `valid`"
        )
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number of at least 0, not {eps}")
    _, group = groups.unique(return_inverse=True)  # (B,) numbers from 0
    count = int(group.max()) + 1 if len(group) else 0
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    rewards = torch.where(valid, rewards.double(), 0.0)  # squares of large or tiny rewards must not leave the range

    def group_sum(values: Tensor) -> Tensor:  # (B,) -> (B,): the sum over the valid members of each row's group
        values = torch.where(valid, values, 0.0)
        return values.new_zeros(count).index_add(0, group, values)[group]

    size = group_sum(torch.ones_like(rewards))
    centred = torch.where(valid, rewards - group_sum(rewards) / size.clamp(min=1), 0.0)
    spread = group_max(centred.abs(), group, count)
    centred = torch.where(spread <= EQUAL * group_max(rewards.abs(), group, count), 0.0, centred)
    if scale == "none":
        return centred.to(dtype)
    if scale == "group":
        std = (group_sum(centred**2) / (size - ddof).clamp(min=1)).sqrt()
    else:
        std = rewards[valid].std(correction=ddof) if valid.sum() > ddof else rewards.new_zeros(())
    return torch.where(centred == 0, 0.0, centred / (std + eps)).to(dtype)


def leave_one_out(rewards: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """r - mean of the others in the group: RLOO's advantage (Kool et al. 2019; Ahmadian et al. 2024).

    Shapes, `valid` and errors as in `group_advantages`; a group of equal rewards, or of one, gets exactly 0.

    The baseline does not depend on the response it judges, so the gradient is unbiased. With n responses this is
    n / (n - 1) times the distance to the mean of all: the mean that includes the response only shortens the gradient.
    """
    centred = group_advantages(rewards, groups, scale="none", valid=valid)
    counted = torch.ones_like(centred) if valid is None else valid.to(centred.dtype)
    size = ((groups[:, None] == groups) * counted).sum(1)  # (B,) valid members of each row's group
    return centred * size / (size - 1).clamp(min=1)


def teaching_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """The groups in which some reward differs from another, in order: the others have no gradient."""
    return groups[group_advantages(rewards, groups, scale="none") != 0].unique()


def group_max(values: Tensor, group: Tensor, count: int) -> Tensor:
    """(B,) -> (B,): the largest non-negative value of each row's group."""
    return values.new_zeros(count).scatter_reduce(0, group, values, "amax")[group]


def importance_weights(
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """min(pi_old / pi_behavior, cap) for each token, without gradient: (B, T), 1 outside the mask. With `level`
    "sequence" one weight a response, (B,): the geometric mean of its tokens' ratios, as in GSPO's ratio.

    Sampler and scorer differ a little in half precision, and a lot when the sampler's weights lag behind. Multiplied
    into the advantages before the loss, the weights correct for that; the cap bounds their variance (truncated
    importance sampling, Ionides 2008; for this use Yao et al. 2025).
    """
    if not cap > 0:
        raise ValueError(f"cap must be positive, not {cap}")
    if level not in ("token", "sequence"):
        raise ValueError(f"unknown level {level!r}: choose one of token, sequence")
    log_weights = (old_logprobs - behavior_logprobs).detach().masked_fill(~mask.bool(), 0.0)
    if level == "sequence":
        log_weights = log_weights.sum(1) / mask.bool().sum(1).clamp(min=1)
    return clamp_log_ratio(log_weights).exp().clamp(max=cap)
