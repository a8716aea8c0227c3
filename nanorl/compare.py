"""Algorithms, options and losses of your own against each other, over several paired seeds:

    python -m nanorl.compare grpo dapo my_loss.py:my_loss --quick
    python -m nanorl.compare grpo "gspo --epochs 4" --seeds 5 --steps 80 -- --group-size 16

A variant is a row of nanorl/algorithms.py or a FILE.py:FUNCTION (nanorl/own_loss.py), in quotes with options of
train_grpo.py behind it; what stands behind `--` holds for all of them. Each seed of each variant is a run of
train_grpo.py in a process of its own. The same command goes on where it was interrupted, and runs nothing twice: a
finished run serves as long as its options, its loss and the code around the loss are the same.

Leaves compare.png (mean and 95 % interval of accuracy, length, entropy and KL, against steps and against seconds),
compare.md (final values, and paired differences to the first variant) and compare.json (all of the numbers).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nanorl import advantages, algorithms, batch_metrics, evaluation, kl, losses, own_loss, sampler, sft
from nanorl.algorithms import ALGORITHMS
from nanorl.errors import Interrupted, RunError
from nanorl.losses import surrogate
from nanorl.options import RUNS, at_least, choose, command_line
from nanorl.paired import draw, read_course, summarize, tables
from nanorl.processes import SCRIPT, Job, cores, run_all
from nanorl.rewards import overlong
from nanorl.run import write_atomically
from nanorl.tasks import PREFERENCE_TASKS, chain, free_length, reviews, task

USUAL = ["--eval-every", "10"]  # often enough for the curve, and for the steps to a target
QUICK = ["--steps", "40", "--eval-every", "5", "--eval-problems", "256"]
QUICK_SEEDS = 2
# What decides a run besides its options, its script and its loss.
AROUND = (*sft.CODE, advantages, algorithms, batch_metrics, evaluation, kl, sampler, surrogate, overlong)
AROUND += (task, chain, free_length, reviews)


@dataclass
class Config:
    """Options of nanorl.compare."""

    variants: Annotated[list[str], tyro.conf.Positional]
    """Algorithms, or own losses FILE.py:FUNCTION; in quotes with options of train_grpo.py. The others are compared with
    the first."""
    seeds: int | None = None
    """Of each variant: 0, 1, 2, ... Default: 5, with --quick 2."""
    steps: int | None = None
    """Updates of each run. Default: that of train_grpo.py, with --quick 40."""
    quick: bool = False
    """Fewer seeds and steps, a smaller evaluation: two variants in under two minutes on two cores. It shows large
    effects."""
    target: float = 0.9
    """Accuracy of which the steps and seconds to it are counted."""
    out: str = str(RUNS / "compare")
    """Folder for the runs and the results."""
    processes: int | None = None
    """Runs at a time. Default: as many as there are cores."""


@dataclass(frozen=True)
class Variant:
    label: str  # as it was given
    arguments: tuple[str, ...]  # of train_grpo.py
    name: str  # of its runs' folders: label, and a digest of all that decides a run


def make_variant(label: str, common: Sequence[str]) -> Variant:
    """Raises RunError for an algorithm or a file that is not there."""
    try:
        what, *options = shlex.split(label)
    except ValueError as error:
        raise RunError(f"the variant {label!r} cannot be read: {error}") from None
    code = [inspect.getsourcefile(module) for module in AROUND]
    if ".py:" in what:
        own_loss.load(what)
        code += [what.rpartition(":")[0], *sorted(Path(losses.__file__).parent.glob("*.py"))]  # it may call any of them
        options = ["--loss", what, *options]
    else:
        code.append(inspect.getsourcefile(inspect.unwrap(choose("algo", what, ALGORITHMS).loss)))
        options = ["--algo", what, *options]
    for option in [option.partition("=")[0] for option in [*common, *options]]:
        if option in ("--seed", "--out", "--resume"):
            raise RunError(f"{option} is given to each run by the comparison: leave it away")
    arguments = [*common, *options]  # of an option given twice, the last counts
    if re.search(rf"--task[ =]({'|'.join(PREFERENCE_TASKS)})\b", " ".join(arguments)):
        raise RunError("the comparison is of accuracy, which nobody can verify there: see python -m nanorl.frontier")
    slug = re.sub(r"[^\w.-]+", "_", label)[:40].strip("_.-")
    return Variant(label, tuple(arguments), f"{slug}-{digest_of(arguments, [SCRIPT, *code])}")


def digest_of(arguments: Sequence[str], code: Sequence[str | Path]) -> str:
    """Eight digits that change with the arguments and with what the code means."""
    digest = hashlib.sha256(repr(list(arguments)).encode())
    for path in code:
        digest.update(meaning(Path(path).read_text()).encode())
    return digest.hexdigest()[:8]


@functools.cache
def meaning(source: str) -> str:
    """Of Python code: without comments, docstrings and layout, whose changes change no run."""

    class WithoutTexts(ast.NodeTransformer):
        def visit_Expr(self, node):
            return None if isinstance(node.value, ast.Constant) else node

    return ast.dump(WithoutTexts().visit(ast.parse(source)))


def share_warm_starts(out: Path) -> None:
    """Those of the runs in runs/ serve here too."""
    (out / "warm_starts").mkdir(parents=True, exist_ok=True)
    for path in (RUNS / "warm_starts").glob("*.safetensors"):
        with suppress(OSError):  # there already, or no links here: then it is made again
            os.link(path, out / "warm_starts" / path.name)


def main(config: Config, options: Sequence[str] = ()) -> list[dict]:
    """`options`: of train_grpo.py, for all variants. Returns what compare.json holds of each variant."""
    at_least(config, seeds=1, steps=1, target=0, processes=1)
    if not config.variants:
        raise RunError("nothing to compare: name algorithms or own losses, grpo my_loss.py:my_loss say")
    if len(set(config.variants)) < len(config.variants):
        raise RunError("a variant is named twice: its runs are the same")
    common = [*(QUICK if config.quick else USUAL), *options]
    common += ["--steps", str(config.steps)] if config.steps else []
    seeds = range(config.seeds or (QUICK_SEEDS if config.quick else 5))
    variants = [make_variant(label, common) for label in config.variants]
    out = Path(config.out)
    share_warm_starts(out)
    jobs = {v.label: [Job(v.label, s, out / f"{v.name}-seed-{s}", v.arguments) for s in seeds] for v in variants}
    at_once = config.processes or cores()
    try:
        run_all([job for of_one in jobs.values() for job in of_one], at_once, say)
    except KeyboardInterrupt:
        raise Interrupted("stopped; every run is saved, and the same command goes on") from None
    result = summarize(
        {label: [read_course(job.out) for job in of_one] for label, of_one in jobs.items()}, config.target
    )
    for variant, found in zip(variants, result, strict=True):
        found |= {"arguments": variant.arguments, "runs": [job.out.name for job in jobs[variant.label]]}
    command = command_of(config, options)
    write_numbers(out / "compare.json", {"command": command, "seeds": list(seeds), "variants": result})
    notes = f"Mean ± half the 95 % interval over {len(seeds)} seeds; -: never reached, or not logged."
    text = f"{tables(result)}\n\n{notes}\n`{command}`\n"
    (out / "compare.md").write_text(text)
    picture = draw(result, out / "compare.png", f"Mean and 95 % interval of {len(seeds)} seeds. Drawn by: {command}")
    say(f"\n{text}\nnumbers and picture: {out / 'compare.json'}, {picture}")
    return result


def command_of(config: Config, options: Sequence[str]) -> str:
    """That does the same again."""
    given = ["python", "-m", "nanorl.compare", *config.variants, *given_options(config)]
    return shlex.join([*given, *(["--", *options] if options else [])])


def given_options(config) -> list[str]:
    """The options that are not at their default, as on a command line."""
    given = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is not dataclasses.MISSING and value != field.default:
            values = [] if value is True else value if isinstance(value, tuple) else [value]
            given += ["--" + field.name, *map(str, values)]
    return given


def write_numbers(path: Path, numbers: dict) -> None:
    """As JSON, a list of numbers on one line, so that the file can be read and committed."""
    text = json.dumps(numbers, indent=1, allow_nan=False)
    write_atomically(path, re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")


def say(text: str) -> None:
    print(text, flush=True)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Own options, and behind the first `--` those of train_grpo.py."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


if __name__ == "__main__":
    own, passed_on = split(sys.argv[1:])
    command_line(Config, __doc__, lambda config: main(config, passed_on), own)
