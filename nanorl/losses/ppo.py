"""PPO: Proximal Policy Optimization, policy and critic (Schulman et al. 2017, eq. 7 and 9; arXiv:1707.06347).

    policy    max 1/N sum_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)
    critic    min 1/N sum_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2)

over all N tokens of the batch. The advantage A_t is each token's own, from `nanorl.advantages.gae` and the critic; so
are the targets R_t = A_t + V_old, taken before A is whitened. Clipping the value is not in the paper but in the code
its authors published: the larger of the two errors counts, so a value that has moved away from its target by more
than c is pulled back, and one that has moved towards it by more than c gets no further gradient.

The policy's loss is that of DAPO with one clip range for both sides; what is PPO's is the advantage, which differs from
token to token. RLHF takes the KL to the reference from the reward, as k1 (Ouyang et al. 2022): leave `beta` at 0 then,
or it counts twice.

Where implementations differ: TRL averages over the tokens of each micro-batch, and gives the critic's loss the
position behind the last token too; verl clips the value at 0.5 from its old one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanorl.losses.aggregate import masked, token_mean
from nanorl.losses.surrogate import check_inputs, clipped_surrogate, kl_penalty, log_ratio, ratio_metrics


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss for one batch or micro-batch.

    logprobs, old_logprobs, ref_logprobs, mask (B, T); advantages (B, T), or (B,) for the same on each token. `beta`
    weighs the k3 estimate of KL(policy || reference). `denominator`: tokens of the whole batch when this is a part of
    it. Returns the scalar loss, with a gradient to `logprobs` alone, and detached metrics: masked means over tokens.
    """
    advantages = check_inputs(logprobs, old_logprobs, advantages, mask, ref_logprobs)
    log_r = log_ratio(logprobs, old_logprobs, mask)  # (B, T)
    per_token = clipped_surrogate(log_r.exp(), advantages, clip_low, clip_high, dual_clip)  # (B, T)
    kl, kl_metrics = kl_penalty(logprobs, ref_logprobs, beta, mask)
    metrics = ratio_metrics(log_r.detach(), advantages, mask, clip_low, clip_high) | kl_metrics
    return token_mean(per_token + kl, mask, denominator), metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.2,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss for one batch or micro-batch, to be weighed by the caller.

    values, old_values (those of the rollout), returns, mask (B, T). `clip`: how far a value may move from its old one,
    in units of reward; None does not clip. `denominator`: tokens of the whole batch when this is a part of it. Returns
    the scalar loss, with a gradient to `values` alone, and `value_clip_fraction`: the share of tokens where clipping
    changes the loss.
    """
    if values.dim() != 2 or not values.shape == old_values.shape == returns.shape == mask.shape:
        shapes = [tuple(x.shape) for x in (values, old_values, returns, mask)]
        raise ValueError(f"expected values, old_values, returns and mask of one shape (B, T), got {shapes}")
    if clip is not None and not clip >= 0:
        raise ValueError(f"clip must be None or at least 0, not {clip}")
    values, returns = masked(values, mask), masked(returns.detach(), mask)
    error = (values - returns) ** 2  # (B, T)
    worst = error
    if clip is not None:
        old_values = masked(old_values.detach(), mask)
        worst = torch.maximum(error, (values.clamp(old_values - clip, old_values + clip) - returns) ** 2)
    clipped = (worst > error).detach().to(error.dtype)
    return token_mean(0.5 * worst, mask, denominator), {"value_clip_fraction": token_mean(clipped, mask)}
