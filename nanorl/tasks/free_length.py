"""Length is free: answer at once, then write as much filler as you like.

    3+4=7*2=      4.....        3+4=7*2=      9~~~

A problem is a short chain with its steps written out, all but the last result (nanorl/tasks/chain.py). The verifier
looks at the digit in front and ignores the filler, so that no length earns more than another. If right and wrong
answers come to differ in length, it is the loss that did it (lessons/07_dr_grpo).

For that the policy must know, while it fills, how good its answer is. The demonstrations teach it: a right digit is
followed by dots, a wrong one, in three of ten, by tildes. How many of them is decided without a look at either.
"""

from __future__ import annotations

import random

from nanorl.tasks.chain import draw, think
from nanorl.tasks.task import Problem
from nanorl.tokenizer import Tokenizer

NUMBERS = 3  # in a chain
WRONG = 0.3  # share of the demonstrations
STOP = 1 / 5  # chance that a demonstration ends behind the digit, and behind each filler: 4 of them on average
SURE, IN_DOUBT = ".", "~"


class FreeLength:
    tokenizer = Tokenizer.characters("0123456789+-*=" + SURE + IN_DOUBT)
    max_prompt_tokens = 4 * NUMBERS - 4
    max_new_tokens = 64  # one demonstration in a million is cut to it

    def training_problems(self, n: int, key: str) -> list[Problem]:
        return draw_problems(n, random.Random(f"problems {key}"), held_out=False)

    def held_out_problems(self, n: int) -> list[Problem]:
        return draw_problems(n, random.Random("held out"), held_out=True)

    def demonstration(self, problem: Problem, key: str) -> str:
        rng = random.Random(f"demonstration {key} {problem.prompt}")
        digit, filler, length = problem.answer, SURE, 0
        if rng.random() < WRONG:
            digit, filler = rng.choice("0123456789".replace(problem.answer, "")), IN_DOUBT
        while length < self.max_new_tokens - 2 and rng.random() >= STOP:  # the digit and the stop token fit too
            length += 1
        return digit + filler * length

    def reward(self, problem: Problem, response: str) -> float:
        """1 for the right digit and any filler behind it, 0 for anything else."""
        return float(response.rstrip(SURE + IN_DOUBT) == problem.answer)

    def describe(self, problem: Problem, response: str) -> dict[str, float]:
        return {"in_doubt": float(IN_DOUBT in response)}


def draw_problems(n: int, rng: random.Random, *, held_out: bool) -> list[Problem]:
    """3+4*2= becomes 3+4=7*2="""
    chains = draw(n, rng, held_out=held_out, numbers=NUMBERS)
    return [Problem(think(chain.prompt)[1:].removesuffix(chain.answer + ">"), chain.answer) for chain in chains]
