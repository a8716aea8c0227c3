"""Hidden states and the head's matrix in, per-token log-probs and entropies out, never all logits at once.

The logits of N tokens over V words are N x V numbers: at 8,192 tokens and 150,000 words five gigabytes. Here they
exist for `chunk` tokens at a time and are computed again in the backward pass.

With logits x = W h / T, row maximum m, s = sum_j exp(x_j - m) and p = softmax(x):

    log-prob  l = (x_t - m) - log s                      dl/dx_j = [j = t] - p_j
    entropy   H = log s - sum_j exp(x_j - m)(x_j - m)/s  dH/dx_j = -p_j (log p_j + H)

Only shifted values are summed: the usual H = logsumexp - sum p x loses half its digits when logits are large.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_TOKENS = 512  # on a CPU; larger chunks cost memory and gain nothing there


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    chunk: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that distribution.

    hidden (N, D), weight (V, D), targets (N,) integers -> log-probs (N,), entropies (N,) in nats; float32, or float64
    for float64 inputs. Both carry a gradient to hidden and weight (first derivatives only). Rows whose target is
    `ignore_index` are dropped before the matrix product, so NaNs in them do no harm: log-prob, entropy and gradient
    are 0. Raises ValueError on wrong shapes, on a temperature that is not positive and on a target outside [0, V).
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden (N, D) and weight (V, D), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1] or targets.is_floating_point():
        raise ValueError(f"expected {len(hidden)} integer targets, got {targets.dtype} {tuple(targets.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, not {chunk}")
    kept = (targets != ignore_index).nonzero().squeeze(1)
    kept_targets = targets[kept].long()
    if len(kept) and not (0 <= kept_targets.min() and kept_targets.max() < len(weight)):
        low, high = kept_targets.min().item(), kept_targets.max().item()
        raise ValueError(f"targets must lie in [0, {len(weight)}) or be {ignore_index}; got {low} to {high}")
    # Products in bfloat16 would put log-probs off by a tenth of a nat; the gradients are rounded once, on the way out.
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    logprob, entropy = LinearLogprob.apply(
        hidden[kept].to(dtype), weight.to(dtype), kept_targets, float(temperature), chunk
    )
    zeros = logprob.new_zeros(len(hidden))
    return zeros.index_copy(0, kept, logprob), zeros.index_copy(0, kept, entropy)


def log_softmax_parts(hidden: Tensor, weight: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of one chunk: log-probabilities (C, V), probabilities (C, V), entropies (C,)."""
    logits = hidden @ weight.T / temperature
    shifted = logits - logits.amax(-1, keepdim=True)
    log_sum = shifted.exp().sum(-1, keepdim=True).log()
    logprobs = shifted - log_sum
    probs = logprobs.exp()
    finite = shifted.masked_fill(probs == 0, 0)  # 0 * -inf is 0 here
    entropy = log_sum.squeeze(-1) - (probs * finite).sum(-1)
    return logprobs, probs, entropy


class LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int):
        logprob = hidden.new_empty(len(hidden))
        entropy = torch.empty_like(logprob)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logprobs, _, entropy[part] = log_softmax_parts(hidden[part], weight, temperature)
            logprob[part] = logprobs.gather(1, targets[part, None]).squeeze(1)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad_logprob: Tensor, grad_entropy: Tensor):
        if torch.is_grad_enabled():  # create_graph=True; without this the second derivative would silently be missing
            raise RuntimeError("linear_logprob has first derivatives only: call backward without create_graph")
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logprobs, probs, entropy = log_softmax_parts(hidden[part], weight, ctx.temperature)
            finite = logprobs.masked_fill(probs == 0, 0)
            grad = -probs * (
                grad_logprob[part, None] + grad_entropy[part, None] * (finite + entropy[:, None])
            )  # (C, V)
            grad.scatter_add_(1, targets[part, None], grad_logprob[part, None])
            grad = grad / ctx.temperature
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight, None, None, None
