"""How the algorithms differ, as one table: name -> loss, advantage, what the loss averages over, defaults.

python -m nanorl.algorithms                    the table, beside PPO and DPO
python -m nanorl.algorithms --from-trl FILE    a GRPOConfig of TRL's as options of train_grpo.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from nanorl.from_trl import read, translate
from nanorl.losses import cispo_loss, dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss, reinforce_loss
from nanorl.losses.aggregate import sequence_count, token_count
from nanorl.options import choose, command_line

# By the loop to every loss, whether it has a use for them or not.
OFFERED = {"ref_logprobs", "denominator", "max_length"}
EXTRAS = {
    "dynamic_sampling": "groups of equal reward are dropped and replaced by new ones",
    "overlong_penalty": "the last tokens before the limit cost reward, more and more",
    "overlong_filtering": "responses cut off at the limit are left out of the loss",
}


@dataclass(frozen=True)
class Algorithm:
    loss: Callable  # of the loss contract: (logprobs, old_logprobs, advantages, mask, *, ...) -> (loss, metrics)
    advantage_scale: Literal["group", "batch", "none"]
    mean_over: Literal["tokens", "sequences"]  # what `denominator` counts
    level: Literal["token", "sequence"] = "token"  # whose the ratio is, and what the loss's metrics are means over
    loss_options: dict = field(default_factory=dict)  # keywords of the loss that belong to the algorithm
    updates_per_rollout: int = 1  # disjoint parts of a batch of rollouts, with an update on each
    epochs: int = 1  # times a batch of rollouts is used
    extras: tuple[str, ...] = ()  # parts of DAPO around the loss, of EXTRAS
    note: str = ""

    def denominator(self, mask: Tensor) -> int:
        """Of the whole batch of an update, mask (B, T): handed to each micro-batch's loss."""
        return max(1, token_count(mask) if self.mean_over == "tokens" else sequence_count(mask))

    def weight(self, mask: Tensor) -> int:
        """Of a micro-batch's metrics, mask (b, T), in their mean over the whole batch."""
        return token_count(mask) if self.level == "token" else sequence_count(mask)

    def chosen(self, **options) -> dict:
        """Keywords for the loss: those of `options` that are set (not None), and the algorithm's own.

        What the loop offers is left away where the loss's signature does not name it; any other option is an error
        then, a ValueError.
        """
        named = inspect.signature(self.loss).parameters
        options = {name: value for name, value in options.items() if value is not None}
        unknown = [name for name in options if name not in named and name not in OFFERED]
        if unknown:
            raise ValueError(f"{self.loss.__name__} has no {' and no '.join(unknown)}: leave it away")
        return self.loss_options | {name: value for name, value in options.items() if name in named}


ALGORITHMS = {
    "grpo": Algorithm(
        grpo_loss,
        advantage_scale="group",
        mean_over="sequences",
        note="z-score in the group; each response counts equally",
    ),
    "dr_grpo": Algorithm(  # max_length is the run's --max-new-tokens
        dr_grpo_loss,
        advantage_scale="none",
        mean_over="sequences",
        note="divides neither by length nor by standard deviation",
    ),
    "dapo": Algorithm(
        dapo_loss,
        advantage_scale="group",
        mean_over="tokens",
        extras=("dynamic_sampling", "overlong_penalty", "overlong_filtering"),
        note="clip-higher, dynamic sampling, overlong penalty and filter",
    ),
    "gspo": Algorithm(
        gspo_loss,
        advantage_scale="group",
        mean_over="sequences",
        level="sequence",
        updates_per_rollout=4,
        note="clips whole responses; 4 updates a rollout",
    ),
    "gspo_token": Algorithm(
        gspo_loss,
        advantage_scale="group",
        mean_over="sequences",
        level="sequence",
        loss_options={"token_level": True},
        updates_per_rollout=4,
        note="GSPO that takes an advantage for each token",
    ),
    "reinforce": Algorithm(
        reinforce_loss,
        advantage_scale="none",
        mean_over="tokens",
        note="the policy gradient; right for one update a rollout",
    ),
    "cispo": Algorithm(
        cispo_loss,
        advantage_scale="group",
        mean_over="tokens",
        note="caps the weight of a token, keeps its gradient",
    ),
}


def choose_extras(given: list[str] | None, algorithm: Algorithm) -> tuple[str, ...]:
    """Those of --extras, checked; where it is not given, the algorithm's."""
    if given is None or given == ["none"]:
        return () if given else algorithm.extras
    for name in given:
        choose("extras", name, EXTRAS)
    return tuple(given)


COLUMNS = ("method", "reward source", "critic", "ratio and clipping level", "mean over", "KL", "note")
OTHERS = [  # not group-policy losses: scripts of their own
    ("ppo", "reward model", "yes", "token, 0.2 / 0.2", "tokens", "k1 in the reward", "GAE; four models in memory"),
    ("dpo", "preference pairs", "no", "pair against reference, no clipping", "pairs", "implied by beta", "no sampling"),
]


def described(name: str, algorithm: Algorithm) -> tuple[str, ...]:
    """One line of the table; its numbers are read from the loss's signature."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(algorithm.loss).parameters.items()}
    if "clip_low" in defaults:
        ratio = f"{algorithm.level}, {defaults['clip_low']:g} / {defaults['clip_high']:g}"
    elif "clip_high" in defaults:
        ratio = f"{algorithm.level}, weight at most {1 + defaults['clip_high']:g}"
    else:
        ratio = "no ratio"
    if "max_length" in defaults:
        mean = "sequences x max_length"
    elif algorithm.mean_over == "tokens":
        mean = "tokens"
    else:
        mean = "sequences" if algorithm.level == "sequence" else "tokens of each sequence, then sequences"
    return name, "verifier, or any reward", "no", ratio, mean, "k3 in the loss, default off", algorithm.note


def table() -> str:
    """All methods in Markdown."""
    lines = [COLUMNS, *(described(name, algorithm) for name, algorithm in ALGORITHMS.items()), *OTHERS]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


@dataclass
class Config:
    """Options of nanorl.algorithms."""

    from_trl: Path | None = None
    """A GRPOConfig of TRL's to translate: JSON, a call in Python, or lines key=value. Default: print the table."""


def main(config: Config) -> None:
    print(table() if config.from_trl is None else translate(read(config.from_trl)))


if __name__ == "__main__":
    command_line(Config, __doc__, main)
