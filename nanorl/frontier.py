"""What each way of learning from preferences gets for the KL it spends, and how it looks when nothing holds it back:

    python -m nanorl.frontier                     30 runs, about an hour on two cores
    python -m nanorl.frontier --seeds 5 --betas 0.03 0.1 0.3 1
    python -m nanorl.frontier --quick             tiny models, to see whether everything runs

For each seed one run of train_ppo.py trains the reward model. Against it learn PPO (for every beta, and with beta 0),
GRPO, and best-of-n, which trains nothing: sample n responses, keep the one that the reward model likes best. DPO learns
from the pairs that the reward model was trained on. All runs of a seed start from the same policy. The same command
goes on where it was interrupted, and runs nothing twice.

Leaves frontier.png (gold against KL; gold and proxy against steps without KL), frontier.md and frontier.json.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from nanorl import preferences, reward_model
from nanorl.best_of_n import best_of_n
from nanorl.compare import AROUND, digest_of, given_options, say, share_warm_starts, write_numbers
from nanorl.errors import Interrupted, RunError
from nanorl.intervals import mean_and_half
from nanorl.losses import bradley_terry, dpo, grpo, ppo
from nanorl.options import MAX_WEIGHT, RUNS, at_least, command_line
from nanorl.paired import estimate, plus_minus, round_off, table
from nanorl.plots import evaluations, read_metrics, save
from nanorl.processes import SCRIPT, Job, cores, run_all

SCRIPTS = {"PPO": "train_ppo.py", "GRPO": "train_grpo.py", "DPO": "train_dpo.py"}
COLORS = {"PPO": "tab:blue", "GRPO": "tab:orange", "DPO": "tab:green", "best-of-n": "tab:red"}
# What decides a run besides its options and its script.
CODE = (*AROUND, bradley_terry, dpo, grpo, ppo, preferences, reward_model)
POOL, QUICK_POOL = 512, 64  # responses to each prompt that best-of-n chooses from
NS = [2**i for i in range(7)]
TINY = "--size 16 1 2 --warm-start-steps 20 --steps 4 --eval-every 2 --eval-problems 32 --max-new-tokens 12".split()
QUICK = {
    "PPO": [*TINY, "--prompts", "16"],
    "GRPO": [*TINY, "--prompts", "4", "--group-size", "4"],
    "DPO": [*TINY, "--pairs", "200", "--batch", "16"],
}
QUICK_TEACHER = ["--pairs", "200", "--reward-model-steps", "10"]
NUMBERS = {"kl": "KL (nats a response)", "gold": "gold", "proxy": "proxy", "mean_length": "length (tokens)"}


@dataclass
class Config:
    """Options of nanorl.frontier."""

    seeds: int = 3
    """Of each setting: 0, 1, 2, ..."""
    betas: tuple[float, ...] = (0.05, 0.1, 0.3)
    """Weights of the KL, each for PPO, GRPO and DPO."""
    quick: bool = False
    """Tiny models and a few steps: whether it runs, not what it finds."""
    out: str | None = None
    """Folder for the runs and the results. Default: runs/frontier, with --quick runs/frontier-quick."""
    processes: int | None = None
    """Runs at a time. Default: as many as there are cores."""

    @property
    def folder(self) -> Path:
        return Path(self.out or RUNS / ("frontier-quick" if self.quick else "frontier"))


Runs = dict[tuple[str, float], list[Job]]  # (method, beta) -> a run for each seed


def plan(config: Config) -> Runs:
    """All runs, in the order they are made. Those of the first setting train the reward models."""
    found: Runs = {}
    teachers: list[Job] = []
    settings = [("PPO", beta) for beta in (*config.betas, 0.0)]
    settings += [(method, beta) for method in ("DPO", "GRPO") for beta in config.betas]
    for method, beta in settings:
        script = SCRIPT.with_name(SCRIPTS[method])
        arguments = ["--beta", f"{beta:g}", *(QUICK[method] if config.quick else [])]
        arguments += ["--task", "reviews"] if method == "GRPO" else []
        arguments += QUICK_TEACHER if config.quick and not teachers else []
        taught = bool(teachers) and method != "DPO"
        name = digest(script, [*arguments, teachers[0].out.name if taught else ""])
        found[method, beta] = []
        for seed in range(config.seeds):
            out = config.folder / f"{method.lower()}-beta-{beta:g}-{name}-seed-{seed}"
            reward = ["--reward", f"rm:{teachers[seed].out}"] if taught else []
            job = Job(f"{method}, beta {beta:g}", seed, out, (*arguments, *reward), script)
            found[method, beta].append(job)
        teachers = teachers or found[method, beta]
    return found


def digest(script: Path, arguments: Sequence[str]) -> str:
    """Changes with all that decides a run."""
    return digest_of(arguments, [*(inspect.getsourcefile(module) for module in CODE), script])


# ---- what came out


def points_of(runs: Runs, pool: int) -> list[dict]:
    """Of each setting: method, beta or n, and each of NUMBERS as mean, half its interval and values of the seeds."""

    def point(method: str, setting: str, found: Sequence[dict]) -> dict:
        numbers = {name: estimate([one[name] for one in found if name in one]) for name in NUMBERS}
        return {"method": method, "setting": setting} | numbers

    points = []
    for (method, beta), jobs in runs.items():
        found = [json.loads((job.out / "summary.json").read_text())["eval_after"] for job in jobs]
        if method == "DPO":  # its proxy is the reward that it implies, another scale
            found = [{name: value for name, value in one.items() if name != "proxy"} for one in found]
        points.append(point(method, f"beta {beta:g}", found))
    teachers = next(iter(runs.values()))
    by_n = zip(*(best_of_n(job.out, NS, pool) for job in teachers), strict=True)
    return points + [point("best-of-n", f"n = {n}", found) for n, found in zip(NS, by_n, strict=True)]


def course_of(jobs: Sequence[Job]) -> dict:
    """Evaluations as training goes on: steps; mean, half its interval and values by seed of each of NUMBERS."""
    courses = [evaluations(job.out, read_metrics(job.out)) for job in jobs]
    course: dict = {"steps": [step for step, _ in courses[0]]}
    for name in NUMBERS:
        values = [[found[name] for _, found in of_seed] for of_seed in courses]
        mean, half = (x.tolist() for x in mean_and_half(values))
        rows = {"mean": mean, "half": half}
        course[name] = {key: [round_off(x) for x in row] for key, row in rows.items()}
        course[name]["values"] = [[round_off(x) for x in row] for row in values]
    return course


def markdown(points: Sequence[dict]) -> str:
    rows = [["method", "setting", *NUMBERS.values()]]
    rows += [[p["method"], p["setting"], *(plus_minus(p[name]) for name in NUMBERS)] for p in points]
    return table(rows)


def finding(points: Sequence[dict]) -> str:
    best = {}
    for point in points:
        if point["method"] not in best or point["gold"]["mean"] > best[point["method"]]["gold"]["mean"]:
            best[point["method"]] = point
    shown = (f"{name} {p['gold']['mean']:.2f} at {p['kl']['mean']:.1f} nats" for name, p in best.items())
    return "Highest gold: " + ", ".join(shown)


def draw(points: Sequence[dict], course: dict, path: Path, caption: str) -> Path:
    """Left gold against KL, right gold and proxy against steps of PPO without KL: means and 95 % intervals."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2))
    draw_frontier(left, points, course)
    draw_course(right, course)
    figure.suptitle(finding(points))
    return save(figure, path, caption)


