"""Checks of lesson 15, shared by exercise.py and solution.py. Values by hand, and against kernels/ in float64."""

from __future__ import annotations

import math
import os
import sys
import warnings
from pathlib import Path

# Read when triton is imported. Where a reader runs the exercise, kernels run as Python, on a CPU.
os.environ.setdefault(
    "TRITON_INTERPRET", str(int(Path(sys.argv[0]).resolve().parent == Path(__file__).parent.resolve()))
)

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Failed, Skipped, require, require_close, run

from bench.allocations import Allocations
from kernels import flash, reference
from kernels.backend import INTERPRETED, jit, tl, triton

__all__ = ["CHECKS", "jit", "run", "tl"]

INF, NAN = float("inf"), float("nan")
LN2 = math.log(2)
WORDS = [0.0, LN2, 3 * LN2, -INF]  # probabilities 1/11, 2/11, 8/11 and 0
CASE = "logits [0, ln 2, 3 ln 2, -inf]"
ENTROPY = math.log(11) - (2 * LN2 + 8 * 3 * LN2) / 11
LOGPROB = math.log(2 / 11)  # of the second word


def double(*values) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.double) for value in values]


def rows(N: int, V: int, shift: float = 0.0, dtype: torch.dtype = torch.double, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits (N, V) whose first 40 columns and last 3 are -inf where there are that many, and targets (N,)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(N, V, generator=generator, dtype=torch.double) + shift
    targets = torch.randint(0, V, (N,), generator=generator)
    if V > 100:
        logits[:, :40] = logits[:, -3:] = -INF
        targets = targets.clamp(40, V - 4)
    return logits.to(dtype), targets


def three(got, case: str) -> tuple:
    require(isinstance(got, tuple) and len(got) == 3, f"{case}: expected m, s, a in a tuple of three")
    return got


def two(got, case: str) -> tuple:
    require(isinstance(got, tuple) and len(got) == 2, f"{case}: expected a tuple of two")
    return got


def check_add_block(add_block):
    """The maximum moves from m to m_new by d = m - m_new: e^(x-m) becomes e^d e^(x-m), and x - m becomes (x - m) + d.
    So s is multiplied by e^d, and a becomes e^d (a + s d). Then the block is added. While all is -inf, d and the shift
    are -inf minus -inf: take 0 in place of such a maximum. And let 0 * -inf be 0 in a."""
    nothing = double([-INF], [0.0], [0.0])
    first = [LN2], [1.5], [-LN2 / 2]
    second = [3 * LN2], [1.375], [(-LN2 / 2 - 1.5 * 2 * LN2) / 4]
    state = nothing
    for block, want in ((WORDS[:2], first), (WORDS[2:], second)):
        case = f"{CASE}, once the block {'[0, ln 2]' if want is first else '[3 ln 2, -inf]'} is seen: "
        state = three(add_block(*state, torch.tensor([block], dtype=torch.double)), case)
        for name, got, value in zip("msa", state, want, strict=True):
            require_close(got, value, case + name)
    empty = torch.full((1, 4), -INF, dtype=torch.double)
    case = "a block of nothing but -inf, before any other: "
    found = three(add_block(*nothing, empty), case)
    for name, got, value in zip("msa", found, nothing, strict=True):
        require(isinstance(got, Tensor) and torch.equal(got, value), f"{case}{name} is {got}, expected {value.item()}")
    for name, got, value in zip("msa", three(add_block(*state, empty), ""), state, strict=True):
        require_close(got, value, f"a block of nothing but -inf, behind others: {name}")


def check_rows_forward(rows_forward):
    """Start with m = -inf, s = a = 0; go through logits.split(block, dim=1) with add_block. Then the log-prob is
    (x_t - m) - log s and the entropy log s - a / s. The usual logsumexp - sum p x takes one big number from another:
    at logits of 10,000 in float32 three digits are left."""
    logits, targets = double([WORDS])[0], torch.tensor([1])
    got = two(rows_forward(logits, targets, 2), CASE)
    for name, one, want in zip(("log-prob", "entropy"), got, (LOGPROB, ENTROPY), strict=True):
        require_close(one, [want], f"{CASE}, blocks of 2: {name}")
    for V, block in ((1, 8), (7, 8), (16, 8), (300, 32), (301, 32)):
        logits, targets = rows(4, V)
        with Allocations() as seen:
            got = two(rows_forward(logits, targets, block), f"{V} words")
        wanted = reference.logprob_entropy_kl(logits, targets)[:2]
        for name, one, want in zip(("log-prob", "entropy"), got, wanted, strict=True):
            require_close(one, want, f"{V} words in blocks of {block}, the first 40 and last 3 of many -inf: {name}")
        require(seen.largest <= 4 * block, f"4 rows of {V} in blocks of {block}: a tensor of {seen.largest} elements")
    for shift in (1e4, -1e4):
        logits, targets = rows(4, 300, shift, torch.float32)
        wanted = reference.logprob_entropy_kl(logits.double(), targets)[:2]
        for name, one, want in zip(("log-prob", "entropy"), rows_forward(logits, targets, 32), wanted, strict=True):
            require_close(one, want, f"logits near {shift:,.0f} in float32: {name}", tolerance=1e-5)


def check_merge(merge):
    """The same step as in add_block, for all stripes at once: the maximum over them is the new m, d = m - new of each
    stripe. s is the sum of e^d s, a the sum of e^d (a + s d). Where m is -inf take d = 0."""
    m, s, a = double([[LN2], [3 * LN2]], [[1.5], [1.0]], [[-LN2 / 2], [0.0]])
    want = [3 * LN2], [1.375], [(-LN2 / 2 - 1.5 * 2 * LN2) / 4]
    for name, got, value in zip("msa", three(merge(m, s, a), CASE), want, strict=True):
        require_close(got, value, f"{CASE}, its halves merged: {name}")
    generator = torch.Generator().manual_seed(1)
    m = 5 * torch.randn(4, 3, generator=generator, dtype=torch.double)
    s = 1 + torch.rand(4, 3, generator=generator, dtype=torch.double)
    a = -torch.rand(4, 3, generator=generator, dtype=torch.double)
    m[2, :2], s[2, :2], a[2, :2] = -INF, 0.0, 0.0
    for name, got, want in zip("msa", three(merge(m, s, a), ""), flash.merge(m, s, a, 1.0), strict=True):
        require_close(got, want, f"four stripes of three rows, two of them all -inf in one stripe: {name}")


def gradient_by_autograd(logits: Tensor, targets: Tensor, *upstream: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    torch.autograd.backward(reference.logprob_entropy_kl(logits, targets)[:2], list(upstream))
    return logits.grad


def check_rows_backward(rows_backward):
    """Of the log-prob: 1 at the target, minus the probability everywhere. Of the entropy: -p (log p + H). Each times
    its upstream gradient. A word of probability 0 has gradient 0, not 0 * -inf."""
    logits, targets = double([WORDS])[0], torch.tensor([1])
    zero, one = double([0.0], [1.0])
    with torch.no_grad():
        got = rows_backward(logits.clone(), targets, one, zero)
        require_close(got, [[-1 / 11, 9 / 11, -8 / 11, 0.0]], f"{CASE}, log-prob of the second word")
        want = [-p * (math.log(p) + ENTROPY) for p in (1 / 11, 2 / 11, 8 / 11)]
        require_close(rows_backward(logits.clone(), targets, zero, one), [[*want, 0.0]], f"{CASE}, entropy")
    for V in (1, 7, 300):
        logits, targets = rows(4, V)
        upstream = torch.randn(2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.double)
        want = gradient_by_autograd(logits, targets, *upstream)
        with torch.no_grad():
            got = rows_backward(logits.clone(), targets, *upstream)
        require_close(got, want, f"{V} words, random upstream gradients for each row")


def check_linear_backward(linear_backward):
    """A loop over slices of `chunk` tokens: logits of the slice, rows_backward of them, call it g. The hidden states of
    the slice get g @ weight; the head gets g.T @ hidden of every slice, summed. Never hidden @ weight.T of all."""
    N, D, V, chunk = 10, 3, 64, 4
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, D, generator=generator, dtype=torch.double) for n in (N, V))
    targets = torch.randint(0, V, (N,), generator=generator)
    upstream = torch.randn(2, N, generator=generator, dtype=torch.double)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    torch.autograd.backward(reference.linear_logprob(*leaves, targets)[:2], list(upstream))
    case = f"{N} tokens, {V} words, chunks of {chunk}: "
    with torch.no_grad(), Allocations() as seen:
        got = two(linear_backward(hidden, weight, targets, *upstream, chunk), case)
    for name, one, leaf in zip(("hidden states", "head"), got, leaves, strict=True):
        require_close(one, leaf.grad, f"{case}gradient to the {name}")
    require(seen.largest <= chunk * V, f"{case}a tensor of {seen.largest} elements, {chunk * V} are allowed")


