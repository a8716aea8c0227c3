"""One pass over rows of logits: log-prob, entropy and exact KL of each row, and the gradient of the three by hand.

What is computed stands in kernels/reference.py. Per row, with upstream gradients g_l, g_H, g_K of the three values:

    dx_j = [j = t] g_l - p_j (g_l + g_H (log p_j + H) - g_K (log p_j - log q_j - K))

The reference's logits y take no gradient. First in torch, on as many rows at a time as fit a core's cache; then in
Triton, one program a row, which reads the logits once. For that, running sums move along with the running maximum, as
in online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867). When m grows, d = m_old - m_new and, at T = 1,

    s <- e^d s         a <- e^d (a + s d)         b <- e^d (b + s (d - d'))

for s = sum e^(x-m), a = sum e^(x-m) (x-m) and b = sum e^(x-m) ((x-m) - (y-m')), before the next block is added.
"""

import torch
from torch import Tensor

from kernels.backend import jit, tl, use_triton
from kernels.reference import capped

CACHE_LOGITS = 2**17  # torch works on this many at a time: half a megabyte stays in a core's cache
BLOCK, WARPS = 4096, 8  # logits that a Triton program reads at a time, and the warps that share them
IMPOSSIBLE = -1000.0  # a log-prob below which exp is exactly 0, in float64 too; unlike -inf it may be multiplied by 0
FLOOR = tl.constexpr(IMPOSSIBLE)
ALIGNED = 64  # logits; rows that begin at multiples of it can be read 16 bytes at a time, whatever V


