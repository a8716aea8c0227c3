"""Draws the figure of lesson 02 from real runs, and prints the numbers that the lesson quotes.

    python lessons/02_supervised_fine_tuning/figure.py

Runs what is missing first: imitate.py, three ways of training x three seeds, 40 seconds each on one free core.
What it measured is kept in runs/lesson_02.
"""

from __future__ import annotations

import json
from pathlib import Path

import imitate
import matplotlib

matplotlib.use("Agg")  # no screen needed
import matplotlib.pyplot as plt
import torch
from imitate import ROOT, STEPS, TASK, TRAINED_ON
from torch import Tensor

from nanorl.evaluation import EVAL_SEED, evaluate
from nanorl.model import GPT
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.tasks.chain import THINKING_SHARE

RUNS = ROOT / "runs" / "lesson_02"
SEEDS = range(3)
EVERY = 20  # steps between looks at the accuracy
LOOKED_AT = 256  # held-out problems at each look
EXAMINED = 512  # held-out problems at the end
KINDS = {  # of the tokens of a demonstration: label, color
    "answered at once": ("the digit of a direct answer", "tab:red"),
    "choice": ("the first token: think or not", "tab:blue"),
    "worked out": ("the result of a step", "tab:green"),
    "stop": ("the stop token", "tab:purple"),
    "copied": ("what is copied: operators, operands, marks", "0.5"),
}
STARTS = {"<": "made to think", ">": "made to answer\nat once"}
COMMAND = "python lessons/02_supervised_fine_tuning/figure.py"


def kinds(part: Rollout) -> dict[str, Tensor]:
    """Which tokens (b, T) of the demonstrations are of which kind; each trained token is of one."""
    equals, close = (TASK.tokenizer.encode(mark)[0] for mark in "=>")
    before = torch.nn.functional.pad(part.tokens, (1, 0))[:, :-1]
    place = torch.arange(part.tokens.shape[1])
    first, direct = place == 0, part.tokens[:, :1] == close
    found = {
        "choice": first.expand_as(part.mask),
        "answered at once": (place == 1) & direct,
        "worked out": (before == equals) & ~first,
        "stop": place == part.lengths[:, None] - 1,
    }
    found["copied"] = ~torch.stack(list(found.values())).any(0)
    return {kind: which & part.mask for kind, which in found.items()}


@torch.no_grad()
def accuracy_from(policy: GPT, start: str, problems: int) -> float:
    """On held-out problems, sampled at temperature 1, when the response's first token is given."""
    examined = TASK.held_out_problems(problems)
    prompts = [TASK.tokenizer.encode_prompt(problem.prompt + start) for problem in examined]
    rollout = Sampler(policy).generate(
        prompts, max_new_tokens=TASK.max_new_tokens - 1, stop_ids=[TASK.tokenizer.eos_id], seed=EVAL_SEED
    )
    texts = rollout.texts(TASK.tokenizer)
    return sum(TASK.reward(p, start + text) for p, text in zip(examined, texts, strict=True)) / problems


def run(trained_on: str, seed: int) -> dict:
    """What one run of imitate.py showed, from runs/lesson_02 if it is there."""
    path = RUNS / f"{trained_on.replace(' ', '_')}_{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    print(f"training on the {trained_on}, seed {seed} ...", flush=True)
    policy = imitate.new_policy(seed)
    sums = {kind: torch.zeros(STEPS) for kind in KINDS}
    counts = {kind: torch.zeros(STEPS) for kind in KINDS}
    curve, seen = [], set()

    def watch(step: int, part: Rollout, logprobs: Tensor) -> None:
        if step % EVERY == 0 and step not in seen:  # before the step's update
            seen.add(step)
            curve.append(accuracy_from(policy, "<", LOOKED_AT))
        for kind, which in kinds(part).items():
            sums[kind][step] -= logprobs[which].sum()
            counts[kind][step] += which.sum()

    imitate.imitate(policy, seed, trained_on, watch=watch)
    curve.append(accuracy_from(policy, "<", LOOKED_AT))
    result = {
        "sums": {kind: values.tolist() for kind, values in sums.items()},
        "counts": {kind: values.tolist() for kind, values in counts.items()},
        "thinking_right": curve,
        "evaluation": evaluate(policy, TASK, TASK.held_out_problems(EXAMINED), TASK.max_new_tokens),
        "by_start": {start: accuracy_from(policy, start, EXAMINED) for start in STARTS},
    }
    RUNS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = {trained_on: [run(trained_on, seed) for seed in SEEDS] for trained_on in TRAINED_ON}
    for k, rs in runs.items():
        for r in rs:
            print(k, r["evaluation"], r["by_start"], r["thinking_right"])
