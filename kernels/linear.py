"""Hidden states and the head's matrix in, per-token log-probs, entropies and KLs out, never all logits at once.

The logits of N tokens over V words are N x V numbers: at 8,192 tokens and 150,000 words five gigabytes. Here they
exist for `chunk` tokens at a time: one matrix product, then one pass over its rows (kernels/rows.py). What any loss
wants of the values is known only in the backward pass, and then the logits are there again: computed once more, or kept
as far as `keep_logits_bytes` goes. That is the one dial between memory and time: 8NDV multiplications and additions
against 6NDV.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.backend import use_triton
from kernels.rows import empty_logits, rows_backward, rows_forward

CHUNK_TOKENS = 512  # on a CPU; larger chunks cost memory and gain nothing there
GPU_CHUNK_TOKENS = 2048  # the weight's gradient is read and written once a chunk, which smaller ones would feel
KEEP_LOGITS_BYTES = 2**20  # what a processor's cache holds: small vocabularies are never computed twice
TILE = 16  # rows that a matrix product takes at once


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    reference: tuple[Tensor, Tensor] | None = None,
    chunk: int | None = None,
    keep_logits_bytes: int = KEEP_LOGITS_BYTES,
) -> tuple[Tensor, ...]:
    """log softmax(logits) at `targets`, and the entropy of that distribution.

    The logits are hidden @ weight.T, with a `softcap` c bounded to c * tanh(logits / c), divided by the temperature.
    hidden (N, D), weight (V, D), targets (N,) integers -> log-probs (N,), entropies (N,) in nats; float32, or float64
    for float64 inputs. Both carry a gradient to hidden and weight (first derivatives only). Rows whose target is
    `ignore_index` are dropped before the matrix product, so NaNs in them do no harm: log-prob, entropy and gradient
    are 0. With `reference`, hidden states (N, D') and head (V, D') that take no gradient, a third result is
    KL(policy || reference) (N,), exact over the vocabulary. `chunk` tokens at a time (512 on a CPU, 2048 on a GPU); as
    many of their logits as fit `keep_logits_bytes` are kept for the backward pass. Raises ValueError on wrong shapes,
    on a temperature or softcap that is not positive (the latter also: not finite) and on a target outside [0, V).
    """
    kept, kept_targets = scored_rows(hidden, weight, targets, ignore_index, temperature, softcap)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, not {chunk}")
    inputs = [hidden[kept], weight]
    if reference is not None:
        scored_rows(*reference, targets, ignore_index)
        if len(reference[1]) != len(weight):
            raise ValueError(f"policy and reference have {len(weight)} and {len(reference[1])} words, not the same")
        inputs += [reference[0].detach()[kept], reference[1].detach()]
    dtype = product_dtype(*inputs)
    inputs = [x.to(dtype) for x in inputs] + [None] * (4 - len(inputs))
    chunk = chunk or (GPU_CHUNK_TOKENS if hidden.is_cuda else CHUNK_TOKENS)
    keep = keep_logits_bytes if torch.is_grad_enabled() else 0
    values = LinearRows.apply(*inputs, kept_targets, float(temperature), softcap, chunk, keep)
    return at_rows(values, kept, len(targets))


def linear_kl(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, targets: Tensor | None = None, **options
) -> Tensor:
    """KL(policy || reference) (N,) of `linear_logprob`, with its options; targets only say which rows to leave out."""
    if targets is None:
        targets = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        options = options | {"ignore_index": -100}
    return linear_logprob(hidden, weight, targets, reference=(ref_hidden, ref_weight), **options)[2]


def scored_rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, temperature=1.0, softcap=None
) -> tuple[Tensor, Tensor]:
    """Numbers and targets of the rows that have one; ValueError for what cannot be right."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden (N, D) and weight (V, D), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1] or targets.is_floating_point() or targets.is_complex():
        raise ValueError(f"expected {len(hidden)} integer targets, got {targets.dtype} {tuple(targets.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, or None for no cap, not {softcap}")
    targets = targets.long()  # compared in 8 bits, target 156 would be -100
    kept = (targets != ignore_index).nonzero().squeeze(1)
    kept_targets = targets[kept]
    if len(kept) and not (0 <= kept_targets.min() and kept_targets.max() < len(weight)):
        low, high = kept_targets.min().item(), kept_targets.max().item()
        raise ValueError(f"targets must lie in [0, {len(weight)}) or be {ignore_index}; got {low} to {high}")
    return kept, kept_targets


def at_rows(values: tuple[Tensor, ...], kept: Tensor, N: int) -> tuple[Tensor, ...]:
    """(N,) each: the values of the kept rows where those were, 0 elsewhere."""
    zeros = values[0].new_zeros(N)
    return tuple(zeros.index_copy(0, kept, value) for value in values)


