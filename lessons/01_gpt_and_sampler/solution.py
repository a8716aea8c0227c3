"""Solutions of lesson 01. They pass the checks of exercise.py:

python lessons/01_gpt_and_sampler/solution.py
"""

from __future__ import annotations

import math

import checks
import torch
from torch import Tensor


def response_logprobs(logits: Tensor, prompt: Tensor, response: Tensor) -> Tensor:
    """logits (P + T, V), prompt (P,), response (T,) -> (T,)"""
    predictions = logits[len(prompt) - 1 : -1]  # (T, V): behind the prompt's last token, ..., the last but one
    return predictions.log_softmax(-1).gather(1, response[:, None]).squeeze(1)


def response_mask(tokens: Tensor, stop_ids: list[int]) -> Tensor:
    """tokens (B, T) -> (B, T) bool: no stop token stands before this one."""
    stops = torch.isin(tokens, torch.tensor(stop_ids)).long()
    return stops.cumsum(1) - stops == 0


def tempered_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """(B, V) -> (B, V)"""
    return (logits / temperature).log_softmax(-1)


def top_p_probs(probs: Tensor, top_p: float) -> Tensor:
    """(B, V) -> (B, V): a token is out when those likelier than it reach top_p already."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = torch.where(before < top_p, ordered, 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.empty_like(probs).scatter(-1, order, ordered)


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """(B, V), (B,) -> (B,)"""
    cdf = probs.cumsum(-1)
    target = uniforms[:, None] * cdf[:, -1:]  # the sum may be rounded to a little less than 1
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def cached_step(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """query, key, value (B, C); keys, values (B, capacity, C); lengths (B,) -> (B, C)"""
    rows = torch.arange(len(query))
    keys[rows, lengths] = key
    values[rows, lengths] = value
    scores = (keys @ query[:, :, None]).squeeze(-1) / math.sqrt(query.shape[-1])  # (B, capacity)
    visible = torch.arange(keys.shape[1]) <= lengths[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights[:, None] @ values).squeeze(1)


def rotate_new_tokens(x: Tensor, lengths: Tensor) -> Tensor:
    """The bug: all rows were turned by the longest row's position. Each has a position of its own."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, dtype=x.dtype) / half)  # (C/2,)
    angles = lengths[:, None] * frequencies  # (B, C/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def generate(next_tokens, rows: int, stop_id: int, max_new_tokens: int):
    """The bug: a row was open whenever its newest token was no stop token. Once closed, it must stay closed."""
    tokens, mask = [], []
    open_ = torch.ones(rows, dtype=torch.bool)  # (B,) no stop token yet
    for t in range(max_new_tokens):
        chosen = next_tokens(t)
        tokens.append(chosen * open_)
        mask.append(open_)
        open_ = open_ & (chosen != stop_id)
        if not open_.any():
            break
    return torch.stack(tokens, dim=1), torch.stack(mask, dim=1)


if __name__ == "__main__":
    checks.run("Lesson 01: a GPT, its log-probs and its sampler", globals(), checks.CHECKS)
