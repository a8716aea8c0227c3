"""Solutions of lesson 02. They pass the checks of exercise.py:

python lessons/02_supervised_fine_tuning/solution.py
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor


def cross_entropy(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """logits (B, T, V), tokens, mask (B, T) -> scalar"""
    chosen = mask.bool()
    # Picking the rows first keeps NaN out of the backward pass, too.
    logprobs = logits[chosen].log_softmax(-1).gather(1, tokens[chosen][:, None])
    return -logprobs.mean()


def make_batch(prompts: list[list[int]], responses: list[list[int]], eos_id: int) -> tuple[Tensor, Tensor]:
    """B lists each -> ids (B, L), trained (B, L)"""
    rows = [[*prompt, *response, eos_id] for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [eos_id] * (longest - len(row)) for row in rows])
    place = torch.arange(longest)
    start = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    end = torch.tensor([len(row) for row in rows])[:, None]
    return ids, (start <= place) & (place < end)


def micro_batch_losses(values: Tensor, mask: Tensor, size: int) -> list[Tensor]:
    """values, mask (B, T) -> scalars"""
    chosen = torch.where(mask.bool(), values, 0.0)
    return [part.sum() / mask.sum() for part in chosen.split(size)]


def mixture_loss(share: float, logit: Tensor) -> Tensor:
    """-log sigmoid(z) = softplus(-z) and -log(1 - sigmoid(z)) = softplus(z)."""
    return share * torch.nn.functional.softplus(-logit) + (1 - share) * torch.nn.functional.softplus(logit)


def muon_direction(momentum: Tensor) -> Tensor:
    """(rows, columns) -> (rows, columns)"""
    left, _, right = torch.linalg.svd(momentum, full_matrices=False)
    return 0.2 * max(momentum.shape) ** 0.5 * left @ right


def loss_that_falls_too_well(logits: Tensor, ids: Tensor, trained: Tensor) -> Tensor:
    """The bug: no shift. The model was asked for the token it had just read."""
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (B, L - 1)
    trained = trained[:, 1:]
    return -(logprobs * trained).sum() / trained.sum()


def loss_that_starts_too_late(logits: Tensor, ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> Tensor:
    """The bug: the tokens were shifted and the mask was not. Column i now holds token i + 1."""
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (B, L - 1)
    place = torch.arange(logprobs.shape[1]) + 1
    trained = (place >= prompt_lengths[:, None]) & (place < lengths[:, None])
    return -(logprobs * trained).sum() / trained.sum()


if __name__ == "__main__":
    checks.run("Lesson 02: supervised fine-tuning", globals(), checks.CHECKS)
