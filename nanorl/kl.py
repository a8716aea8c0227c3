"""Per-token estimates of KL(policy || reference), and the exact value.

With d = log pi_ref(a) - log pi(a) for a token a drawn from the policy (Schulman 2020, "Approximating KL divergence"):

    k1 = -d                unbiased, noisy, negative half the time
    k2 = d^2 / 2           biased a little; its gradient is that of KL(policy || reference)
    k3 = exp(d) - d - 1    unbiased, never negative; its gradient is that of KL(reference || policy)

The gradients are those of the expected value when the sampled tokens are held fixed; k1's is then zero on average, so
as a loss it does nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8: far outside any trust region, far inside float32


def clamp_log_ratio(x: Tensor) -> Tensor:
    """Bounded to +-20, with zero gradient beyond, so that exp never overflows and backward never meets inf * 0.

    An infinite x comes from a broken log-prob; it becomes NaN (inf * 0), to be reported rather than hidden.
    """
    return x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) + 0 * x


def k3(d: Tensor) -> Tensor:
    """exp(d) - d - 1 of d = log(reference / policy), the clamped d in every term."""
    d = clamp_log_ratio(d)
    return torch.expm1(d) - d


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """(B, T) log-probs of sampled tokens under policy and reference -> (B, T) estimates in nats, with gradient to the
    policy. k1 and k2 are not clamped."""
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"expected equal shapes, got {tuple(logprobs.shape)} and {tuple(ref_logprobs.shape)}")
    d = ref_logprobs.detach() - logprobs
    estimates = {"k1": lambda: -d, "k2": lambda: d * d / 2, "k3": lambda: k3(d)}
    if kind not in estimates:
        raise ValueError(f"unknown KL estimate {kind!r}: choose one of {', '.join(estimates)}")
    return estimates[kind]()


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(policy || reference) in nats over the whole vocabulary: logits (..., V), (..., V) -> (...)."""
    if logits.shape != ref_logits.shape:
        raise ValueError(f"expected equal shapes, got {tuple(logits.shape)} and {tuple(ref_logits.shape)}")
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    probs = logprobs.exp()
    # A token that the policy cannot choose adds 0, whatever the reference thinks of it.
    return (probs * (logprobs - ref_logprobs).masked_fill(probs == 0, 0)).sum(-1)
