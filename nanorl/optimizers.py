"""Muon for the matrices inside the blocks, AdamW for everything else: an update of the same size under one rate.

Muon (Jordan et al. 2024) orthogonalises the momentum of a matrix, so that every direction of it learns equally fast;
scaled as in Moonlight (Liu et al. 2025) its update has the root mean square of AdamW's. Embedding and head are tables
of rows rather than maps, and stay with AdamW (Loshchilov & Hutter 2019).
"""

from __future__ import annotations

import torch

from nanorl.model import GPT

MAX_GRAD_NORM = 1.0


class Optimizers:
    """Both optimizers as one: step, learning rate, state."""

    def __init__(self, model: GPT, learning_rate: float):
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        inside = set(map(id, matrices))
        rest = [p for p in model.parameters() if id(p) not in inside]
        self.parameters = matrices + rest
        self.learning_rate = learning_rate
        self.parts = [
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def clip_gradients(self) -> torch.Tensor:
        """Scales the gradients down to a common norm of at most MAX_GRAD_NORM; returns the norm they had."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)

    def step(self, rate: float = 1.0) -> None:
        """One update with `rate` times the learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * self.learning_rate
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def schedule(step: int, steps: int, *, decay: float, warmup: int = 0) -> float:
    """Share of the learning rate at `step`, counted from 0: linearly up over `warmup` steps, then 1, then linearly down
    to (almost) 0 over the last `decay` (a share) of the steps."""
    return min(1.0, (step + 1) / max(1, warmup), (steps - step) / max(1.0, decay * steps))
