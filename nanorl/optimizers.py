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
    """Both optimizers as one: step, learning rate, state. `muon=False` leaves the matrices to AdamW too.

    Weights in bfloat16 have three digits: most updates would vanish in rounding. They then follow float32 masters,
    which collect the gradients of all micro-batches and take the step; the weights are the masters rounded.
    """

    def __init__(self, model: GPT, learning_rate: float, *, muon: bool = True):
        matrices = [p for p in model.blocks.parameters() if muon and p.dim() == 2]
        inside = set(map(id, matrices))
        rest = [p for p in model.parameters() if id(p) not in inside]
        self.weights = matrices + rest
        self.masters = [master(weight) for weight in self.weights]
        self.learning_rate = learning_rate
        split = len(matrices)
        adamw = torch.optim.AdamW(self.masters[split:], lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.parts = [adamw]
        if matrices:
            muon_options = {"lr": learning_rate, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
            self.parts.append(torch.optim.Muon(self.masters[:split], **muon_options))

    def clip_gradients(self) -> torch.Tensor:
        """Scales the gradients down to a common norm of at most MAX_GRAD_NORM; returns the norm they had."""
        return torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)

    @torch.no_grad()
    def step(self, rate: float = 1.0) -> None:
        """One update with `rate` times the learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * self.learning_rate
            part.step()
        self.round_masters()

    def round_masters(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight is not master:
                weight.copy_(master)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        masters = [m for weight, m in zip(self.weights, self.masters, strict=True) if weight is not m]
        return {"parts": [part.state_dict() for part in self.parts], "masters": [m.detach() for m in masters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        if state["masters"]:
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)


def master(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """The weight itself, or for bfloat16 a float32 copy that receives its gradients as soon as they are complete."""
    if weight.dtype != torch.bfloat16:
        return weight
    copy = torch.nn.Parameter(weight.detach().float())

    def hand_over(weight: torch.nn.Parameter) -> None:
        gradient = weight.grad.float()
        copy.grad = gradient if copy.grad is None else copy.grad + gradient
        weight.grad = None

    if hasattr(weight, "handing_over"):  # to the masters of optimizers before these, a warm start's say
        weight.handing_over.remove()
    weight.handing_over = weight.register_post_accumulate_grad_hook(hand_over)
    return copy


def decayed(step: int, steps: int, share: float) -> float:
    """Schedule: 1, then linearly down to (almost) 0 over the last `share` of the steps; step counts from 0."""
    return min(1.0, (steps - step) / max(1.0, share * steps))
