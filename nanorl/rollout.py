"""Rollout: the one record that flows through the loop, from the sampler to the loss.

Everything per token is (B, T) over the response alone, padded on the right; T is the longest response. The prompt is
kept beside it as a plain list. A whole family of published bugs (left padding, shifted masks, prompts in the loss)
cannot happen in this layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanorl.tokenizer import Tokenizer


@dataclass
class Rollout:
    """B responses of at most T tokens. What training adds (`old_logprobs` and below) starts as None."""

    prompts: list[list[int]]  # B lists of ids
    tokens: Tensor  # (B, T) int64: the ids that were sampled, never text encoded again
    mask: Tensor  # (B, T) bool: True where the policy chose the token, the stop token included
    lengths: Tensor  # (B,) int64: tokens of each response, those an environment inserted included
    finish: list[str]  # B times "stop" or "length"
    groups: Tensor  # (B,) int64: rows of one prompt share a number
    behavior_logprobs: Tensor | None = None  # (B, T) under the distribution that sampled; 0 outside the mask
    temperature: float = 1.0  # of that distribution; scoring uses the same
    truncated: bool = False  # sampled with top-k or top-p: cannot be trained on
    old_logprobs: Tensor | None = None  # (B, T) denominator of the ratio
    ref_logprobs: Tensor | None = None  # (B, T) under the frozen reference
    rewards: Tensor | None = None  # (B,)
    advantages: Tensor | None = None  # (B,) or (B, T)
    values: Tensor | None = None  # (B, T) of the critic, at the time of the rollout
    returns: Tensor | None = None  # (B, T) the critic's targets

    def __post_init__(self):
        B = len(self.prompts)
        if self.tokens.dim() != 2 or len(self.tokens) != B or self.mask.shape != self.tokens.shape:
            raise ValueError(
                f"expected tokens and mask (B, T) with B = {B} prompts, got {tuple(self.tokens.shape)} and "
                f"{tuple(self.mask.shape)}"
            )
        if self.mask.dtype != torch.bool:
            raise ValueError(f"expected a boolean mask, got {self.mask.dtype}")
        if not all(self.prompts):
            row = next(i for i, prompt in enumerate(self.prompts) if not prompt)
            raise ValueError(f"prompt {row} is empty: the first response token needs one before it (add <bos>)")

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def from_responses(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Rollout:
        """Given responses (demonstrations, preference pairs) as a record; every token of a response is trainable."""
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts but {len(responses)} responses")
        lengths = torch.tensor([len(response) for response in responses], dtype=torch.long)
        tokens = torch.zeros(len(responses), int(lengths.max()) if len(responses) else 0, dtype=torch.long)
        for row, response in enumerate(responses):
            tokens[row, : len(response)] = torch.tensor(response, dtype=torch.long)
        return cls(
            prompts=[list(prompt) for prompt in prompts],
            tokens=tokens,
            mask=torch.arange(tokens.shape[1]) < lengths[:, None],
            lengths=lengths,
            finish=["stop"] * len(responses),
            groups=torch.arange(len(responses)),
        )

    def select(self, rows: Sequence[int]) -> Rollout:
        """The given rows, trimmed to the longest of them."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.tokens.device)
        longest = int(self.lengths[index].max()) if len(index) else 0

        def pick(value):
            if isinstance(value, list):
                return [value[row] for row in rows]
            if isinstance(value, Tensor):
                value = value[index]
                return value[:, :longest] if value.dim() == 2 else value
            return value

        return replace(self, **{field.name: pick(getattr(self, field.name)) for field in fields(self)})

    def select_groups(self, groups: Tensor) -> Rollout:
        """The rows of the given groups."""
        return self.select(torch.isin(self.groups, groups).nonzero().flatten().tolist())

    def split_groups(self, parts: int) -> list[Rollout]:
        """At most that many disjoint parts of whole groups, as equal in number as can be."""
        chunks = self.groups.unique().tensor_split(parts)
        return [self.select_groups(chunk) for chunk in chunks if len(chunk)] if parts > 1 else [self]

    def join(self, other: Rollout) -> Rollout:
        """Both, one behind the other; the other's groups get numbers behind these. They come from one distribution, or
        scoring would take both for this one's: another temperature or truncation is an error."""
        if (self.temperature, self.truncated) != (other.temperature, other.truncated):
            raise ValueError(
                f"one rollout was sampled at temperature {self.temperature}, the other at {other.temperature}, or only "
                "one of them with top-k or top-p: score them apart"
            )
        longest = max(self.tokens.shape[1], other.tokens.shape[1])

        def both(name: str):
            a, b = getattr(self, name), getattr(other, name)
            if name == "groups":
                b = b + self.groups.max() + 1
            if isinstance(a, list):
                return a + b
            if not isinstance(a, Tensor):
                return a
            if a.dim() == 2:
                a, b = (torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in (a, b))
            return torch.cat([a, b])

        return replace(self, **{field.name: both(field.name) for field in fields(self)})

    def to(self, device: torch.device | str) -> Rollout:
        moved = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in moved.items()})

    def split(self, size: int | None) -> Iterator[Rollout]:
        """Micro-batches of at most `size` rows (None: all rows at once), rows of similar length together: less padding
        to compute."""
        size = max(1, len(self)) if size is None else size
        if size < 1:
            raise ValueError(f"a micro-batch holds at least 1 row, not {size}")
        total = [len(prompt) + n for prompt, n in zip(self.prompts, self.lengths.tolist(), strict=True)]
        order = sorted(range(len(self)), key=lambda row: total[row])
        for start in range(0, len(self), size):
            yield self.select(order[start : start + size])

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """What each response says, up to its first <eos> and without it; stop strings stay."""
        rows = [row[:n].tolist() for row, n in zip(self.tokens, self.lengths.tolist(), strict=True)]
        return [
            tokenizer.decode(row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row) for row in rows
        ]


def response_mask(tokens: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """tokens (B, T) -> (B, T) bool: True up to and including each row's first stop token.

    For ids that another sampler padded, perhaps with the stop token itself.
    """
    stops = torch.isin(tokens, torch.tensor(list(stop_ids), dtype=tokens.dtype, device=tokens.device)).long()
    return stops.cumsum(1) - stops == 0


def pad(sequences: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ragged ids -> (rows, longest) padded on the right, and their lengths (rows,)."""
    lengths = [len(sequence) for sequence in sequences]
    longest = max(lengths)
    padded = [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
    return torch.tensor(padded, device=device), torch.tensor(lengths, device=device)
