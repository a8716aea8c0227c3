"""Prompts in, a Rollout out: batched sampling with a KV cache.

Prompts of any lengths stand in one batch without left padding. A prompt is read once for all its samples. A row that
has finished leaves the batch. Each sampled token costs one uniform number that depends only on (seed, sample,
position), so the same sample comes out alone, in a batch, and in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanorl.errors import RunError
from nanorl.model import GPT, KVCache
from nanorl.rollout import Rollout, pad
from nanorl.tokenizer import Tokenizer

# Rows that have finished are dropped once they are this share of the batch: copying the cache costs about as much as
# a decoding step, so it is not done for a single row.
DROP_SHARE = 1 / 8


class Sampler:
    """Samples from `model`; `cached=False` reads the whole sequence again for every token (slow, for comparison)."""

    def __init__(self, model: GPT, tokenizer: Tokenizer | None = None, *, cached: bool = True):
        self.model, self.tokenizer, self.cached = model, tokenizer, cached

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        stop_strings: Sequence[str] = (),
        samples_per_prompt: int = 1,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        greedy: bool = False,
        seed: int = 0,
        sample_ids: Sequence[int] | None = None,
    ) -> Rollout:
        """`samples_per_prompt` responses for each prompt, those of one prompt next to each other.

        A response ends with its first stop token or with the token that completes a stop string (finish "stop"; both
        stay in the ids and in the mask), or when it reaches `max_new_tokens` or the model's context (finish "length").
        A prompt that fills the context gets an empty response; a longer one is an error.

        Log-probs are those of the distribution that was sampled: tempered, and renormalised over the kept tokens
        under top-k / top-p. A greedy token's log-prob is that of temperature 1. `sample_ids` (B,) name the samples
        for the random numbers (default: 0, 1, 2, ...).
        """
        prompts = [list(prompt) for prompt in prompts]
        self.check(
            prompts, max_new_tokens, stop_ids, stop_strings, samples_per_prompt, temperature, top_k, top_p, greedy
        )
        device, context = self.model.head.device, self.model.config.max_context
        B = len(prompts) * samples_per_prompt
        sample_ids = range(B) if sample_ids is None else sample_ids
        if len(sample_ids) != B:
            raise ValueError(f"expected {B} sample_ids, one a response, got {len(sample_ids)}")

        limits = torch.tensor([min(max_new_tokens, context - len(p)) for p in prompts], device=device)
        limits = limits.repeat_interleave(samples_per_prompt)  # (B,)
        T = int(limits.max())
        uniforms = torch.from_numpy(uniform(seed, sample_ids, T)).to(device)  # (B, T)
        tokens = torch.zeros(B, T, dtype=torch.long, device=device)
        logprobs = torch.zeros(B, T, dtype=torch.promote_types(self.model.head.dtype, torch.float32), device=device)
        lengths = torch.zeros(B, dtype=torch.long, device=device)
        stopped = torch.zeros(B, dtype=torch.bool, device=device)
        stops = torch.tensor(list(stop_ids), dtype=torch.long, device=device)
        texts = StopStrings(self.tokenizer, stop_strings, B) if stop_strings else None

        head = self.model.head.to(logprobs.dtype)  # logits in bfloat16 would be off by a tenth of a nat
        rows = torch.arange(B, device=device)  # the response that each row of the decoder writes
        open_ = limits > 0  # (rows,) still writing
        decoder = (CachedDecoder if self.cached else UncachedDecoder)(self.model, prompts, samples_per_prompt, T)
        with torch.inference_mode():
            for t in range(T):
                hidden = decoder.hidden()  # (rows, D)
                logits = hidden.to(head.dtype) @ head.T  # (rows, V)
                chosen, logprob = choose(logits, uniforms[:, t][rows], temperature, top_k, top_p, greedy)
                stop = torch.isin(chosen, stops) & open_
                if texts is not None:
                    stop |= texts.completed(rows, chosen, open_)
                tokens[:, t].index_copy_(0, rows, chosen * open_)
                logprobs[:, t].index_copy_(0, rows, logprob.where(open_, 0.0))
                lengths.index_add_(0, rows, open_.long())
                stopped.index_copy_(0, rows, stopped[rows] | stop)
                open_ = open_ & ~stop & (limits[rows] > t + 1)
                still = int(open_.sum())
                if not still:
                    break
                decoder.append(chosen, open_)
                if len(rows) - still >= DROP_SHARE * len(rows):
                    keep = open_.nonzero().squeeze(1)
                    decoder.keep(keep)
                    rows, open_ = rows[keep], open_[keep]

        T = int(lengths.max())
        return Rollout(
            prompts=[prompt for prompt in prompts for _ in range(samples_per_prompt)],
            tokens=tokens[:, :T],
            mask=torch.arange(T, device=device) < lengths[:, None],
            lengths=lengths,
            finish=["stop" if s else "length" for s in stopped.tolist()],
            groups=torch.arange(len(prompts), device=device).repeat_interleave(samples_per_prompt),
            behavior_logprobs=logprobs[:, :T],
            temperature=1.0 if greedy else temperature,
            truncated=top_k is not None or (top_p or 1) < 1,
        )

    def check(
        self, prompts, max_new_tokens, stop_ids, stop_strings, samples_per_prompt, temperature, top_k, top_p, greedy
    ):
        config = self.model.config
        if not prompts:
            raise ValueError("no prompts to sample from")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i} is empty: the first token needs one before it (add <bos>)")
            if len(prompt) > config.max_context:
                raise ValueError(f"prompt {i} has {len(prompt)} tokens, the model's context holds {config.max_context}")
        ids = [i for prompt in prompts for i in prompt] + list(stop_ids)
        if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise ValueError(f"token ids must lie in [0, {config.vocab_size}), got {min(ids)} to {max(ids)}")
        for name, value in (("max_new_tokens", max_new_tokens), ("samples_per_prompt", samples_per_prompt)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}; for the most likely token: greedy=True")
        if greedy and (top_k is not None or top_p is not None or temperature != 1.0):
            raise ValueError("greedy takes the most likely token: temperature, top_k and top_p have no place beside it")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {top_p}")
        if stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: Sampler(model, tokenizer)")
        if isinstance(stop_strings, str):
            raise ValueError(f"stop_strings is a list of strings, not one: [{stop_strings!r}]")
        if not all(stop_strings):
            raise ValueError("an empty stop string would stop every response at once")


def choose(
    logits: Tensor, uniforms: Tensor, temperature: float, top_k: int | None, top_p: float | None, greedy: bool
) -> tuple[Tensor, Tensor]:
    """logits (B, V), uniforms (B,) in [0, 1) -> tokens (B,) and their log-probs (B,).

    Inverse CDF: the first token whose cumulative probability exceeds the uniform number.
    """
    logprobs = torch.log_softmax(logits if greedy else logits / temperature, dim=-1)
    if not logprobs.amax(-1).isfinite().all():
        raise RunError(
            f"the logits, divided by the temperature {temperature}, are not finite: the weights have diverged (lower "
            "the learning rate), or the temperature is too small"
        )
    if greedy:
        chosen = logprobs.argmax(-1)
    else:
        if top_k is not None or top_p is not None:
            logprobs = torch.log_softmax(truncate(logprobs, top_k, top_p), dim=-1)
        cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
        chosen = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True).squeeze(1)
    return chosen, logprobs.gather(1, chosen[:, None]).squeeze(1)


def truncate(logprobs: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """-inf for all but the `top_k` likeliest tokens and the fewest whose probabilities reach `top_p` together
    (Holtzman et al. 2020). With both, top-k goes first. Of equally likely tokens the first are kept."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = -torch.inf
    if top_p is not None:
        probs = ordered.double().softmax(-1)  # sums over a large vocabulary lose too much in float32
        ordered[probs.cumsum(-1) - probs >= top_p] = -torch.inf  # reached before this token
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def uniform(seed: int, samples: Sequence[int], length: int) -> np.ndarray:
    """(B, length) numbers in [0, 1), each a function of (seed, sample, position) alone (splitmix64's mixer)."""

    def mix(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the step of the splitmix64 stream
    key = mix(np.array([seed], dtype=np.int64).view(np.uint64) + golden)
    key = mix(key ^ np.array(samples, dtype=np.int64).view(np.uint64)) + golden  # (B,)
    bits = mix(key[:, None] + golden * np.arange(length, dtype=np.uint64))
    # 40 bits reach tokens of probability 1e-12, and stay far enough below 1 for rounding never to pass the last token.
    return (bits >> np.uint64(24)).astype(np.float64) * 2.0**-40


class StopStrings:
    """Which responses have written a stop string, wherever the tokens cut it."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], rows: int):
        self.tokenizer = tokenizer
        self.strings = [s.encode() for s in strings]
        self.written = [b""] * rows  # only the tail in which a stop string may have begun

    def completed(self, rows: Tensor, chosen: Tensor, open_: Tensor) -> Tensor:
        found = torch.zeros_like(open_)
        keep = max(map(len, self.strings)) - 1
        for i in open_.nonzero().squeeze(1).tolist():
            row = int(rows[i])
            text = self.written[row] + self.tokenizer.token_bytes(chosen[i])
            found[i] = any(s in text for s in self.strings)
            self.written[row] = text[-keep:] if keep else b""
        return found


class UncachedDecoder:
    """Reads every sequence from its first token for each new one."""

    def __init__(self, model: GPT, prompts: list[list[int]], samples: int, new_tokens: int):
        self.model = model
        self.sequences = [list(prompt) for prompt in prompts for _ in range(samples)]

    def hidden(self) -> Tensor:
        """(rows, D): the state from which each row's next token is predicted."""
        tokens, lengths = pad(self.sequences, self.model.head.device)
        hidden = self.model(tokens)  # (rows, L, D)
        return hidden[torch.arange(len(lengths), device=lengths.device), lengths - 1]

    def append(self, tokens: Tensor, open_: Tensor) -> None:
        """Each row's new token (rows,); rows that are not open do not grow."""
        for sequence, token, grows in zip(self.sequences, tokens.tolist(), open_.tolist(), strict=True):
            sequence.extend([token] * grows)

    def keep(self, rows: Tensor) -> None:
        self.sequences = [self.sequences[row] for row in rows.tolist()]


class CachedDecoder:
    """Reads each prompt once for all its samples, then one new token a row and step."""

    def __init__(self, model: GPT, prompts: list[list[int]], samples: int, new_tokens: int):
        self.model = model
        self.tokens, self.grow = pad(prompts, model.head.device)  # what is to be read next: (rows, L), (rows,)
        self.samples = samples
        capacity = min(self.tokens.shape[1] + new_tokens, model.config.max_context)
        self.cache = KVCache(model.config, len(prompts), capacity, like=model.head)

    def hidden(self) -> Tensor:
        """(rows, D): the state from which each row's next token is predicted."""
        hidden = self.model(self.tokens, self.cache, self.grow)  # (rows, L, D)
        last = (self.grow - 1).clamp(min=0)
        hidden = hidden[torch.arange(len(last), device=last.device), last]
        if self.samples > 1:
            group = torch.arange(len(last), device=last.device).repeat_interleave(self.samples)
            self.cache.select(group)
            self.samples, hidden = 1, hidden[group]
        return hidden

    def append(self, tokens: Tensor, open_: Tensor) -> None:
        """Each row's new token (rows,); rows that are not open do not grow."""
        self.tokens, self.grow = tokens[:, None], open_.long()
        # Nobody looks at the other rows again. Their next slot is the first: a full cache has no other for them.
        self.cache.lengths = self.cache.lengths * self.grow

    def keep(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.tokens, self.grow = self.tokens[rows], self.grow[rows]
