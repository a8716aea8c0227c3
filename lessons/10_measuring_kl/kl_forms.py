"""Where each form of the KL leads, in a world of 27 responses whose best policy is known.

    python lessons/10_measuring_kl/kl_forms.py

A few seconds on one core. Every expectation is a sum over all responses, so nothing here is noise; with `samples` the
same lines estimate it from responses drawn from the policy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanorl.exact import World, total_variation
from nanorl.kl import kl_estimate

WORLD = World()  # three tokens, three steps
REFERENCE = WORLD.random_logits(1)
REWARDS = torch.rand(27, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
BETA = 0.3
LEARNING_RATE = 4.0  # at 10 and twice BETA the steps overshoot: the logits swing and never settle
UPDATES = 1000
OPTIMUM = WORLD.optimum(REFERENCE, REWARDS, BETA)  # (27,)
FORMS = {  # name -> (kind in the reward, kind in the loss, the loss's KL is of each "token" or of the "response")
    "no KL": (None, None, "token"),
    "k1 in the loss": (None, "k1", "token"),
    "k3 in the reward": ("k3", None, "token"),
    "k3 a token in the loss": (None, "k3", "token"),
    "k2 a token in the loss": (None, "k2", "token"),
    "k3 of the response in the loss": (None, "k3", "response"),
    "k2 of the response in the loss": (None, "k2", "response"),
    "k1 in the reward": ("k1", None, "token"),
    "k1 in the reward, k2 of the response in the loss": ("k1", "k2", "response"),
    "k1 in the reward, k3 a token in the loss": ("k1", "k3", "token"),
}


def loss(logits: Tensor, form: str, weights: Tensor, beta: float = BETA) -> Tensor:
    """REINFORCE with a KL of that form; weights (27,) say how often each response was sampled."""
    in_reward, in_loss, level = FORMS[form]
    logprobs, ref_logprobs = WORLD.logprobs(logits), WORLD.logprobs(REFERENCE)  # (27, 3): a response, a token
    whole, ref_whole = logprobs.sum(1), ref_logprobs.sum(1)  # (27,)
    returns, penalty = REWARDS, torch.zeros_like(whole)
    if in_reward:
        returns = returns - beta * kl_estimate(whole, ref_whole, in_reward).detach()
    if in_loss and level == "response":
        penalty = beta * kl_estimate(whole, ref_whole, in_loss)
    elif in_loss:
        penalty = beta * kl_estimate(logprobs, ref_logprobs, in_loss).sum(1)
    advantages = returns - (weights * returns).sum()
    return (weights * (penalty - advantages * whole)).sum()


def gradient(logits: Tensor, form: str, *, samples: int | None = None, generator=None, beta: float = BETA) -> Tensor:
    """Of the loss: its expectation, or an estimate from that many responses."""
    logits = logits.clone().requires_grad_()
    weights = WORLD.probs(logits).detach()
    if samples:
        drawn = torch.multinomial(weights, samples, replacement=True, generator=generator)
        weights = torch.bincount(drawn, minlength=27).double() / samples
    return torch.autograd.grad(loss(logits, form, weights, beta), logits)[0]


def train(
    form: str, updates: int = UPDATES, *, samples: int | None = None, seed: int = 0
) -> tuple[Tensor, list[float]]:
    """Gradient descent from the reference on -> final logits, and the distance to the optimum before each update and
    after the last: the total variation, the largest error in the probability of any event."""
    generator = torch.Generator().manual_seed(seed)
    logits, distances = REFERENCE.clone(), []
    for _ in range(updates):
        distances.append(total_variation(WORLD.probs(logits), OPTIMUM))
        logits = logits - LEARNING_RATE * gradient(logits, form, samples=samples, generator=generator)
    return logits, [*distances, total_variation(WORLD.probs(logits), OPTIMUM)]


def summary(logits: Tensor) -> tuple[float, float, float]:
    """Reward, KL(policy || reference) of a response in nats, and the objective, reward - BETA x KL."""
    reward, kl = WORLD.expected_reward(logits, REWARDS).item(), WORLD.kl(logits, REFERENCE).item()
    return reward, kl, reward - BETA * kl


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors of a few numbers
    print(f"{'KL':<50}reward     KL  objective  distance to the optimum")
    for form in FORMS:
        logits, distances = train(form)
        reward, kl, objective = summary(logits)
        print(f"{form:<50}{reward:.3f}  {kl:.3f}  {objective:9.3f}  {distances[-1]:.3f}")
