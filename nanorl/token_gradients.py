"""Which tokens each loss pushes, and how hard: the same batch under every algorithm.

    python -m nanorl.token_gradients runs/grpo-1                        samples a batch from the run's checkpoints
    python -m nanorl.token_gradients runs/grpo-1/token_gradients.json --losses grpo my_loss.py:my_loss

The batch is sampled by the run's last checkpoint but one and scored by the last, so that ratios are those of real
updates (train with --save-every 1 to have a single one between the two). The push on a token is
-d loss / d log-prob: above 0 the update makes the token likelier. A token whose advantage is not 0, yet whose push is,
has been clipped. Leaves token_gradients.json (the batch), .md (each token in a table) and .png.
"""

from __future__ import annotations

import inspect
import json
import math
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import torch
import tyro
from torch import Tensor

from nanorl import checkpoint
from nanorl.advantages import group_advantages
from nanorl.algorithms import ALGORITHMS, Algorithm
from nanorl.errors import RunError
from nanorl.evaluation import grade
from nanorl.options import at_least, choose, command_line
from nanorl.own_loss import with_own_loss
from nanorl.paired import table
from nanorl.plots import save
from nanorl.run import write_atomically
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.tasks import TASKS

TRIED = 64  # problems, of which the first whose rewards differ are shown
COLUMNS = 2  # of the picture
DARK = 0.6  # of the largest push: from there on a cell's text is white