def empty_logits(rows: int, vocab: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(rows, vocab) without values. On a GPU each row is followed by a gap, so that the next begins aligned."""
    stride = -(-vocab // ALIGNED) * ALIGNED if like.is_cuda else vocab
    return like.new_empty(rows, stride, dtype=dtype or like.dtype)[:, :vocab]


def rows_forward(
    logits: Tensor,
    targets: Tensor,
    ref_logits: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """(C, V) logits, (C,) targets in [0, V), perhaps (C, V) reference logits -> (4 or 7, C), one line a result:

    log-prob, entropy, maximum, log-sum; with a reference also KL, the reference's maximum and log-sum. The logits stay
    as they are: temperature and softcap are applied on the way. Rows of logits behind the C-th take no part.
    """
    C, V = len(targets), logits.shape[1]
    results = logits.new_empty(4 if ref_logits is None else 7, C)
    if use_triton(logits):
        launch(
            rows_forward_kernel, logits, C, *strided(ref_logits), targets.contiguous(), results, C, V, 1 / temperature,
            softcap,
        )  # fmt: skip
        return results
    for part in cached(C, V):
        shifted, maximum, log_sum = normalized(logits[part], temperature, softcap)
        probs = (shifted - log_sum).exp_()
        logprob = shifted.gather(1, targets[part, None]) - log_sum
        if ref_logits is not None:
            ref_shifted, ref_maximum, ref_log_sum = normalized(ref_logits[part], temperature, softcap)
            gap = (shifted - ref_shifted).masked_fill_(probs == 0, 0)
            kl = gap.mul_(probs).sum(-1, keepdim=True) - log_sum + ref_log_sum
            results[4:, part] = torch.cat([kl, ref_maximum, ref_log_sum], 1).T
        entropy = log_sum - shifted.clamp_(min=IMPOSSIBLE).mul_(probs).sum(-1, keepdim=True)
        results[:4, part] = torch.cat([logprob, entropy, maximum, log_sum], 1).T
    return results


def rows_backward(
    logits: Tensor,
    targets: Tensor,
    results: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_kl: Tensor | None = None,
    ref_logits: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (C, V) to the logits, written over them or into `out`, which may be of another type.

    `results` are those of `rows_forward`, the upstream gradients (C,), or None for a value that was not used.
    """
    C, V = len(targets), logits.shape[1]
    out = logits if out is None else out
    if use_triton(logits):
        gradients = [g if g is None else g.contiguous() for g in (grad_logprob, grad_entropy, grad_kl)]
        launch(
            rows_backward_kernel, logits, C, *strided(None if grad_kl is None else ref_logits), targets.contiguous(),
            results.contiguous(), C, *gradients, *strided(out), V, 1 / temperature, softcap,
        )  # fmt: skip
        return out
    for part in cached(C, V):
        _, entropy, maximum, log_sum, *of_ref = results[:, part, None]
        logprobs = over(capped(logits[part], softcap) - maximum, temperature).sub_(log_sum)
        probs = logprobs.exp()
        factor = 0.0  # (C, 1) or (C, V)
        if grad_logprob is not None:
            factor = grad_logprob[part, None]
        if grad_entropy is not None or grad_kl is not None:
            logprobs.clamp_(min=IMPOSSIBLE)
        if grad_entropy is not None:
            factor = factor + grad_entropy[part, None] * (logprobs + entropy)
        if grad_kl is not None:
            kl, ref_maximum, ref_log_sum = of_ref
            ref_logprobs = over(capped(ref_logits[part], softcap) - ref_maximum, temperature).sub_(ref_log_sum)
            gap = logprobs.sub_(ref_logprobs.masked_fill_(probs == 0, 0)).sub_(kl)
            factor = factor - grad_kl[part, None] * gap
        grad = probs.mul_(factor).neg_()
        if grad_logprob is not None:
            grad.scatter_add_(1, targets[part, None], grad_logprob[part, None])
        if softcap is not None:
            grad *= 1 - (logits[part] / softcap).tanh() ** 2
        out[part] = over(grad, temperature)
    return out


def cached(C: int, V: int) -> list[slice]:
    """Rows that together fit the cache."""
    rows = max(1, CACHE_LOGITS // V)
    return [slice(start, min(start + rows, C)) for start in range(0, C, rows)]


def normalized(logits: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(x - m) / T (C, V), m (C, 1) and log sum e^((x - m) / T) (C, 1)."""
    x = capped(logits, softcap)
    maximum = x.amax(-1, keepdim=True)
    shifted = over(x - maximum, temperature)
    return shifted, maximum, shifted.exp().sum(-1, keepdim=True).log_()


def over(x: Tensor, temperature: float) -> Tensor:
    """x / temperature, in x itself. Of values that were shifted first: a division rounds, and rounds 1e4 by 1e-3."""
    return x if temperature == 1 else x.div_(temperature)


def launch(kernel, logits: Tensor, C: int, *arguments) -> None:
    """One program a row, on the GPU where the logits are."""
    if C:
        with torch.cuda.device_of(logits):
            kernel[(C,)](*strided(logits), *arguments, BLOCK=BLOCK, num_warps=WARPS)


def strided(rows: Tensor | None) -> tuple[Tensor | None, int]:
    if rows is None:
        return None, 0
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise ValueError(f"each row must lie in one piece, not with {rows.stride(1)} elements from word to word")
    return rows, rows.stride(0)


# The same in Triton. Blocks are (rows, columns): one row here, many in kernels/flash.py, which shares these functions.


@jit
def cap(x, softcap):
    """What `capped` in kernels/reference.py does."""
    if softcap is not None:
        x = softcap * tanh(x / softcap)
    return x


@jit
def tanh(x):
    e = tl.exp(-2 * tl.abs(x))  # never overflows
    return tl.where(x < 0, e - 1, 1 - e) / (1 + e)


@jit
def read(row, start, columns, V, BLOCK: tl.constexpr):
    """Raw logits of one block. Only the last asks for V: behind a mask there are no 16-byte reads."""
    if start + BLOCK <= V:
        x = tl.load(row + columns)
    else:
        x = tl.load(row + columns, mask=columns < V, other=0.0)
    return x


@jit
def to_new_maximum(x, m, inverse_temperature):
    """The maximum with x seen too, (x - it) / T, and how far it moved, 0 or less, over T."""
    m_new = tl.maximum(m, tl.max(x, 1))
    finite = tl.where(m_new == -float("inf"), 0.0, m_new)  # so far nothing but -inf: -inf minus -inf would be NaN
    moved = tl.where(m == -float("inf"), 0.0, m - finite)
    return m_new, (x - finite[:, None]) * inverse_temperature, moved * inverse_temperature


@jit
def add_block(x, m, s, a, inverse_temperature):
    """Running maximum and sums with one more block; also its e^(x-m) and x - m, and how far the maximum moved."""
    m, shifted, moved = to_new_maximum(x, m, inverse_temperature)
    e = tl.exp(shifted)
    a = tl.exp(moved) * (a + s * moved) + tl.sum(tl.where(e == 0, 0.0, e * shifted), 1)  # 0 * -inf is 0 here
    s = tl.exp(moved) * s + tl.sum(e, 1)
    return m, s, a, e, shifted, moved


@jit
def rows_forward_kernel(
    logits, stride, ref_logits, ref_stride, targets, results, C, V, inverse_temperature, softcap, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2^31 at 14,000 rows of 152,000 words
    logits += row * stride
    if ref_logits is not None:
        ref_logits += row * ref_stride
    one = tl.arange(0, 1)  # of (1,) numbers, for this one row
    m = tl.full((1,), -float("inf"), tl.float32)
    s = tl.zeros((1,), tl.float32)
    a, b, ref_m, ref_s = s, s, m, s
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        x = cap(read(logits, start, columns, V, BLOCK), softcap)
        s_before = s
        # Beyond V stand words of probability 0: a logit of 0 there would be a word that the model could choose.
        m, s, a, e, shifted, moved = add_block(tl.where(columns < V, x, -float("inf")), m, s, a, inverse_temperature)
        if ref_logits is not None:
            y = cap(read(ref_logits, start, columns, V, BLOCK), softcap)
            y = tl.where(columns < V, y, -float("inf"))
            ref_m, ref_shifted, ref_moved = to_new_maximum(y, ref_m, inverse_temperature)
            gap = tl.where(e == 0, 0.0, e * (shifted - ref_shifted))
            b = tl.exp(moved) * (b + s_before * (moved - ref_moved)) + tl.sum(gap, 1)
            ref_s = tl.exp(ref_moved) * ref_s + tl.sum(tl.exp(ref_shifted), 1)
    log_sum = tl.log(s)
    target = cap(tl.load(logits + tl.load(targets + row + one)), softcap)
    results += row + one
    tl.store(results, (target - m) * inverse_temperature - log_sum)
    tl.store(results + C, log_sum - a / s)
    tl.store(results + 2 * C, m)
    tl.store(results + 3 * C, log_sum)
    if ref_logits is not None:
        ref_log_sum = tl.log(ref_s)
        tl.store(results + 4 * C, b / s - log_sum + ref_log_sum)
        tl.store(results + 5 * C, ref_m)
        tl.store(results + 6 * C, ref_log_sum)


@jit
def upstream(gradients, rows, mask):
    """Gradients (rows, 1) to one of the values; 0 where no loss used it."""
    if gradients is None:
        return 0.0
    else:
        return tl.load(gradients + rows, mask=mask, other=0.0)[:, None]


@jit
def gradient_to_logprobs(logprobs, columns, target, entropy, grad_logprob, grad_entropy):
    """[j = t] g_l - p_j (g_l + g_H (log p_j + H)) of a block; the rest are numbers, or (rows, 1)."""
    possible = tl.where(logprobs < FLOOR, FLOOR, logprobs)  # NaN stays NaN
    grad = -tl.exp(logprobs) * (grad_logprob + grad_entropy * (possible + entropy))
    return tl.where(columns == target, grad + grad_logprob, grad)


@jit
def through_cap(grad, x, inverse_temperature, softcap):
    """From the gradient to what the softmax sees on to that of the raw logits x."""
    if softcap is not None:
        t = tanh(x / softcap)
        grad *= 1 - t * t
    return grad * inverse_temperature


@jit
def rows_backward_kernel(
    logits, stride, ref_logits, ref_stride, targets, results, C, grad_logprob, grad_entropy, grad_kl, out, out_stride,
    V, inverse_temperature, softcap, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * out_stride
    target = tl.load(targets + row)
    entropy, m, log_sum = tl.load(results + C + row), tl.load(results + 2 * C + row), tl.load(results + 3 * C + row)
    one = row + tl.arange(0, 1)
    g_logprob, g_entropy = upstream(grad_logprob, one, one < C), upstream(grad_entropy, one, one < C)
    if ref_logits is not None:
        ref_logits += row * ref_stride
        kl, g_kl = tl.load(results + 4 * C + row), tl.load(grad_kl + row)
        ref_m, ref_log_sum = tl.load(results + 5 * C + row), tl.load(results + 6 * C + row)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        x = read(logits, start, columns, V, BLOCK)
        logprobs = (cap(x, softcap) - m) * inverse_temperature - log_sum
        grad = gradient_to_logprobs(logprobs, columns, target, entropy, g_logprob, g_entropy)
        if ref_logits is not None:
            y = cap(read(ref_logits, start, columns, V, BLOCK), softcap)
            gap = logprobs - ((y - ref_m) * inverse_temperature - ref_log_sum) - kl
            probs = tl.exp(logprobs)
            grad += tl.where(probs == 0, 0.0, probs * gap * g_kl)
        grad = through_cap(grad, x, inverse_temperature, softcap).to(out.dtype.element_ty)
        if start + BLOCK <= V:
            tl.store(out + columns, grad)
        else:
            tl.store(out + columns, grad, mask=columns < V)
