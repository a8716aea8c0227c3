"""Exercises of lesson 01: log-probs, sampling and the cache, and two silent bugs. Fill the blanks, then run this file:
it checks itself.

    python lessons/01_gpt_and_sampler/exercise.py

B rows, T tokens of a response, V tokens in the vocabulary.
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor

# ---- Part 1: six blanks


def response_logprobs(logits: Tensor, prompt: Tensor, response: Tensor) -> Tensor:
    """The log-prob of each response token. The model has read prompt and response in one go.

    logits (P + T, V): row i is what it predicts after reading token i; prompt (P,), response (T,) -> (T,)
    """
    raise NotImplementedError


def response_mask(tokens: Tensor, stop_ids: list[int]) -> Tensor:
    """True up to and including each row's first stop token. What follows is padding, perhaps with a stop token itself.

    tokens (B, T) -> (B, T) bool
    """
    raise NotImplementedError


def tempered_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs of the distribution that is sampled at this temperature.

    logits (B, V) -> (B, V)
    """
    raise NotImplementedError


def top_p_probs(probs: Tensor, top_p: float) -> Tensor:
    """What is sampled under top-p: only the likeliest tokens, as few as reach `top_p` together, made to sum to 1 again.
    All others get 0.

    probs (B, V), in no particular order -> (B, V)
    """
    raise NotImplementedError


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number. Never a token of probability 0.

    probs (B, V), uniforms (B,) in [0, 1) -> (B,) integers
    """
    raise NotImplementedError


def cached_step(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """One decoding step of one attention head. Write each row's new key and value into its cache, in place, behind the
    `lengths[b]` entries it holds, and return what its query sees: the softmax mean, over the old entries and the new
    one, of the values, with scores query . key / sqrt(C). Slots behind a row's own entries hold garbage.

    query, key, value (B, C); keys, values (B, capacity, C); lengths (B,), each below the capacity -> (B, C)
    """
    raise NotImplementedError


# ---- Part 2: two silent bugs. Each function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def rotate_new_tokens(x: Tensor, lengths: Tensor) -> Tensor:
    """One decoding step: turn each row's new query (or key) by the angle of its position. Row b's cache holds
    lengths[b] tokens, so its new token stands at position lengths[b], counted from 0. x (B, C), lengths (B,) -> (B, C)

    The symptom: a prompt alone is continued as it should be, and so are prompts of one length. Put a short prompt
    beside a long one: the long one's response is as before, the short one's first token too; then it goes astray.
    """
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, dtype=x.dtype) / half)  # (C/2,)
    angles = lengths.max() * frequencies  # (C/2,)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def generate(next_tokens, rows: int, stop_id: int, max_new_tokens: int):
    """Responses of all rows, step by step; `next_tokens(t)` (B,) are the tokens that the model chose at step t.
    Returns tokens (B, T), 0 behind a row's end, and the mask (B, T): True up to and including the stop token.

    The symptom: with one row all is well. With many rows the batch hardly ever ends before `max_new_tokens`, and some
    responses that had ended have more text behind their stop token, inside the mask.
    """
    tokens, mask = [], []
    open_ = torch.ones(rows, dtype=torch.bool)  # (B,) no stop token yet
    for t in range(max_new_tokens):
        chosen = next_tokens(t)
        tokens.append(chosen * open_)
        mask.append(open_)
        open_ = chosen != stop_id
        if not open_.any():
            break
    return torch.stack(tokens, dim=1), torch.stack(mask, dim=1)


if __name__ == "__main__":
    checks.run("Lesson 01: a GPT, its log-probs and its sampler", globals(), checks.CHECKS)