def product_dtype(*inputs: Tensor) -> torch.dtype:
    """The type in which they are multiplied; the logits are float32 at least.

    bfloat16 logits would put log-probs off by a tenth of a nat. A GPU multiplies bfloat16 and sums in float32; a CPU
    takes float32 from the start, and the gradients are rounded once, on the way out.
    """
    if inputs[0].is_cuda and all(x.dtype == torch.bfloat16 for x in inputs) and use_triton(*inputs):
        return torch.bfloat16
    dtype = torch.float32
    for x in inputs:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


class LinearRows(torch.autograd.Function):
    """(N, D), (V, D), perhaps (N, D') and (V, D') of a reference, (N,) -> log-prob, entropy (N,), with one also KL."""

    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, targets, temperature, softcap, chunk, keep_logits_bytes):
        ctx.set_materialize_grads(False)  # None for a value that no loss used: nothing is computed for it
        ctx.shape = {"temperature": temperature, "softcap": softcap}
        ctx.chunk = min(chunk, max(TILE, 1 << (len(hidden) - 1).bit_length()))  # few sizes, little work for nothing
        ctx.kept = {}  # start of a chunk -> its logits, which the first backward pass writes over
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        results = hidden.new_empty(4 if ref_hidden is None else 7, len(hidden), dtype=dtype)
        space = (None, None)
        for part in parts(len(hidden), ctx.chunk):
            logits, ref_logits = space = logits_of(part, ctx.chunk, hidden, weight, ref_hidden, ref_weight, space)
            results[:, part] = rows_forward(logits, targets[part], ref_logits, **ctx.shape)
            size = sum(x.untyped_storage().nbytes() for x in space if x is not None)
            if size <= keep_logits_bytes:
                keep_logits_bytes -= size
                ctx.kept[part.start], space = space, (None, None)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, targets, results)
        return tuple(results[:2]) if ref_hidden is None else (*results[:2], results[4])

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        if torch.is_grad_enabled():  # create_graph=True; without this the second derivative would silently be missing
            raise RuntimeError("linear_logprob has first derivatives only: call backward without create_graph")
        *pairs, targets, results = ctx.saved_tensors
        hidden, weight = pairs[:2]
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=results.dtype) if ctx.needs_input_grad[1] else None
        space, narrow = (None, None), None
        for part in parts(len(hidden), ctx.chunk):
            logits, ref_logits = space = ctx.kept.pop(part.start, None) or logits_of(part, ctx.chunk, *pairs, space)
            grad = logits  # written over, unless the matrix products take the gradient in another type
            if weight.dtype != logits.dtype:
                grad = narrow = empty_logits(len(logits), len(weight), weight) if narrow is None else narrow
            of_part = [None if g is None else g[part] for g in upstream]
            rows_backward(
                logits, targets[part], results[:, part], *of_part, ref_logits=ref_logits, out=grad, **ctx.shape
            )
            rows = part.stop - part.start
            if grad_hidden is not None:
                grad_hidden[part] = (grad @ weight)[:rows]
            if grad_weight is not None:
                add_product(grad[:rows].T, hidden[part], grad_weight)
        logits = ref_logits = space = narrow = grad = None  # before the last conversion asks for memory
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 7


def parts(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def logits_of(part: slice, chunk: int, hidden, weight, ref_hidden, ref_weight, space) -> tuple[Tensor, Tensor | None]:
    """Logits of a chunk under policy and, if there is one, reference; into `space`, where there is such."""
    logits = product(hidden[part], weight, chunk, space[0])
    return logits, None if ref_hidden is None else product(ref_hidden[part], ref_weight, chunk, space[1])


def product(hidden: Tensor, weight: Tensor, chunk: int, out: Tensor | None) -> Tensor:
    """hidden @ weight.T (C, V), followed by rows without a meaning up to whole tiles.

    A library may multiply a few rows, or the odd ones behind the last whole tile, in another order of sums. Whole
    tiles, on a GPU always a whole chunk of them, give a row the same bits whatever stands beside it.
    """
    rows = -(-(chunk if hidden.is_cuda else len(hidden)) // TILE) * TILE
    if len(hidden) < rows:
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, rows - len(hidden)))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    out = empty_logits(rows, len(weight), weight, dtype) if out is None else out[:rows]
    same = hidden.dtype == dtype
    return torch.mm(hidden, weight.T, out=out) if same else torch.mm(hidden, weight.T, out_dtype=dtype, out=out)


def add_product(a: Tensor, b: Tensor, total: Tensor) -> None:
    """total += a @ b, summed in the type of `total`."""
    if a.dtype == total.dtype:
        total += a @ b
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
