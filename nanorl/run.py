"""A run's folder, and what keeps a run alive: everything around a training loop that is not the algorithm.

config.json     the options, and versions of what ran
metrics.jsonl   one line a step
samples.txt     responses to read, as training went on
curves.png      the course of the run
samples.html    responses before and after, token by token (nanorl/viewer.py)
checkpoint/     see nanorl/checkpoint.py
summary.json    evaluation before and after, seconds
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanorl import __version__, checkpoint
from nanorl.errors import Interrupted, RunError
from nanorl.optimizers import Optimizers
from nanorl.options import RUNS, numbered_runs

SAVED = {"step", "optimizers", "random", "results", "seconds"}  # beside the weights
# On the console, of what a step logs
SHOWN = ("reward", "proxy", "gold", "kl", "accuracy", "margin", "length", "entropy", "thinks")


class Run:
    """One run's folder, progress and clock. Use as a context manager, so that Ctrl-C is caught from the first step.

    `config` has at least the fields out, seed, steps, resume, save_every, eval_every and `name`.
    """

    def __init__(self, config):
        self.config = config
        self.resuming = config.resume
        self.out = self.open_folder()
        self.start = 0  # first step of this process
        self.results: dict[str, Any] = {}  # evaluations and the like, for summary.json; survives a resume
        self.seconds: dict[str, float] = {}  # by phase, over all processes of the run
        self.step_seconds: dict[str, float] = {}
        self.began = time.perf_counter()
        self.models: dict[str, nn.Module] = {}
        self.optimizers: tuple[Optimizers, ...] = ()
        self.interrupted = False

    # ---- the folder

    def open_folder(self) -> Path:
        config = self.config
        if config.resume:
            out = Path(config.out)
            self.lock(out)
            done = checkpoint.steps_done(out / "checkpoint")
            if done > config.steps:
                raise RunError(f"{out} has done {done} steps already, more than --steps {config.steps}")
        elif config.out is None:
            RUNS.mkdir(exist_ok=True)
            number = max(numbered_runs(config.name), default=0) + 1
            while True:
                try:
                    out = RUNS / f"{config.name}-{number}"
                    out.mkdir()
                    break
                except FileExistsError:  # another process was faster
                    number += 1
            self.lock(out)
        else:
            out = Path(config.out)
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunError(f"--out {out} cannot be made ({error.strerror})") from None
            self.lock(out)
            if (out / "config.json").exists():
                raise RunError(f"{out} already holds a run: continue it with --resume, or choose another --out")
        versions = {"nanorl": __version__, "torch": torch.__version__, "python": platform.python_version()}
        options = dataclasses.asdict(config) | {"out": str(out), "resume": False}  # what --resume changed stays
        about = {"options": options, "versions": versions, "command": sys.argv}
        if config.resume:  # what started the run stays; each start after it is added
            first = json.loads((out / "config.json").read_text())
            about = {**first, "options": options, "resumed": [*first.get("resumed", []), sys.argv]}
        write_json(out / "config.json", about)
        return out

    def lock(self, out: Path) -> None:
        """One process a folder; the lock goes with the process, however it ends."""
        if fcntl is None:
            return
        self.locked = open(out / "lock", "w")
        try:
            fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"another process is using {out}: wait for it, or choose another --out") from None

    def __enter__(self) -> Run:
        def stop(number, frame):
            if self.interrupted:  # the second time: at once
                raise KeyboardInterrupt
            self.interrupted = True
            os.write(2, b"\nstopping after this step (once more: at once) ...\n")  # print may be what it interrupts

        self.handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread: leave them alone
                self.handlers[number] = signal.signal(number, stop)
        self.say(f"writing to {self.out}")
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if fcntl is not None:
            self.locked.close()

    # ---- the loop

    def track(self, *optimizers: Optimizers, **models: nn.Module) -> None:
        """What a checkpoint holds. When resuming, fills all of it from the newest one."""
        self.models, self.optimizers = models, optimizers
        if not self.resuming:
            return
        state = self.newest_state()
        if state is None:
            self.keep_lines_before(0)
            return
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        checkpoint.set_random_state(state["random"])
        self.start, self.results, self.seconds = state["step"], state["results"], state["seconds"]
        self.keep_lines_before(self.start)
        (self.out / "summary.json").unlink(missing_ok=True)  # of an end that is no longer the end
        self.say(f"resumed at step {self.start}")

    def newest_state(self) -> dict | None:
        """Of the newest checkpoint that can be read, whose weights are then in the models."""
        damaged: list[Path] = []
        for path in reversed(checkpoint.complete(self.out / "checkpoint")):
            try:
                state = checkpoint.load(path, self.models)
                if not isinstance(state, dict) or not state.keys() >= SAVED:
                    raise RunError(f"{path} is damaged (training.pt holds another state)")
            except RunError as error:
                self.say(f"{error}: looking for an older one")
                damaged.append(path)
                continue
            for old in damaged:  # not before: where nothing could be read, the fault may lie elsewhere
                old.rename(old.with_name(f"{checkpoint.PARTIAL}_damaged_{old.name}"))  # makes room for a whole one
            return state
        if damaged:
            raise RunError(f"no checkpoint in {self.out} could be read: start a new run with another --out")
        return None

    @property
    def has_checkpoint(self) -> bool:
        """Whether `track` will restore the models, so that a warm start would be in vain."""
        return self.resuming and checkpoint.latest(self.out / "checkpoint") is not None

    def steps(self) -> Iterator[int]:
        """The steps still to do. Saves before the first one, every `save_every`, at the end and when interrupted,
        always before the loop's body runs for the next step: a crash there (in an evaluation, say) loses nothing."""
        total = self.config.steps
        if self.start == 0:
            self.save(0)
        with tqdm(total=total, initial=self.start, disable=None, unit="step") as self.bar:
            for step in range(self.start, total):
                self.step_seconds, self.step_began = {}, time.perf_counter()
                yield step
                self.bar.update()
                done = step + 1
                if self.interrupted or done == total or done % self.config.save_every == 0:
                    self.save(done)
                self.stop_if_interrupted(f"saved at step {done} of {total}")

    def stop_if_interrupted(self, where: str) -> None:
        if self.interrupted:
            command = shlex.join(["python", sys.argv[0], "--out", str(self.out), "--resume"])
            raise Interrupted(f"{where}. Continue with: {command}")

    def save(self, step: int) -> None:
        state = {
            "step": step,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": checkpoint.random_state(),
            "results": self.results,
            "seconds": self.seconds_so_far(),
        }
        checkpoint.save(self.out / "checkpoint", step, self.models, state)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds spent inside under `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self.step_seconds[name] = self.step_seconds.get(name, 0.0) + spent

    def seconds_so_far(self) -> dict[str, float]:
        return self.seconds | {"total": self.seconds.get("total", 0.0) + time.perf_counter() - self.began}

    # ---- what is written and shown

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """One line of metrics.jsonl; a line on the console now and then. Floats that are not finite become null."""
        spent = time.perf_counter() - self.step_began
        self.seconds["train"] = self.seconds.get("train", 0.0) + spent - self.step_seconds.get("eval", 0.0)
        seconds = {name: round(value, 6) for name, value in self.step_seconds.items()} | {"step": round(spent, 6)}
        skipped = sum(optimizer.skipped for optimizer in self.optimizers)
        line = {"step": step, **metrics, "skipped_updates": skipped, "seconds": seconds}
        with open(self.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(plain(line)) + "\n")
        shown = {name: metrics[name] for name in SHOWN if metrics.get(name) is not None}
        called = {"reward": "proxy"} if "gold" in metrics else {}  # where nothing is verified, that is the reward
        text = "  ".join(f"{called.get(name, name)} {value:.3g}" for name, value in shown.items())
        self.bar.set_postfix_str(text)
        if step % max(1, self.config.steps // 10) == 0 or step == self.config.steps - 1:
            self.say(f"step {step + 1:4d}/{self.config.steps}  {text}  {spent:.2f} s")

    def evaluate(self, step: int, examine: Callable[[int], dict]) -> dict:
        """{"eval": examine(step)} every `eval_every` steps, {} otherwise; the first is the summary's eval_before."""
        if step % self.config.eval_every:
            return {}
        with self.phase("eval"):
            found = examine(step)
        self.results.setdefault("eval_before", found)
        return {"eval": found}

    def reporter(self, what: str, total: int) -> Callable[[int, float], None]:
        """For loops before the run's own steps: shows their loss now and then, and lets Ctrl-C through."""

        self.say(f"{what}: {total} steps" + (", from its beginning" if self.resuming else ""))

        def report(step: int, loss: float) -> None:
            if (step + 1) % max(1, total // 10) == 0:
                self.say(f"{what} {step + 1:4d}/{total}  loss {loss:.3f}")
            self.stop_if_interrupted(f"stopped in the {what}, which a resumed run does again")

        return report

    def keep_lines_before(self, step: int) -> None:
        """Drop what was logged after the checkpoint that is being resumed; the steps will be taken again."""
        path = self.out / "samples.txt"
        if path.exists():
            blocks = re.split(r"(?m)^(?=--- after \d+ steps$)", path.read_text(errors="replace"))
            write_atomically(path, "".join(block for block in blocks if block and int(block.split()[2]) < step))
        path = self.out / "metrics.jsonl"
        if path.exists():
            kept = [line for line in read_lines(path) if line["step"] < step]
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))

    def samples(self, step: int, lines: list[str], shown: int = 2) -> None:
        """Append responses to samples.txt and show a few, from different prompts."""
        with open(self.out / "samples.txt", "a") as file:
            file.write(f"--- after {step} steps\n" + "\n".join(lines) + "\n")
        for line in lines[:: max(1, len(lines) // shown)][:shown]:
            self.say("    " + line)

    def say(self, text: str) -> None:
        tqdm.write(text)
        sys.stdout.flush()  # into a pipe or a file as well

    def finish(self, **results: Any) -> dict:
        """summary.json: evaluations, seconds by phase, seed."""
        self.results |= results
        seconds = {name: round(value, 3) for name, value in self.seconds_so_far().items()}
        summary = plain(self.results | {"seconds": seconds, "seed": self.config.seed, "steps": self.config.steps})
        write_json(self.out / "summary.json", summary)
        return summary


def plain(value: Any) -> Any:
    """JSON has no NaN, no infinity and no tensors: the first two become null."""
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_lines(path: Path) -> list[dict]:
    """Of metrics.jsonl; what a kill or a full disk left of a line is passed over."""
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and "step" in line:
                lines.append(line)
    return lines


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    beside = path.with_name(f".partial_{path.name}")
    beside.write_text(text)
    os.replace(beside, path)
