"""Muon for the matrices inside the blocks, AdamW for everything else: an update of the same size under one rate.

Embedding and head are tables of rows rather than maps; they and the norms stay with AdamW (Loshchilov & Hutter 2019),
here without weight decay.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nanorl.errors import RunError
from nanorl.model import GPT

MAX_GRAD_NORM = 1.0


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, so that every direction of a matrix learns equally fast (Jordan et al. 2024), scaled
    so that its root mean square is that of AdamW's (Liu et al. 2025, "Muon is scalable", eq. 4).

    `torch.optim.Muon` computes in bfloat16 whatever the weights are; here the weights' own precision is kept, so that
    the order in which micro-batches are summed stays a matter of the last digits.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                direction = orthogonalize(
                    weight.grad.lerp(state["momentum"], group["momentum"])
                )  # Nesterov's step ahead
                weight.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """(M, N) with the same singular vectors and singular values near 1, by Newton-Schulz iterations: each is a
    polynomial of odd degree whose coefficients (Jordan's) lift small values fast and leave them between 0.7 and 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the smaller product
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Optimizers:
    """Both optimizers as one. `muon=False` leaves the matrices to AdamW too.

    Weights in bfloat16 have three digits: most updates would vanish in rounding. They then follow float32 masters,
    which collect the gradients of all micro-batches and take the step; the weights are the masters rounded.
    """

    SKIPS = 5  # updates that are not finite, in a row, end the run

    def __init__(self, model: GPT, learning_rate: float, *, muon: bool = True):
        matrices = [p for p in model.blocks.parameters() if muon and p.dim() == 2]
        inside = set(map(id, matrices))
        self.weights = matrices + [p for p in model.parameters() if id(p) not in inside]
        self.masters = [master(weight) for weight in self.weights]
        self.learning_rate = learning_rate
        rest = self.masters[len(matrices) :]
        self.parts = [torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)]
        if matrices:
            self.parts.append(Muon(self.masters[: len(matrices)], lr=learning_rate))
        self.skipped = 0  # updates left out since they were not finite
        self.skipped_in_a_row = 0

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def update(self, loss: Tensor, rate: float = 1.0) -> Tensor:
        """One step at `rate` times the learning rate, the gradients scaled down to a common norm of at most
        MAX_GRAD_NORM. Returns the norm they had.

        NaN and infinity, in the loss or a gradient, never reach weights or moments: the update is skipped and counted,
        and SKIPS of them in a row raise RunError. Without any gradient (a batch in which nothing is better than
        expected) nothing moves either; momentum alone would carry the weights on at full speed.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        if not (loss.isfinite() and norm.isfinite()):
            self.skip(loss, norm)
        else:
            self.skipped_in_a_row = 0
            if norm > 0:
                self.step(rate)
        return norm

    def skip(self, loss: Tensor, norm: Tensor) -> None:
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.SKIPS:
            raise RunError(
                f"{self.SKIPS} updates in a row had a loss or gradient that is not finite (loss {float(loss)}, "
                f"gradient norm {float(norm)}); the weights are those before them. Lower --learning-rate, or look at "
                "the rewards and the loss"
            )

    @torch.no_grad()
    def step(self, rate: float = 1.0) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * self.learning_rate
            part.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight is not master:
                weight.copy_(master)

    def state_dict(self) -> dict:
        masters = [m.detach() for weight, m in zip(self.weights, self.masters, strict=True) if weight is not m]
        counts = {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return {"parts": [part.state_dict() for part in self.parts], "masters": masters, **counts}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        if state["masters"]:
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]


def master(weight: nn.Parameter) -> nn.Parameter:
    """The weight itself, or for bfloat16 a float32 copy that receives its gradients as soon as they are complete."""
    if weight.dtype != torch.bfloat16:
        return weight
    copy = nn.Parameter(weight.detach().float())

    def hand_over(weight: nn.Parameter) -> None:
        if copy.grad is None:
            copy.grad = weight.grad.float()
        else:
            copy.grad += weight.grad
        weight.grad = None

    if hasattr(weight, "handing_over"):  # to the masters of optimizers before these, a warm start's say
        weight.handing_over.remove()
    weight.handing_over = weight.register_post_accumulate_grad_hook(hand_over)
    return copy


def schedule(step: int, steps: int, *, decay: float, warmup: int = 0) -> float:
    """Share of the learning rate at `step`, counted from 0: linearly up over `warmup` steps, then 1, then linearly down
    to (almost) 0 over the last `decay` (a share) of the steps."""
    return min(1.0, (step + 1) / max(1, warmup), (steps - step) / max(1.0, decay * steps))