@dataclass
class Config:
    """Options of nanorl.token_gradients."""

    batch: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or a stored batch (token_gradients.json)."""
    losses: list[str] = field(default_factory=lambda: list(ALGORITHMS))
    """Algorithms, or own losses FILE.py:FUNCTION with the advantages of GRPO. Default: every algorithm."""
    problems: int = 1
    """Of the batch sampled from a run, a group of responses each."""
    seed: int = 0
    """Of the problems and samples."""


@dataclass
class Batch:
    """What losses are made from, as lists: B responses of `mask` tokens, T the longest."""

    texts: list[list[str]]  # of each token of each response
    logprobs: list[list[float]]  # (B, T)
    old_logprobs: list[list[float]]  # (B, T)
    mask: list[list[bool]]  # (B, T)
    rewards: list[float]  # (B,)
    groups: list[int]  # (B,)
    max_length: int  # tokens a response may have
    origin: str


def read(path: Path) -> Batch:
    try:
        return Batch(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} is neither the folder of a run nor a stored batch: {error}") from None


def sample(run: Path, *, problems: int, seed: int) -> Batch:
    """A batch of groups whose rewards differ, from the last two checkpoints of a run."""
    found = checkpoint.complete(run / "checkpoint")
    if len(found) < 2:
        raise RunError(
            f"{run} holds {len(found)} checkpoints of the two it takes: the folder of a run, runs/grpo-1 say"
        )
    old, new = (checkpoint.load_model(path) for path in found[-2:])
    options = json.loads((run / "config.json").read_text())["options"]
    task = choose("task", options["task"], TASKS)()
    max_length = options["max_new_tokens"] or task.max_new_tokens
    candidates = task.training_problems(TRIED, f"token gradients {seed}")
    rollout = Sampler(old).generate(
        [task.tokenizer.encode_prompt(problem.prompt) for problem in candidates],
        samples_per_prompt=options["group_size"],
        max_new_tokens=max_length,
        stop_ids=[task.tokenizer.eos_id],
        temperature=options["temperature"],
        seed=seed,
    )
    rollout.rewards = torch.tensor(grade(task, candidates, rollout)[0], dtype=torch.float64)
    teaching = rollout.groups[group_advantages(rollout.rewards, rollout.groups) != 0].unique()[:problems]
    if len(teaching) < problems:
        raise RunError(f"only {len(teaching)} of {TRIED} groups have rewards that differ: ask for fewer --problems")
    rollout = rollout.select(torch.isin(rollout.groups, teaching).nonzero().flatten().tolist())
    with torch.no_grad():
        (logprobs, _), (old_logprobs, _) = score(new, rollout), score(old, rollout)  # (B, T)
    rows = [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.lengths.tolist(), strict=True)]
    return Batch(
        texts=[[task.tokenizer.token_bytes(i).decode(errors="backslashreplace") for i in row] for row in rows],
        logprobs=logprobs.tolist(),
        old_logprobs=old_logprobs.tolist(),
        mask=rollout.mask.tolist(),
        rewards=rollout.rewards.tolist(),
        groups=rollout.groups.tolist(),
        max_length=max_length,
        origin=f"{run.name}: sampled at {found[-2].name}, scored at {found[-1].name}",
    )


def pushes(batch: Batch, algorithm: Algorithm) -> tuple[Tensor, Tensor, Tensor]:
    """-d loss / d log-prob (B, T), whether the token is clipped (B, T), advantages (B,): the whole batch at once."""
    logprobs = torch.tensor(batch.logprobs, dtype=torch.float64, requires_grad=True)
    old_logprobs = torch.tensor(batch.old_logprobs, dtype=torch.float64)
    mask = torch.tensor(batch.mask)
    rewards, groups = torch.tensor(batch.rewards, dtype=torch.float64), torch.tensor(batch.groups)
    advantages = group_advantages(rewards, groups, scale=algorithm.advantage_scale, valid=mask.any(1))  # (B,)
    handed = {"denominator": algorithm.denominator(mask), "max_length": batch.max_length}
    handed = {name: value for name, value in handed.items() if name in inspect.signature(algorithm.loss).parameters}
    loss, _ = algorithm.loss(logprobs, old_logprobs, advantages, mask, **handed)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    clipped = mask & (advantages != 0)[:, None] & (gradient == 0)
    return -gradient, clipped, advantages


def tables(batch: Batch, found: dict[str, tuple[Tensor, Tensor, Tensor]]) -> str:
    """Markdown: what each response gets in sum, then each token."""
    ratios = torch.tensor(batch.logprobs, dtype=torch.float64) - torch.tensor(batch.old_logprobs, dtype=torch.float64)
    responses = [["response", "reward", "tokens", *found]]
    tokens = [["response", "token", "ratio", *found]]
    for row, texts in enumerate(batch.texts):
        count = sum(batch.mask[row])
        sums = [f"{push[row].sum():+.4f}" + cut(int(clipped[row].sum()), count) for push, clipped, _ in found.values()]
        responses.append([str(row), f"{batch.rewards[row]:g}", str(count), *sums])
        for t, text in enumerate(texts):
            if batch.mask[row][t]:
                each = ["clipped" if clipped[row, t] else f"{push[row, t]:+.5f}" for push, clipped, _ in found.values()]
                tokens.append([str(row), f"`{text}`", f"{ratios[row, t].exp():.4f}", *each])
    return (
        f"{batch.origin}\n\nThe push on each response: the sum over its tokens of -d loss / d log-prob, and how many "
        f"of them are clipped.\n\n{table(responses)}\n\nAnd on each token:\n\n{table(tokens)}\n"
    )


def cut(clipped: int, tokens: int) -> str:
    return f" ({clipped} of {tokens} clipped)" if clipped else ""


def draw(batch: Batch, found: dict[str, tuple[Tensor, Tensor, Tensor]], path: Path, caption: str) -> Path:
    """A panel a loss, a row a response, a cell a token."""
    rows, longest = len(batch.texts), len(batch.mask[0])
    high = -(-len(found) // COLUMNS)
    size = (COLUMNS * (1.5 + 0.24 * longest), 1 + high * (0.7 + 0.24 * rows))
    figure, panels = plt.subplots(high, COLUMNS, figsize=size, squeeze=False)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    share = []
    for axes, (name, (push, clipped, _)) in zip(panels.flat, found.items(), strict=False):
        largest = push.abs().max().item()
        scale = largest or 1.0  # all of it may be clipped
        cells = push.masked_fill(~torch.tensor(batch.mask) | clipped, math.nan)
        axes.imshow(cells.numpy(), cmap="RdBu", vmin=-scale, vmax=scale, aspect="auto")
        axes.imshow(torch.where(clipped, 1.0, math.nan).numpy(), cmap="gray", vmin=0, vmax=1.3, aspect="auto")
        for row, texts in enumerate(batch.texts):
            for t, text in enumerate(texts):
                color = "w" if push[row, t].abs() > DARK * scale else "k"
                axes.text(t, row, text, color=color, ha="center", va="center", fontsize=7, parse_math=False)
        axes.set_title(f"{name}, largest push {largest:.2g}", fontsize=9)
        axes.set(xlabel="token of the response", ylabel="reward")
        axes.set_yticks(range(rows), [f"{reward:g}" for reward in batch.rewards])
        share.append(f"{name} {clipped.sum() / max(1, sum(map(sum, batch.mask))):.0%}")
    figure.suptitle(
        f"One batch under each loss. Tokens clipped: {', '.join(share)}\n"
        "blue: made likelier, red: less likely, gray: clipped",
        fontsize=10,
    )
    return save(figure, path, caption)


def main(config: Config) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Returns what `pushes` found, by loss."""
    at_least(config, problems=1, seed=0)
    algorithms = {name: algorithm_of(name) for name in config.losses}
    if config.batch.is_dir():
        stored = config.batch / "token_gradients.json"
        batch = sample(config.batch, problems=config.problems, seed=config.seed)
        write_atomically(stored, json.dumps(asdict(batch)) + "\n")
    else:
        stored = config.batch
        batch = read(stored)
    found = {name: pushes(batch, algorithm) for name, algorithm in algorithms.items()}
    text = tables(batch, found)
    stored.with_suffix(".md").write_text(text)
    command = shlex.join(["python", "-m", "nanorl.token_gradients", str(stored), "--losses", *config.losses])
    picture = draw(batch, found, stored.with_suffix(".png"), f"{batch.origin}. Drawn by: {command}")
    print(text.partition("\n\nAnd on each token")[0])
    print(f"\neach token: {stored.with_suffix('.md')}, {picture}; the batch: {stored}")
    return found


def algorithm_of(name: str) -> Algorithm:
    """A row of the table, or GRPO's with an own loss."""
    if ".py:" in name:
        return with_own_loss(ALGORITHMS["grpo"], name)
    return choose("losses", name, ALGORITHMS)


if __name__ == "__main__":
    command_line(Config, __doc__, main)