def draw_frontier(axes, points: Sequence[dict], course: dict) -> None:
    """Gold against KL: a line a method, and the way of PPO with beta 0, which leaves the picture."""
    held = [point for point in points if (point["method"], point["setting"]) != ("PPO", "beta 0")]
    for method, color in COLORS.items():
        line = sorted((p for p in held if p["method"] == method), key=lambda p: p["kl"]["mean"])
        if not line:
            continue
        kl, gold = ([p[name]["mean"] for p in line] for name in ("kl", "gold"))
        halves = [[p[name]["half"] or 0.0 for p in line] for name in ("gold", "kl")]
        label = "GRPO on the reward model" if method == "GRPO" else method
        axes.errorbar(kl, gold, *halves, color=color, marker="o", ms=4, lw=1.5, elinewidth=0.8, label=label)
        for x, y, point in zip(kl, gold, line, strict=True):
            text = point["setting"].removeprefix("beta ").removeprefix("n = ")
            axes.annotate(text, (x, y), (4, -11), textcoords="offset points", color=color, fontsize=8)
    axes.plot(course["kl"]["mean"], course["gold"]["mean"], ":", color="0.4", label="PPO with beta 0, as it trains")
    far = max(p["kl"]["mean"] + (p["kl"]["half"] or 0.0) for p in held)
    golds = [p["gold"]["mean"] for p in held]
    room = 0.25 * (max(golds) - min(golds)) + 0.1
    axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axes.set(xlim=(0, 1.2 * far), ylim=(min(golds) - room, max(golds) + room))
    axes.set(xlabel="KL to the warm start (nats a response, square-root axis)", ylabel="gold on held-out prompts")
    axes.set_title("Points: beta, or n of best-of-n (its KL an upper bound)", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)


