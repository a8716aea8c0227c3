"""The command line: a typed dataclass becomes the options; what is wrong with them is said before any work is done."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import tyro

from nanorl.errors import Interrupted, RunError
from nanorl.model import GPTConfig
from nanorl.tasks.task import Task

RUNS = Path("runs")  # where folders without a name of their own go
# Options a resumed run may give anew.
CHANGEABLE = {"out", "resume", "steps", "save_every", "eval_every", "micro_batch", "device"}
MAX_SEED = 2**63 - 1  # the sampler and torch take signed 64-bit integers
MAX_RATE = 1.0  # of learning: an update would be larger than the weights
MAX_WEIGHT = 1e6  # of a term of loss or reward: what stands beside it would be lost in rounding
MIN_CLIP = 1e-4  # of a ratio: with less, rounding decides whether a token learns
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
Config = TypeVar("Config")


def command_line(config_class: type[Config], description: str | None, main, argv: list[str] | None = None) -> None:
    """Parse the options, call main(config), turn what goes wrong into a message and an exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        main(parse(config_class, description, argv))
    except Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        sys.exit(130)  # the shell's status for Ctrl-C
    except KeyboardInterrupt:
        print("stopped at once; --resume goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    except (RunError, OSError) as error:  # of the second kind: a full disk, a folder that may not be written
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def parse(config_class: type[Config], description: str | None, argv: list[str]) -> Config:
    """Options as a `config_class`. With --resume, options not given are those the run was started with."""
    config = tyro.cli(config_class, args=argv, description=description)
    if getattr(config, "out", None) == "":
        raise RunError("--out is empty: name a folder, or leave it away")
    if not getattr(config, "resume", False):
        return config
    out = Path(config.out) if config.out else newest_run(config.name)
    if not (out / "config.json").exists():
        raise RunError(f"nothing to resume: {out} holds no run (no config.json)")
    known = {field.name: field.default for field in dataclasses.fields(config_class)}
    try:
        saved = json.loads((out / "config.json").read_text())["options"]
        saved = {k: tuple(v) if isinstance(known[k], tuple) else v for k, v in saved.items() if k in known}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunError(f"{out / 'config.json'} is damaged: it holds the options the run was started with") from None
    started = config_class(**saved | {"out": str(out), "resume": True})
    config = tyro.cli(config_class, args=argv, description=description, default=started)
    changed = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(started, f.name)]
    fixed = [name for name in changed if name not in CHANGEABLE]
    if fixed:
        raise RunError(
            f"a resumed run keeps its options, but {', '.join(map(flag, fixed))} "
            f"differs from {out / 'config.json'}: leave it away, or start a new run with another --out"
        )
    return config


def choose(option: str, value: str, choices) -> Any:
    """choices[value], or an error that lists them."""
    if value not in choices:
        raise RunError(f"--{option} {value} is unknown: choose one of {', '.join(choices)}")
    return choices[value]


def at_least(config, **minimum: float) -> None:
    """Each named option, where given, is a finite number that is not below its minimum."""
    for name, least in minimum.items():
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value >= least):
            raise RunError(f"{flag(name)} must be at least {least}, not {value}")


def at_most(config, **maximum: float) -> None:
    """Each named option, where given, is not above its maximum."""
    for name, most in maximum.items():
        value = getattr(config, name)
        if value is not None and value > most:
            raise RunError(f"{flag(name)} must be at most {most}, not {value}")


def check_common(config) -> None:
    """The range of the options that every training script has."""
    at_least(config, seed=0, steps=1, micro_batch=1, max_new_tokens=1, learning_rate=0, warm_start_steps=0)
    at_least(config, eval_every=1, save_every=1)
    at_most(config, seed=MAX_SEED, beta=MAX_WEIGHT, learning_rate=MAX_RATE)


def excludes(config, option: str, *names: str) -> None:
    """None of the named options differs from its default: beside `option` it would do nothing."""
    idle = [name for name in names if getattr(config, name) != getattr(type(config)(), name)]
    if idle:
        raise RunError(f"{', '.join(map(flag, idle))} would do nothing beside {flag(option)}: leave one of them away")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@contextlib.contextmanager
def checking_options() -> Iterator[None]:
    """Inside, a ValueError is about the options: shown as a message."""
    try:
        yield
    except ValueError as error:
        raise RunError(str(error)) from None


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda"):  # mps has no float64, which the sampler needs
        raise RunError(f"--device {name} is unknown: choose one of auto, cpu, cuda")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RunError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0]}): try --device cpu"
        ) from None
    return device


def policy_shape(task: Task, size: tuple[int, int, int], max_new_tokens: int) -> GPTConfig:
    """Of a policy of this width, layers and heads that can read the task's prompts and write that much behind them."""
    width, layers, heads = size
    with checking_options():
        return GPTConfig(
            vocab_size=task.tokenizer.vocab_size,
            width=width,
            layers=layers,
            heads=heads,
            max_context=task.max_prompt_tokens + max(max_new_tokens, task.max_new_tokens),
        )


def describe_machine(model: torch.nn.Module) -> str:
    """How large the model is and where it runs, for the console."""
    weights = sum(weight.numel() for weight in model.parameters())
    where = next(model.parameters())
    threads = f", {torch.get_num_threads()} thread(s)" if where.device.type == "cpu" else ""
    return f"{weights / 1e6:.2f} M weights in {str(where.dtype).removeprefix('torch.')} on {where.device}{threads}"


def describe_memory(**models: torch.nn.Module) -> str:
    """What each model's weights take, and with gradients and the optimizer's moments those that learn (two moments are
    counted: Muon keeps one; for bfloat16 all three, and the masters, are float32), in MB."""
    parts = []
    for name, model in models.items():
        count, each = sum(weight.numel() for weight in model.parameters()), next(model.parameters()).element_size()
        size, whole = each * count / 1e6, (18 if each == 2 else 4 * each) * count / 1e6  # 18: 2, and 4 times 4 beside
        learns = any(weight.requires_grad for weight in model.parameters())
        whole = f"{whole:.1f} MB ({size:.1f} of weights, with gradients and moments)" if learns else f"{size:.1f} MB"
        parts.append(f"{name.replace('_', ' ')} {whole}")
    return "memory: " + ", ".join(parts)


def seed_generators(seed: int) -> None:
    """Python's, NumPy's and torch's: torch's makes the weights, a reward may use any of them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # all it takes
    torch.manual_seed(seed)


def cpu_threads() -> int:
    """OMP_NUM_THREADS, which may be a list for nested regions; 1 by default: small models gain nothing from more."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1


def numbered_runs(name: str) -> dict[int, Path]:
    """The folders runs/NAME-N by their N."""
    numbers = {path: path.name.removeprefix(f"{name}-") for path in RUNS.glob(f"{name}-*")}
    return {int(number): path for path, number in numbers.items() if number.isdecimal()}


def newest_run(name: str) -> Path:
    runs = numbered_runs(name)
    if not runs:
        raise RunError(f"nothing to resume: there is no run {RUNS / name}-N here; name its folder with --out")
    return runs[max(runs)]
