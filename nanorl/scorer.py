"""Log-probs of given responses: the one place where predictions are shifted by one against tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import linear_logprob
from nanorl.model import GPT, KVCache
from nanorl.rollout import Rollout, pad

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
    context = model.config.max_context
    longest = max((len(p) + n for p, n in zip(rollout.prompts, rollout.lengths.tolist(), strict=True)), default=0)
    if longest > context:
        raise ValueError(f"a prompt with its response has {longest} tokens, the model's context holds {context}")
    if not B * T:
        return (rollout.tokens * model.head.sum(),) * 2  # nothing to score, yet part of the graph
    # Responses to one prompt share the reading of it.
    distinct = {tuple(prompt): None for prompt in rollout.prompts}
    number = {prompt: i for i, prompt in enumerate(distinct)}
    prompt_of = torch.tensor(
        [number[tuple(prompt)] for prompt in rollout.prompts], device=rollout.tokens.device
    )  # (B,)
    prompts, lengths = pad([list(prompt) for prompt in distinct], rollout.tokens.device)
    cache = KVCache(model.config, len(prompts), prompts.shape[1] + T - 1, like=model.head)
    hidden = model(prompts, cache, lengths)  # (distinct prompts, P, D)
    hidden = hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1][prompt_of]  # (B, D)
    cache.select(prompt_of)
    # The prompt's last token predicts the first of the response, each token of the response the one behind it.
    hidden = hidden[:, None]  # (B, 1, D)
    if T > 1:
        inside = torch.arange(T, device=hidden.device) < rollout.lengths[:, None]
        hidden = torch.cat([hidden, model(rollout.tokens.where(inside, 0)[:, :-1], cache)], dim=1)  # (B, T, D)
    targets = rollout.tokens.masked_fill(~rollout.mask, IGNORE)
    logprobs, entropy = linear_logprob(
        hidden.flatten(0, 1), model.head, targets.flatten(), temperature=rollout.temperature, ignore_index=IGNORE
    )
    return logprobs.view(B, T), entropy.view(B, T)