def draw_course(axes, course: dict) -> None:
    """Gold and proxy as training goes on: seeds thin, their mean and interval."""
    for name, color in (("proxy", "tab:blue"), ("gold", "tab:orange")):
        mean, half = (np.array(course[name][key], float) for key in ("mean", "half"))
        axes.plot(course["steps"], mean, color=color, marker="o", ms=3, label=name)
        axes.fill_between(course["steps"], mean - half, mean + half, color=color, alpha=0.12, lw=0)
        axes.plot(course["steps"], np.transpose(course[name]["values"]), color=color, lw=0.7, alpha=0.7)
    axes.set(xlabel="step of PPO with beta 0", ylabel="score on held-out prompts")
    axes.set_title("Proxy: what is trained on. Gold: what is wanted", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=8)


def main(config: Config) -> dict:
    """Returns what frontier.json holds."""
    at_least(config, seeds=1, processes=1)
    written = {f"{beta:g}" for beta in config.betas if 1e-6 <= beta <= MAX_WEIGHT and float(f"{beta:g}") == beta}
    if not config.betas or len(written) < len(config.betas):
        raise RunError(
            f"--betas takes different numbers from 1e-6 to {MAX_WEIGHT:g} of at most six digits, got "
            f"{', '.join(map(str, config.betas))}; PPO with beta 0 is always run"
        )
    out = config.folder
    share_warm_starts(out)
    runs = plan(config)
    try:
        run_all([job for jobs in runs.values() for job in jobs], config.processes or cores(), say)
        points = points_of(runs, QUICK_POOL if config.quick else POOL)
    except KeyboardInterrupt:
        raise Interrupted("stopped; every run is saved, and the same command goes on") from None
    course = course_of(runs["PPO", 0.0])
    command = shlex.join(["python", "-m", "nanorl.frontier", *given_options(config)])
    names = {f"{method}, beta {beta:g}": [job.out.name for job in jobs] for (method, beta), jobs in runs.items()}
    result = {"command": command, "seeds": config.seeds, "runs": names, "points": points, "course": course}
    write_numbers(out / "frontier.json", result)
    notes = f"Mean ± half the 95 % interval over {config.seeds} seeds. The KL of best-of-n is an upper bound. "
    notes += "PPO alone pays for a response that is cut off."
    text = f"{markdown(points)}\n\n{notes}\n`{command}`\n"
    (out / "frontier.md").write_text(text)
    caption = f"Mean and 95 % interval of {config.seeds} seeds. Drawn by: {command}"
    picture = draw(points, course, out / "frontier.png", caption)
    say(f"\n{text}\nnumbers and picture: {out / 'frontier.json'}, {picture}")
    return result


if __name__ == "__main__":
    command_line(Config, __doc__, main)
