"""Bradley-Terry: a reward model from preferences (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1; arXiv:2203.02155).

    p(chosen preferred) = sigmoid(s_chosen - s_rejected),    loss = -1/N sum log sigmoid(s_chosen - s_rejected - margin)

Only differences of scores count: a constant added to all of them changes nothing. A `margin` says by how much a pair's
scores should differ at least, for data that says how much better the chosen one is (Llama 2, Touvron et al. 2023,
eq. 2; arXiv:2307.09288).

Where implementations differ: TRL can add coefficient x mean (s_chosen + s_rejected)^2 to keep the scores near 0; here
nothing holds them, and the scores are centered afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nanorl.losses.aggregate import pair_mean


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, denominator: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-likelihood of the preferences in one batch or micro-batch.

    chosen, rejected (B,): the scores of each pair, with a gradient; margin (B,), in the scores' unit. `denominator`:
    pairs of the whole batch when this is a part of it. Returns the scalar loss and detached means over pairs:
    `accuracy`, the share of pairs whose chosen score is the higher one, and `margin`, by how much.
    """
    check_pairs(chosen=chosen, rejected=rejected, **({} if margin is None else {"margin": margin}))
    difference = finite(chosen - rejected)  # (B,)
    per_pair = -logsigmoid(difference if margin is None else difference - margin.detach())
    return pair_mean(per_pair, denominator), pair_metrics(difference)


def check_pairs(**values: Tensor) -> None:
    """All of one shape (B,): with (B, 1) beside (B,) every chosen one would meet every rejected one, (B, B)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"expected one number a pair, {', '.join(shapes)} of one shape (B,), got {shapes}")
    dtypes = {name: tensor.dtype for name, tensor in values.items() if not tensor.is_floating_point()}
    if dtypes:
        raise ValueError(f"expected numbers in floating point, got {dtypes}")


def finite(x: Tensor) -> Tensor:
    """An infinite difference comes from a broken score; it becomes NaN (inf * 0), or its loss might be 0."""
    return x + 0 * x


@torch.no_grad()
def pair_metrics(margin: Tensor) -> dict[str, Tensor]:
    """margin (B,): by how much each chosen one scores higher. One of 0 is not accurate."""
    return {"accuracy": pair_mean((margin > 0).to(margin.dtype)), "margin": pair_mean(margin)}
