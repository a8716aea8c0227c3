"""DPO where its promise can be checked: a world of 27 responses whose best policy is known.

    python lessons/05_dpo/dpo_world.py

A few seconds on one core. Every pair is asked about as often as the reference writes it and answered as decidedly as
Bradley-Terry says, so nothing here is noise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanorl.exact import World, total_variation

WORLD = World()  # three tokens, three steps
REFERENCE = WORLD.random_logits(1)
REWARDS = 3 * torch.rand(27, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
WINS = (REWARDS[:, None] - REWARDS).sigmoid()  # (27, 27): how often people like i better than j
BETAS = (0.3, 1.0, 3.0)
UPDATES = 600
STEP = 5.0  # learning rate times beta squared, as which the loss is curved; at 10 the steps overshoot


def log_ratios(logits: Tensor) -> Tensor:
    """(27,): log pi(y) / pi_ref(y)."""
    return (WORLD.logprobs(logits) - WORLD.logprobs(REFERENCE)).sum(1)


def asked() -> Tensor:
    """(27, 27): how often a pair is asked about, and i liked better; sums to 1."""
    ref = WORLD.probs(REFERENCE)
    return 2 * ref[:, None] * ref * WINS


def loss(logits: Tensor, beta: float) -> Tensor:
    ratios = log_ratios(logits)
    h = ratios[:, None] - ratios  # (27, 27)
    return -(asked() * logsigmoid(beta * h)).sum()


def train(beta: float, updates: int = UPDATES) -> tuple[Tensor, list[float]]:
    """The policy's logits, and its distance to the best policy before each update and behind the last."""
    optimum = WORLD.optimum(REFERENCE, REWARDS, beta)
    logits, distances = REFERENCE.clone().requires_grad_(), []
    for _ in range(updates):
        distances.append(total_variation(WORLD.probs(logits).detach(), optimum))
        (gradient,) = torch.autograd.grad(loss(logits, beta), logits)
        logits = (logits - STEP / beta**2 * gradient).detach().requires_grad_()
    return logits.detach(), [*distances, total_variation(WORLD.probs(logits).detach(), optimum)]


def found(logits: Tensor, beta: float) -> dict[str, float]:
    """What a policy has come to."""
    ratios, pairs = log_ratios(logits), asked()
    return {
        "reward": WORLD.expected_reward(logits, REWARDS).item(),
        "KL": WORLD.kl(logits, REFERENCE).item(),
        "chosen": (pairs * ratios[:, None]).sum().item(),
        "rejected": (pairs * ratios).sum().item(),
        "KL(ref, pi)": WORLD.kl(REFERENCE, logits).item(),
        "off by": total_variation(WORLD.probs(logits), WORLD.optimum(REFERENCE, REWARDS, beta)),
    }


if __name__ == "__main__":
    for beta in BETAS:
        logits, _ = train(beta)
        print(f"beta {beta}: " + ", ".join(f"{name} {value:.3f}" for name, value in found(logits, beta).items()))
