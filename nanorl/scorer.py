"""From prompts and given responses to hidden states, and from those to log-probs: the one place where predictions are
shifted by one against tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import linear_logprob
from nanorl.model import GPT, KVCache
from nanorl.rollout import Rollout, pad

IGNORE = -100


def hidden_states(model: GPT, rollout: Rollout, *, read: int | None = None) -> Tensor:
    """(B, read + 1, D): state t has read the prompt and the first t tokens of the response, so state t predicts token t
    (counted from 0), and is where a critic says what is still to come.

    `read`: None for T - 1, all that is needed to predict every token; T to read the last token too. States behind a
    row's end are those of padding. Raises ValueError where prompt and response do not fit into the model's context.
    """
    T = rollout.tokens.shape[1]
    read = T - 1 if read is None else read
    context = model.config.max_context
    longest = max((len(p) + n for p, n in zip(rollout.prompts, rollout.lengths.tolist(), strict=True)), default=0)
    if longest > context:
        raise ValueError(f"a prompt with its response has {longest} tokens, the model's context holds {context}")
    # Responses to one prompt share the reading of it.
    distinct = {tuple(prompt): None for prompt in rollout.prompts}
    number = {prompt: i for i, prompt in enumerate(distinct)}
    prompt_of = torch.tensor(
        [number[tuple(prompt)] for prompt in rollout.prompts], device=rollout.tokens.device
    )  # (B,)
    prompts, lengths = pad([list(prompt) for prompt in distinct], rollout.tokens.device)
    cache = KVCache(model.config, len(prompts), prompts.shape[1] + read, like=model.head)
    hidden = model(prompts, cache, lengths)  # (distinct prompts, P, D)
    hidden = hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1][prompt_of]  # (B, D)
    cache.select(prompt_of)
    # The prompt's last token predicts the first of the response, each token of the response the one behind it.
    hidden = hidden[:, None]  # (B, 1, D)
    if read > 0:
        inside = torch.arange(T, device=hidden.device) < rollout.lengths[:, None]
        hidden = torch.cat([hidden, model(rollout.tokens.where(inside, 0)[:, :read], cache)], dim=1)
    return hidden


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
    if not B * T:
        return (rollout.tokens * model.head.sum(),) * 2  # nothing to score, yet part of the graph
    hidden = hidden_states(model, rollout)  # (B, T, D)
    targets = rollout.tokens.masked_fill(~rollout.mask, IGNORE)
    logprobs, entropy = linear_logprob(
        hidden.flatten(0, 1), model.head, targets.flatten(), temperature=rollout.temperature, ignore_index=IGNORE
    )
    return logprobs.view(B, T), entropy.view(B, T)
