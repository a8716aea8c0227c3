"""REINFORCE (Williams 1992) in about 30 lines: a table that learns to count.

    python lessons/00_rl_loop/reinforce.py

The prompt is a digit, the response four more. The reward comes at the end: the share of digits that are one more than
the digit before them (after 9 comes 0). The policy is a table of 10 x 10 numbers: row d holds the logits of the digit
that follows d. Nobody shows it a right answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

DIGITS = 10
TOKENS = 4  # T, digits of a response
ROWS = 64  # B, responses an update
UPDATES = 200
LEARNING_RATE = 10.0  # a row of the table sees a tenth of the responses, and each probability is small


def sample(table: Tensor, prompts: Tensor, generator: torch.Generator) -> Tensor:
    """prompts (B,) -> responses (B, T), one digit at a time."""
    tokens, last = [], prompts
    for _ in range(TOKENS):
        last = torch.multinomial(table[last].softmax(-1), 1, generator=generator).squeeze(1)  # (B,)
        tokens.append(last)
    return torch.stack(tokens, dim=1)


def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
    """(B,), (B, T) -> (B,): one number for the whole response."""
    before = torch.cat([prompts[:, None], tokens[:, :-1]], dim=1)  # (B, T)
    return (tokens == (before + 1) % DIGITS).double().mean(1)


def reinforce(
    seed: int, *, baseline: bool, added: float = 0.0, updates: int = UPDATES
) -> tuple[Tensor, list[dict[str, float]]]:
    """The trained table (10, 10) and, of each update, reward, loss and gradient norm. `added`: to every reward."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(DIGITS, DIGITS, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.SGD([table], lr=LEARNING_RATE)
    history = []
    for _ in range(updates):
        prompts = torch.randint(DIGITS, (ROWS,), generator=generator)  # (B,)
        with torch.no_grad():
            tokens = sample(table, prompts, generator)  # (B, T)
        rewards = reward(prompts, tokens) + added  # (B,)
        advantages = rewards - rewards.mean() if baseline else rewards  # (B,)
        states = torch.cat([prompts[:, None], tokens[:, :-1]], dim=1)  # (B, T): all that this policy looks at
        logprobs = table.log_softmax(-1)[states, tokens]  # (B, T)
        loss = -(advantages[:, None] * logprobs).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = {"reward": rewards.mean() - added, "loss": loss, "grad_norm": table.grad.norm()}
        history.append({name: value.item() for name, value in step.items()})
    return table.detach(), history


if __name__ == "__main__":
    table, history = reinforce(seed=0, baseline=True)
    for update in [*range(0, UPDATES, 20), UPDATES - 1]:
        print(f"update {update:3d}  " + "  ".join(f"{name} {value:6.3f}" for name, value in history[update].items()))
    prompts = torch.arange(DIGITS)
    for prompt, response in zip(prompts, sample(table, prompts, torch.Generator().manual_seed(0)), strict=True):
        print(prompt.item(), "->", *response.tolist())
