"""Log-probs of given responses: the one place where predictions are shifted by one against tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import linear_logprob
from nanorl.model import GPT
from nanorl.rollout import Rollout

IGNORE = -100


def score(model: GPT, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Log-probs (B, T) of the rollout's tokens and entropies (B, T), at the temperature that sampled them.

    Both are 0 outside the mask and carry a gradient. Only response positions reach the head. Raises ValueError for a
    rollout sampled with top-k or top-p: its tokens came from another distribution than the one scored here.
    """
    if rollout.truncated:
        raise ValueError(
            "this rollout was sampled with top-k or top-p; its probabilities are not those of the full "
            "distribution, so it cannot be trained on: sample without them"
        )
    B, T = rollout.tokens.shape
    device = rollout.tokens.device
    responses = [row[:n] for row, n in zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)]
    sequences = [prompt + response for prompt, response in zip(rollout.prompts, responses, strict=True)]
    longest = max(map(len, sequences), default=0)
    hidden = model(torch.tensor([row + [0] * (longest - len(row)) for row in sequences], device=device))  # (B, L, D)
    # Response token t stands at index P + t; the hidden state one before it predicts it.
    starts = torch.tensor([len(prompt) for prompt in rollout.prompts], device=device)  # (B,)
    predictors = (starts[:, None] - 1 + torch.arange(T, device=device)).clamp(max=longest - 1)  # (B, T)
    hidden = hidden[torch.arange(B, device=device)[:, None], predictors]  # (B, T, D)
    targets = rollout.tokens.masked_fill(~rollout.mask, IGNORE)
    logprobs, entropy = linear_logprob(
        hidden.flatten(0, 1), model.head, targets.flatten(), temperature=rollout.temperature, ignore_index=IGNORE
    )
    return logprobs.view(B, T), entropy.view(B, T)
