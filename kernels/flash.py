"""Log-probs and entropies of a language model's head without writing a single logit: the smallest memory.

As flash attention (Dao et al. 2022, arXiv 2205.14135) does with scores. A program multiplies a tile of tokens with one
stripe of the vocabulary, tile by tile, and keeps three numbers a token: the maximum m, s = sum e^(x-m) and
a = sum e^(x-m) (x-m). `merge` brings the stripes together. The backward pass has one slab of the vocabulary at a time:
a kernel multiplies it again and writes dlogits of all tokens to it, two matrix products take those on to the gradients.

The library's matrix product is faster than one in Triton: kernels/linear.py is the default where memory allows. On a
CPU, without triton or for another type it serves here too.
"""

import torch
from torch import Tensor

from kernels.backend import INTERPRETED, jit, tl, use_triton
from kernels.linear import add_product, at_rows, linear_logprob, product_dtype, scored_rows
from kernels.rows import add_block, cap, gradient_to_logprobs, through_cap, upstream

STRIPE = 4096  # words of one program of the forward pass
SLAB = 1024  # words whose dlogits exist at one time: below 1 % of a vocabulary of 128,000
# Tokens and words of a tile, the share of D that is loaded at a time, warps, stages of the pipeline that loads.
TILES = {torch.bfloat16: (128, 128, 64, 8, 3), torch.float32: (64, 64, 32, 8, 2)}


def flash_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """What `linear_logprob` computes, with the same arguments, results and errors; see kernels/linear.py."""
    kept, kept_targets = scored_rows(hidden, weight, targets, ignore_index, temperature, softcap)
    if not use_triton(hidden, weight):
        return linear_logprob(
            hidden, weight, targets, temperature=temperature, softcap=softcap, ignore_index=ignore_index
        )
    dtype = product_dtype(hidden, weight)
    values = FlashLogprob.apply(
        hidden[kept].to(dtype).contiguous(), weight.to(dtype).contiguous(), kept_targets, float(temperature), softcap
    )
    return at_rows(values, kept, len(targets))


