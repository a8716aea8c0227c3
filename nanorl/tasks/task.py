"""What a task offers to the training scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nanorl.tokenizer import Tokenizer


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str  # the right one, or where there is no such thing the one of a demonstration


class Task(Protocol):
    tokenizer: Tokenizer
    max_prompt_tokens: int
    warm_start_steps: int  # on demonstrations, before RL
    max_new_tokens: int  # enough for the longest sensible response and its stop token

    def training_problems(self, n: int, key: str) -> list[Problem]:
        """n problems, a function of `key` alone ("grpo 0 12": who asks, seed, step), so that a resumed run has nothing
        to restore."""

    def held_out_problems(self, n: int) -> list[Problem]:
        """The same n problems in every run; none of them is ever a training problem."""

    def demonstration(self, problem: Problem, key: str) -> str:
        """A response to imitate in the warm start; a function of its arguments alone."""

    def reward(self, problem: Problem, response: str) -> float:
        """1 for a right answer, less for any other."""

    def describe(self, problem: Problem, response: str) -> dict[str, float]:
        """Properties of a response worth a curve, by name; their means are logged."""


@runtime_checkable
class PreferenceTask(Task, Protocol):
    """Where no answer is right, but people like one better than another. `reward` is then a hidden score, to look at
    and never to train on."""

    labellers: Mapping[str, object]  # people who can be asked, by name

    def prefers(self, problem: Problem, a: str, b: str, key: str, labeller: str) -> bool | None:
        """Whether the labeller says that response `a` is better than `b`; None if they cannot tell. A function of the
        arguments alone."""
