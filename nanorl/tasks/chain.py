"""Chain arithmetic: small enough for a laptop, and hard enough that thinking pays.

A problem is a chain of single-digit operations from left to right, every intermediate value taken modulo 10:
`3+4*2-5*7+1=`. A response either thinks, `<3+4=7*2=4-5=9*7=3+1=4>4`, or answers at once, `>4`. The verifier looks at
what stands behind the last `>` and at nothing else, so the thinking earns nothing by itself.

Answering at once is near chance for a small transformer; written out, each step is a lookup.
"""

from __future__ import annotations

import random
import zlib

from nanorl.tasks.task import Problem
from nanorl.tokenizer import Tokenizer

NUMBERS = 6  # in a chain
THINKING_SHARE = 0.28  # of the demonstrations
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def make_problem(rng: random.Random, numbers: int = NUMBERS) -> Problem:
    """A chain of that many numbers."""
    drawn = [rng.choice("123456789") for _ in range(numbers)]
    operations = [rng.choice("+-*") for _ in range(numbers - 1)]
    prompt = drawn[0] + "".join(o + n for o, n in zip(operations, drawn[1:], strict=True)) + "="
    return Problem(prompt, work_out(prompt)[-1])


def work_out(prompt: str) -> list[str]:
    """The digit after each operation of `prompt`, each taken modulo 10."""
    value, results = int(prompt[0]), []
    for operation, number in zip(prompt[1:-1:2], prompt[2:-1:2], strict=True):
        value = OPERATIONS[operation](value, int(number)) % 10
        results.append(str(value))
    return results


def think(prompt: str) -> str:
    """3+4*2= -> <3+4=7*2=4>"""
    steps = zip(prompt[1:-1:2], prompt[2:-1:2], work_out(prompt), strict=True)
    return "<" + prompt[0] + "".join(f"{operation}{number}={result}" for operation, number, result in steps) + ">"


def is_held_out(problem: Problem) -> bool:
    """One problem in eight, by a checksum of its text: never trained on, in whatever order problems are made."""
    return zlib.crc32(problem.prompt.encode()) % 8 == 0


def draw(n: int, rng: random.Random, *, held_out: bool, numbers: int = NUMBERS) -> list[Problem]:
    """n different problems of one side of the split."""
    problems: dict[str, Problem] = {}
    while len(problems) < n:
        problem = make_problem(rng, numbers)
        if is_held_out(problem) == held_out:
            problems[problem.prompt] = problem
    return list(problems.values())


class ChainArithmetic:
    tokenizer = Tokenizer.characters("0123456789+-*=<>")
    max_prompt_tokens = 2 * NUMBERS
    warm_start_steps = 300
    max_new_tokens = 4 * NUMBERS + 4  # "<3", four a step, ">4", the stop token; a few to spare

    def training_problems(self, n: int, key: str) -> list[Problem]:
        return draw(n, random.Random(f"problems {key}"), held_out=False)

    def held_out_problems(self, n: int) -> list[Problem]:
        return draw(n, random.Random("held out"), held_out=True)

    def demonstration(self, problem: Problem, key: str) -> str:
        """Thinks with probability THINKING_SHARE, else answers at once; always right."""
        thinks = random.Random(f"thinks {key} {problem.prompt}").random() < THINKING_SHARE
        return (think(problem.prompt) if thinks else ">") + problem.answer

    def reward(self, problem: Problem, response: str) -> float:
        """1 if what stands behind the last `>` is the answer and nothing else, 0 otherwise."""
        _, mark, answer = response.rpartition(">")
        return float(mark == ">" and answer == problem.answer)

    def describe(self, problem: Problem, response: str) -> dict[str, float]:
        return {"thinks": float(response.startswith("<"))}