def merge(m: Tensor, s: Tensor, a: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(stripes, N) each -> (N,) of the whole vocabulary. A stripe of nothing but -inf has m = -inf and s = a = 0."""
    whole = m.amax(0)
    moved = (m - whole).masked_fill(m == -torch.inf, 0) / temperature
    share = moved.exp()
    return whole, (share * s).sum(0), (share * (a + s * moved)).sum(0)


class FlashLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, softcap: float | None):
        ctx.set_materialize_grads(False)
        ctx.shape = (1 / temperature, softcap)
        (N, D), V = hidden.shape, len(weight)
        stripes = -(-V // STRIPE)
        states = torch.empty(stripes, 3, N, dtype=torch.float32, device=hidden.device)
        target = torch.empty(N, dtype=torch.float32, device=hidden.device)
        if N:
            tokens, options = tiles(hidden.dtype)
            with torch.cuda.device_of(hidden):
                flash_forward_kernel[(-(-N // tokens) * stripes,)](
                    hidden, weight, targets, states, target, N, V, D, *ctx.shape, STRIPE=STRIPE, **options
                )
        m, s, a = merge(*states.unbind(1), temperature)
        log_sum = s.log()
        results = torch.stack([(target - m) / temperature - log_sum, log_sum - a / s, m, log_sum])
        ctx.save_for_backward(hidden, weight, targets, results)
        return tuple(results[:2])

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError("flash_logprob has first derivatives only: call backward without create_graph")
        hidden, weight, targets, results = ctx.saved_tensors
        (N, D), V = hidden.shape, len(weight)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        slab = hidden.new_empty(N, SLAB)
        gradients = [g if g is None else g.contiguous() for g in gradients]
        for start in range(0, V if N else 0, SLAB):
            words = min(SLAB, V - start)
            tokens, options = tiles(hidden.dtype)
            with torch.cuda.device_of(hidden):
                flash_slab_kernel[(-(-N // tokens) * -(-words // options["WORDS"]),)](
                    hidden, weight, targets, results, *gradients, slab, SLAB, start, N, V, D, *ctx.shape, **options
                )
            if grad_hidden is not None:
                add_product(slab[:, :words], weight[start : start + words], grad_hidden)
            if grad_weight is not None:
                grad_weight[start : start + words] = slab[:, :words].T @ hidden
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def tiles(dtype: torch.dtype) -> tuple[int, dict]:
    tokens, words, depth, warps, stages = TILES[dtype]
    # The interpreter would multiply the bit patterns of bfloat16.
    options = {"TOKENS": tokens, "WORDS": words, "DEPTH": depth, "UPCAST": INTERPRETED}
    return tokens, options | {"num_warps": warps, "num_stages": stages}


@jit
def raw_logits(
    hidden, weight, rows, words, N, V, D, TOKENS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile (TOKENS, WORDS) of hidden @ weight.T, summed in float32."""
    total = tl.zeros((TOKENS, WORDS), tl.float32)
    hidden += rows.to(tl.int64)[:, None] * D  # N * D and V * D may pass 2^31
    weight += words.to(tl.int64)[None, :] * D
    for start in range(0, D, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        h = tl.load(hidden + depth[None, :], mask=(rows < N)[:, None] & (depth < D)[None, :], other=0.0)
        w = tl.load(weight + depth[:, None], mask=(words < V)[None, :] & (depth < D)[:, None], other=0.0)
        if UPCAST:
            h, w = h.to(tl.float32), w.to(tl.float32)
        total = tl.dot(h, w, total, input_precision="ieee")
    return total


@jit
def flash_forward_kernel(
    hidden, weight, targets, states, target_logits, N, V, D, inverse_temperature, softcap,
    STRIPE: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time share a stripe, which then comes from memory once.
    blocks = tl.cdiv(N, TOKENS)
    stripe = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    target = tl.load(targets + rows, mask=rows < N, other=-1)[:, None]
    m = tl.full((TOKENS,), -float("inf"), tl.float32)
    s = tl.zeros((TOKENS,), tl.float32)
    a = s
    first = stripe * STRIPE
    for start in range(first, tl.minimum(first + STRIPE, V), WORDS):
        words = start + tl.arange(0, WORDS)
        x = raw_logits(hidden, weight, rows, words, N, V, D, TOKENS, WORDS, DEPTH, UPCAST)
        x = tl.where((words < V)[None, :], cap(x, softcap), -float("inf"))
        m, s, a, _, _, _ = add_block(x, m, s, a, inverse_temperature)
        hit = words[None, :] == target  # in one tile of one stripe
        tl.store(target_logits + rows[:, None] + tl.zeros_like(words)[None, :], x, mask=hit)
    states += stripe.to(tl.int64) * 3 * N + rows
    tl.store(states, m, mask=rows < N)
    tl.store(states + N, s, mask=rows < N)
    tl.store(states + 2 * N, a, mask=rows < N)


@jit
def flash_slab_kernel(
    hidden, weight, targets, results, grad_logprob, grad_entropy, slab, slab_stride, first, N, V, D,
    inverse_temperature, softcap, TOKENS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, TOKENS)
    rows = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(0) // blocks * WORDS + tl.arange(0, WORDS)
    words = first + columns
    x = raw_logits(hidden, weight, rows, words, N, V, D, TOKENS, WORDS, DEPTH, UPCAST)
    some = rows < N
    target = tl.load(targets + rows, mask=some, other=-1)[:, None]
    entropy = tl.load(results + N + rows, mask=some, other=0.0)[:, None]
    m = tl.load(results + 2 * N + rows, mask=some, other=0.0)[:, None]
    log_sum = tl.load(results + 3 * N + rows, mask=some, other=0.0)[:, None]
    g_logprob, g_entropy = upstream(grad_logprob, rows, some), upstream(grad_entropy, rows, some)
    logprobs = (cap(x, softcap) - m) * inverse_temperature - log_sum
    grad = gradient_to_logprobs(logprobs, words[None, :], target, entropy, g_logprob, g_entropy)
    grad = through_cap(grad, x, inverse_temperature, softcap).to(slab.dtype.element_ty)
    place = slab + rows.to(tl.int64)[:, None] * slab_stride + columns[None, :]
    tl.store(place, grad, mask=some[:, None])  # the slab is whole also where the vocabulary ends within it
