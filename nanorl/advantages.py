"""How much better than expected: from rewards to advantages."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from nanorl.kl import clamp_log_ratio
from nanorl.losses.aggregate import masked, token_count

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


def place_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """One score a response, (B,), as a reward on its last trainable token, (B, T); a row without any gets none.

    The last one is the stop token, or where the response was cut off.
    """
    if mask.dim() != 2 or scores.shape != mask.shape[:1]:
        raise ValueError(f"expected scores (B,) and a mask (B, T), got {tuple(scores.shape)} and {tuple(mask.shape)}")
    left = mask.long().flip(1).cumsum(1).flip(1)  # (B, T) trainable tokens from here on
    return torch.where(mask.bool() & (left == 1), scores[:, None], 0.0)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, eq. 16; arXiv:1506.02438): advantages, returns (B, T).

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    R_t = A_t + V_t

    rewards, values, mask (B, T): V_t is what the critic expects before token t. `lam` 0 trusts the critic behind one
    step, 1 not at all: there R_t is the discounted sum of the rewards. t + 1 is the next trainable token: other tokens,
    inserted or padding, cost no discount, and neither their values nor their rewards count. Behind the last one
    everything is over and V is 0; where a response was only cut off, `bootstrap` (B,) says what V is there (0 for the
    others). Without gradient, 0 outside the mask; the returns are the critic's targets.
    """
    if values.dim() != 2 or not rewards.shape == values.shape == mask.shape:
        shapes = [tuple(x.shape) for x in (rewards, values, mask)]
        raise ValueError(f"expected rewards, values and mask of one shape (B, T), got {shapes}")
    if not (rewards.is_floating_point() and values.is_floating_point()):
        raise ValueError(f"expected rewards and values in floating point, got {rewards.dtype} and {values.dtype}")
    if bootstrap is not None and bootstrap.shape != values.shape[:1]:
        raise ValueError(f"expected bootstrap (B,) = {tuple(values.shape[:1])}, got {tuple(bootstrap.shape)}")
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma and lam must be between 0 and 1, not {gamma} and {lam}")
    chosen = mask.bool()
    advantages = torch.zeros_like(rewards + values)
    later = advantages.new_zeros(len(values))  # (B,) the advantage of the next trainable token
    next_value = later if bootstrap is None else bootstrap.to(later.dtype)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        later = torch.where(chosen[:, t], delta + gamma * lam * later, later)
        next_value = torch.where(chosen[:, t], values[:, t], next_value)
        advantages[:, t] = later
    return masked(advantages, mask), masked(advantages + values, mask)


def whiten(values: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over the trainable tokens of the whole batch, (B, T); 0 outside the mask.

    The variance is the sample's (divided by n - 1). For advantages, after the returns are taken from them.
    """
    if not values.is_floating_point():
        raise ValueError(f"expected values in floating point, got {values.dtype}")
    x, count = masked(values, mask).double(), token_count(mask)  # squares must not leave the range
    centred = masked(x - x.sum() / max(count, 1), mask)
    variance = (centred**2).sum() / max(count - 1, 1)
    return (centred / (variance + eps).sqrt()).to(values.dtype)