def check_row_kernel(row_kernel):
    """tl.program_id(0) is the row: in int64 before it is multiplied by V. `for start in range(0, V, BLOCK)`, columns =
    start + tl.arange(0, BLOCK), tl.load(..., mask=columns < V, other=-float("inf")). Then add_block, with tl.max(x, 0),
    tl.sum(x, 0), tl.where, tl.exp. Start with m = -float("inf"), s = 0.0, a = 0.0."""
    if triton is None:
        raise Skipped("triton is not installed (on Linux: pip install triton)")
    if not INTERPRETED:
        raise Skipped("triton was imported without TRITON_INTERPRET=1")
    for V in (1, 7, 128, 300):
        logits, targets = rows(3, V, dtype=torch.float32)
        memory = torch.full((3 * V + 256,), 50.0)  # what stands behind the last row must not be read
        memory[: 3 * V] = logits.flatten()
        results = torch.full((3, 2), NAN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # 0 * -inf, where tl.where then takes the other side
            try:
                row_kernel[(3,)](memory[: 3 * V].view(3, V), targets, results, V, BLOCK=32)
            except Exception as error:  # the interpreter wraps what a kernel raises
                raise error.__cause__ or error from None
        wanted = reference.logprob_entropy_kl(logits.double(), targets)[:2]
        for i, name in enumerate(("log-prob", "entropy")):
            require_close(results[:, i], wanted[i], f"3 rows of {V} words, BLOCK 32: {name}", tolerance=1e-5)


def check_logprobs_that_fall_short(logprobs_that_fall_short):
    """1,000 words in blocks of 256 leave 24 columns that are no words. What does the function put there? What
    probability has it, beside logits around 0, and around -20?"""
    try:
        for V, shift in ((1024, 0.0), (1000, 0.0), (1000, -20.0), (7, -200.0)):
            logits, targets = rows(4, V, shift)
            got = logprobs_that_fall_short(logits, targets, 256)
            want = reference.logprob_entropy_kl(logits, targets)[0]
            require_close(got, want, f"{V} words in blocks of 256, logits around {shift:g}")
    except Failed as failure:
        raise Failed(f"{failure}. The symptom is still there") from None


CHECKS = [
    check_add_block,
    check_rows_forward,
    check_merge,
    check_rows_backward,
    check_linear_backward,
    check_row_kernel,
    check_logprobs_that_fall_short,
]
