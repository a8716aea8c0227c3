"""Preference pairs: two responses to one prompt, and which of them was liked better."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanorl.errors import RunError
from nanorl.model import GPT
from nanorl.rollout import Rollout
from nanorl.run import write_atomically
from nanorl.sampler import Sampler
from nanorl.tasks.task import PreferenceTask
from nanorl.tokenizer import Tokenizer

NAME = "pairs.json"  # in the folder of a run
ASKED_AT_ONCE = 256  # prompts: what bounds memory, and what a processor's caches like
LARGEST_MARGIN = 1e6  # nobody prefers by more, and a batch of them would add up to infinity in float32


@dataclasses.dataclass(frozen=True)
class Pair:
    """Ids. A response includes its stop token, unless it was cut off."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float | None = None  # by how much the scores should differ at least


def batch_of(pairs: Sequence[Pair], device: torch.device | str = "cpu") -> tuple[Rollout, Tensor | None]:
    """(2 B responses: the chosen ones, then the rejected ones; margins (B,) in float64, or None)."""
    rollout = Rollout.from_responses(
        [pair.prompt for pair in pairs] * 2, [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    )
    margins = [pair.margin or 0.0 for pair in pairs]
    margins = torch.tensor(margins, dtype=torch.float64, device=device) if any(margins) else None
    return rollout.to(device), margins


def rows_of_step(step: int, n: int, batch: int, seed: int) -> list[int]:
    """Which of n pairs a step takes: all of them once in every pass, each pass in an order of its own. A function of
    its arguments, so that a resumed run has no cursor to restore."""
    places = range(step * batch, (step + 1) * batch)
    orders = {epoch: random.Random(f"pairs {seed} {epoch}").sample(range(n), n) for epoch in {p // n for p in places}}
    return [orders[place // n][place % n] for place in places]


def usable(pairs: Sequence[Pair], max_context: int) -> tuple[list[Pair], dict[str, int]]:
    """The pairs that can teach, and how many were dropped, by reason.

    A response that does not fit is never cut: what is left of the pair could say the opposite, and a pair with nothing
    left would count as a loss of log 2 = 0.693 that no training can lower.
    """
    kept, dropped = [], Counter()
    for pair in pairs:
        if len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) > max_context:
            dropped["too long for the context"] += 1
        elif not pair.chosen or not pair.rejected:
            dropped["a response is empty"] += 1
        elif pair.chosen == pair.rejected:
            dropped["the same response twice"] += 1
        else:
            kept.append(pair)
    return kept, dict(dropped)


def collect_pairs(
    policy: GPT, task: PreferenceTask, n: int, *, seed: int, labeller: str, max_new_tokens: int, held_out: bool = False
) -> tuple[list[Pair], dict[str, int]]:
    """Two responses of `policy` to each of n problems, and which one the task's labeller likes better; a function of
    the arguments. Returns the pairs, the sampled ids as they are, and how many were dropped, by reason."""
    tokenizer, key = task.tokenizer, f"{'held-out ' if held_out else ''}pairs {seed}"
    problems = task.held_out_problems(n) if held_out else task.training_problems(n, key)
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")  # other samples than training's
    prompts = [tokenizer.encode_prompt(problem.prompt) for problem in problems]
    ids, texts, pairs, undecided = [], [], [], 0
    for start in range(0, n, ASKED_AT_ONCE):
        rollout = Sampler(policy).generate(
            prompts[start : start + ASKED_AT_ONCE],
            samples_per_prompt=2,
            max_new_tokens=max_new_tokens,
            stop_ids=[tokenizer.eos_id],
            seed=seed,
            sample_ids=range(2 * start, 2 * min(start + ASKED_AT_ONCE, n)),
        )
        ids += [row[:length] for row, length in zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)]
        texts += rollout.texts(tokenizer)
    for i, problem in enumerate(problems):
        first, second = 2 * i, 2 * i + 1
        if ids[first] == ids[second]:  # dropped and counted below
            first_is_better = True
        else:
            first_is_better = task.prefers(problem, texts[first], texts[second], f"{key} {i}", labeller)
        if first_is_better is None:
            undecided += 1
            continue
        chosen, rejected = (first, second) if first_is_better else (second, first)
        pairs.append(Pair(prompts[i], ids[chosen], ids[rejected]))
    kept, dropped = usable(pairs, policy.config.max_context)
    dropped |= {"equally good": undecided} if undecided else {}
    if not kept:
        raise RunError(f"of {n} pairs none can be learned from (dropped: {describe_dropped(dropped)}): ask for more")
    return kept, dropped


def given_to(config, tokenizer: Tokenizer, max_context: int) -> tuple[list[Pair], dict[str, int]] | None:
    """What a run is to learn from: the pairs in its folder if it goes on with them, else those of --pairs FILE, and how
    many were dropped; None where it is to ask for some."""
    kept = Path(config.out) / NAME if config.resume else None
    return load(kept) if kept and kept.exists() else from_option(config.pairs, tokenizer, max_context)


def from_option(option: str, tokenizer: Tokenizer, max_context: int) -> tuple[list[Pair], dict[str, int]] | None:
    """What `--pairs FILE` holds; None where it is the number of pairs to ask about."""
    if not option.isdecimal():
        return read_pairs(option, tokenizer, max_context)
    if int(option) < 1:
        raise RunError(f"--pairs must be at least 1, not {option}")
    return None


def read_pairs(path: str | Path, tokenizer: Tokenizer, max_context: int) -> tuple[list[Pair], dict[str, int]]:
    """From a JSONL file: `prompt`, `chosen`, `rejected` (texts) and, if wanted, `margin` (a number) on each line.
    Raises RunError that names the file and the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # a text may hold the other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                pairs.append(parse_pair(line, tokenizer))
            except ValueError as error:
                raise RunError(f"{path}, line {number}: {error}") from None
    kept, dropped = usable(pairs, max_context)
    if not kept:
        raise RunError(f"{path} holds no usable pair (of {len(pairs)} read; dropped: {describe_dropped(dropped)})")
    return kept, dropped


def parse_pair(line: str, tokenizer: Tokenizer) -> Pair:
    """Raises ValueError that says what is wrong with the line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with prompt, chosen and rejected, got {line.strip()[:60]}")
    for name in ("prompt", "chosen", "rejected"):
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name} must be a text, got {row.get(name)!r}")
    margin = row.get("margin")
    if margin is not None and (
        isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= LARGEST_MARGIN
    ):
        raise ValueError(f"margin must be a number, got {margin!r} (the largest is {LARGEST_MARGIN:g})")
    prompt = tokenizer.encode_prompt(row["prompt"])
    if not prompt:
        raise ValueError("prompt is empty: the first response token needs one before it")
    # An empty response would be its stop token alone; it is kept empty, and dropped and counted with the others.
    chosen, rejected = (tokenizer.encode_response(row[name]) if row[name] else [] for name in ("chosen", "rejected"))
    return Pair(prompt, chosen, rejected, None if margin is None else float(margin))


def save(path: Path, pairs: Sequence[Pair], dropped: dict[str, int]) -> None:
    """What a run trains on, as ids, so that it goes on with the same pairs whatever becomes of their source."""
    write_atomically(path, json.dumps({"pairs": [dataclasses.astuple(pair) for pair in pairs], "dropped": dropped}))


def load(path: Path) -> tuple[list[Pair], dict[str, int]]:
    try:
        kept = json.loads(path.read_text())
        return [Pair(*row) for row in kept["pairs"]], kept["dropped"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path} is damaged: it holds the pairs that the run trains on") from None


def describe_dropped(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in dropped.items()) or "none"
