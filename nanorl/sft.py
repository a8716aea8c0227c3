"""Supervised fine-tuning: imitate demonstrations, the loss on the response alone (its stop token included)."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

import kernels.linear
import kernels.reference
import kernels.rows
from nanorl import losses, model, optimizers, rollout, scorer, tokenizer
from nanorl.checkpoint import sync
from nanorl.losses.aggregate import token_count, token_mean
from nanorl.model import GPT
from nanorl.optimizers import Optimizers, schedule
from nanorl.rollout import Rollout
from nanorl.run import Run
from nanorl.scorer import score
from nanorl.tasks.task import Task

WARMUP = 20  # steps in which the learning rate rises; it then falls to zero with the last step
MICRO_BATCH = 60  # rows; they are sorted by length, so most demonstrations that answer at once stay among themselves
BATCH = 96  # demonstrations a step
LEARNING_RATE = 0.01
# What decides a warm start besides its options and its task.
CODE = (
    kernels.linear,
    kernels.rows,
    kernels.reference,
    losses.aggregate,
    model,
    optimizers,
    rollout,
    scorer,
    tokenizer,
)
CODE += (sys.modules[__name__],)


def demonstrations(task: Task, n: int, key: str) -> Rollout:
    """n demonstrations as a record that can be scored; a function of `key` alone."""
    problems = task.training_problems(n, key)
    return Rollout.from_responses(
        [task.tokenizer.encode_prompt(problem.prompt) for problem in problems],
        [task.tokenizer.encode_response(task.demonstration(problem, key)) for problem in problems],
    )


def warm_start(
    policy: GPT,
    task: Task,
    *,
    steps: int,
    seed: int,
    batch: int = BATCH,
    learning_rate: float = LEARNING_RATE,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train `policy` in place on the task's demonstrations: the mean cross-entropy over response tokens.

    `report(step, loss)` is called after each step.
    """
    optimizer = Optimizers(policy, learning_rate)
    for step in range(steps):
        whole = demonstrations(task, batch, f"sft {seed} {step}").to(policy.head.device)
        tokens = token_count(whole.mask)
        optimizer.zero_grad()
        total = 0.0
        for part in whole.split(MICRO_BATCH):
            logprobs, _ = score(policy, part)
            loss = token_mean(-logprobs, part.mask, denominator=tokens)
            loss.backward()
            total += loss.detach()
        optimizer.update(total, schedule(step, steps, decay=1.0, warmup=WARMUP))
        report(step, total.item())


def cached_warm_start(
    policy: GPT, task: Task, folder: Path, *, steps: int, seed: int, batch: int = BATCH, **options
) -> bool:
    """`warm_start`, or its result from `folder` if the same one was done before. Returns whether it was found there.

    The file's name is a digest of everything that decides the result: options, model, task, and the code that trains.
    """
    weight = policy.head
    settings = {
        "steps": steps,
        "seed": seed,
        "batch": batch,
        "model": asdict(policy.config),
        "task": type(task).__name__,
    }
    settings |= {name: value for name, value in options.items() if name != "report"}
    settings |= {"dtype": str(weight.dtype), "device": weight.device.type, "torch": torch.__version__}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for module in (*CODE, sys.modules[type(task).__module__]):
        digest.update(inspect.getsource(module).encode())
    first = demonstrations(task, batch, f"sft {seed} 0")  # tells tasks of one class apart
    digest.update(repr((first.prompts, first.tokens.tolist())).encode())
    digest.update(save(policy.state_dict()))  # the weights it starts from
    path = folder / f"{digest.hexdigest()[:16]}.safetensors"
    try:
        policy.load_state_dict(load_file(path))
        return True
    except (OSError, SafetensorError):  # not there, or damaged: made anew
        pass
    warm_start(policy, task, steps=steps, seed=seed, batch=batch, **options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial_{os.getpid()}_{path.name}")
        save_file(policy.state_dict(), partial)
        sync(partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:  # the second: a full disk
        warnings.warn(f"the warm start could not be kept for the next run ({error})", stacklevel=2)
    return False


def start_from_demonstrations(run: Run, policy: GPT, task: Task, steps: int | None) -> None:
    """The warm start of a training script's policy: taken from beside the run if it was done before, left out if there
    is a checkpoint to continue from. `steps` None: the task's."""
    steps = task.warm_start_steps if steps is None else steps
    if not run.has_checkpoint:
        with run.phase("warm_start"):
            folder = run.out.parent / "warm_starts"
            report = run.reporter("warm start", steps)
            found = cached_warm_start(policy, task, folder, steps=steps, seed=run.config.seed, report=report)
            run.results["warm_start_cached"] = found
