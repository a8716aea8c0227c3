"""Solutions of lesson 15. They pass the checks of exercise.py:

python lessons/15_kernels/solution.py
"""

import checks
import torch
from checks import jit, tl
from torch import Tensor


def add_block(m: Tensor, s: Tensor, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, s, a (N,), block x (N, width) -> m, s, a (N,)"""
    m_new = torch.maximum(m, x.amax(1))
    finite = m_new.masked_fill(m_new == -torch.inf, 0)  # so far nothing but -inf: -inf minus -inf would be NaN
    moved = (m - finite).masked_fill(m == -torch.inf, 0)
    shifted = x - finite[:, None]
    e = shifted.exp()
    a = moved.exp() * (a + s * moved) + (e * shifted.masked_fill(e == 0, 0)).sum(1)
    s = moved.exp() * s + e.sum(1)
    return m_new, s, a


def rows_forward(logits: Tensor, targets: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """logits (N, V), targets (N,) -> log-prob (N,), entropy (N,)"""
    m = logits.new_full((len(logits),), -torch.inf)
    s = a = torch.zeros_like(m)
    for x in logits.split(block, dim=1):
        m, s, a = add_block(m, s, a, x)
    log_sum = s.log()
    return (logits.gather(1, targets[:, None])[:, 0] - m) - log_sum, log_sum - a / s


def merge(m: Tensor, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, s, a (stripes, N) -> m, s, a (N,)"""
    whole = m.amax(0)
    moved = (m - whole).masked_fill(m == -torch.inf, 0)
    share = moved.exp()
    return whole, (share * s).sum(0), (share * (a + s * moved)).sum(0)


def rows_backward(logits: Tensor, targets: Tensor, grad_logprob: Tensor, grad_entropy: Tensor) -> Tensor:
    """logits (N, V), targets, grad_logprob, grad_entropy (N,) -> (N, V)"""
    logprobs = logits.log_softmax(1)
    probs = logprobs.exp()
    logprobs = logprobs.masked_fill(probs == 0, 0)
    entropy = -(probs * logprobs).sum(1, keepdim=True)
    grad = -probs * (grad_logprob[:, None] + grad_entropy[:, None] * (logprobs + entropy))
    return grad.scatter_add(1, targets[:, None], grad_logprob[:, None])


def linear_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, grad_logprob: Tensor, grad_entropy: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """hidden (N, D), weight (V, D), targets, grad_logprob, grad_entropy (N,) -> (N, D), (V, D)"""
    grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        logits = hidden[part] @ weight.T
        grad = rows_backward(logits, targets[part], grad_logprob[part], grad_entropy[part])
        grad_hidden[part] = grad @ weight
        grad_weight += grad.T @ hidden[part]
    return grad_hidden, grad_weight


@jit
def row_kernel(logits, targets, results, V, BLOCK: tl.constexpr):
    """logits (N, V) float32, targets (N,) int64 -> results (N, 2) float32"""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    m = -float("inf")
    s = 0.0
    a = 0.0
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < V, other=-float("inf"))
        m_new = tl.maximum(m, tl.max(x, 0))
        finite = tl.where(m_new == -float("inf"), 0.0, m_new)
        moved = tl.where(m == -float("inf"), 0.0, m - finite)
        e = tl.exp(x - finite)
        a = tl.exp(moved) * (a + s * moved) + tl.sum(tl.where(e == 0, 0.0, e * (x - finite)), 0)
        s = tl.exp(moved) * s + tl.sum(e, 0)
        m = m_new
    target = tl.load(logits + tl.load(targets + row))
    tl.store(results + 2 * row, (target - m) - tl.log(s))
    tl.store(results + 2 * row + 1, tl.log(s) - a / s)


def load(rows: Tensor, columns: Tensor, mask: Tensor, other: float = 0.0) -> Tensor:
    """What tl.load does: rows[:, columns] where the mask is true, `other` where it is not and nothing is read."""
    return torch.where(mask, rows[:, columns.clamp(max=rows.shape[1] - 1)], other)


def logprobs_that_fall_short(logits: Tensor, targets: Tensor, block: int) -> Tensor:
    """The bug: beyond V `load` gave 0, a logit like any other, so the last block held words that do not exist. Their
    share is small beside logits around 0 and nearly all beside logits around -20. A word of probability 0 is -inf."""
    V = logits.shape[1]
    m = logits.new_full((len(logits),), -torch.inf)
    s = torch.zeros_like(m)
    for start in range(0, V, block):
        columns = start + torch.arange(block)
        x = load(logits, columns, columns < V, other=-torch.inf)
        m_before, m = m, torch.maximum(m, x.amax(1))
        s = (m_before - m).exp() * s + (x - m[:, None]).exp().sum(1)
    return logits.gather(1, targets[:, None])[:, 0] - m - s.log()


if __name__ == "__main__":
    checks.run("Lesson 15: kernels", globals(), checks.CHECKS)
