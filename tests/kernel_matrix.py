"""The cases on which the row kernels are compared with float64: by pairs of conditions, or all of them.

KERNEL_MATRIX=full takes every combination instead of a set in which each pair of conditions occurs.
"""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference

FULL = os.environ.get("KERNEL_MATRIX") == "full"


class Case(NamedTuple):
    V: int
    N: int
    logits: str
    temperature: float
    softcap: float | None
    upstream: str  # whose gradient is not None


AXES = Case(
    V=(1, 2, 127, 257, 1000, 50257),
    N=(0, 1, 17, 40),
    logits=("plain", "a column of -inf", "blocks of -inf", "-200", "+1e4", "1e30", "a sure word"),
    temperature=(0.3, 0.7, 1.0, 1.3),
    softcap=(None, 3.0),
    upstream=("all", "log-prob", "entropy", "KL"),
)
VALUES = ("log-prob", "entropy", "KL")


def both(p: tuple, q: tuple) -> tuple:
    return (*p, *q) if p[0] < q[0] else (*q, *p)


def pairwise(axes) -> list:
    """Few combinations in which any two conditions of different axes meet; chosen greedily."""
    axes = [list(axis) for axis in axes]
    open_pairs = {
        both((i, a), (j, b))
        for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2)
        for a, b in itertools.product(one, other)
    }
    chosen = []
    while open_pairs:
        i, a, j, b = min(open_pairs, key=str)
        case = {i: a, j: b}
        for k, axis in enumerate(axes):
            if k not in case:
                gained = [sum(both(p, q) in open_pairs for q in case.items()) for p in ((k, value) for value in axis)]
                case[k] = axis[gained.index(max(gained))]
        chosen.append(tuple(case[k] for k in range(len(axes))))
        open_pairs -= {both(p, q) for p, q in itertools.combinations(case.items(), 2)}
    return chosen


def cases(axes=AXES) -> list:
    kind = type(axes)
    return [kind(*values) for values in (itertools.product(*axes) if FULL else pairwise(axes))]


def make(kind: str, N: int, V: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits and reference logits (N, V), targets (N,) at the first, the last and other words, upstream (3, N)."""
    generator = torch.Generator().manual_seed(seed + 7 * V)
    logits, ref_logits = 3 * torch.randn(2, N, V, generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::3], targets[1::3] = 0, V - 1
    impossible = torch.zeros(V, dtype=torch.bool)
    if kind == "a column of -inf":
        impossible[V // 2] = V > 2
    elif kind == "blocks of -inf":
        impossible[: 2 * V // 3] = True
        impossible[-V // 8 :] = V > 8
    elif kind in ("-200", "+1e4"):
        logits, ref_logits = logits + float(kind), ref_logits - float(kind) / 2
    elif kind == "1e30":
        logits, ref_logits = logits * 1e30, ref_logits * 1e30
    elif kind == "a sure word":
        logits[:, V // 2] += 200
    possible = (~impossible).nonzero().squeeze(1)
    targets = possible[torch.bucketize(targets, possible).clamp(max=len(possible) - 1)]
    logits[:, impossible] = ref_logits[:, impossible] = -torch.inf
    # As slices of something larger: no element begins where memory is aligned, and no row where the last ended.
    space, ref_space = torch.full((N, V + 5), torch.nan), torch.full((N, V + 5), torch.nan)
    space[:, 1 : V + 1], ref_space[:, 3 : V + 3] = logits, ref_logits
    more = torch.cat([targets.new_zeros(1), targets])
    upstream = torch.randn(3, 2 * N, generator=generator)[:, ::2]
    return space[:, 1 : V + 1], ref_space[:, 3 : V + 3], more[1:], upstream


def truth(logits, ref_logits, targets, upstream, case: Case) -> tuple[list[Tensor], Tensor]:
    """Log-prob, entropy, KL and the gradient to the logits, by autograd in float64."""
    x, y = logits.double().requires_grad_(), ref_logits.double()
    values = reference.logprob_entropy_kl(
        reference.capped(x, case.softcap) / case.temperature,
        targets,
        reference.capped(y, case.softcap) / case.temperature,
    )
    used = [g.double() * (case.upstream in ("all", name)) for g, name in zip(upstream, VALUES, strict=True)]
    torch.autograd.backward(list(values), used)
    return [value.detach() for value in values], x.grad


def gradients(upstream: Tensor, case: Case) -> list[Tensor | None]:
    return [g if case.upstream in ("all", name) else None for g, name in zip(upstream, VALUES, strict=True)]


def assert_agree(results: Tensor, grad: Tensor, values: list[Tensor], true_grad: Tensor) -> None:
    """Within 1e-5, of 1 or of the value; a gradient also of the KL that it contains."""
    for name, result, value in zip(VALUES, (results[0], results[1], results[4]), values, strict=True):
        torch.testing.assert_close(
            result.double(), value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    scale = values[2].abs().clamp(min=1)[:, None]
    torch.testing.assert_close(grad.double() / scale, true_grad / scale, rtol=1e-5, atol=1e-5)
