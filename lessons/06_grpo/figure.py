"""Draws the figure of lesson 06 from real runs, and writes their table into README.md.

    python lessons/06_grpo/figure.py

Runs what is missing first: five seeds of train_grpo.py with its defaults, examined every 5 steps instead of every 20
(examining changes nothing in a run). About a minute a seed on two free cores. Everything is kept in runs/lesson_06.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # train_grpo.py, and nanorl if it is not installed

import train_grpo
from nanorl import checkpoint
from nanorl.evaluation import EVAL_SEED
from nanorl.model import GPT
from nanorl.options import policy_shape
from nanorl.plots import GREEDY, SAMPLED, evaluations, read_metrics, save
from nanorl.sampler import Sampler
from nanorl.sft import cached_warm_start
from nanorl.tasks import TASKS

ROOT = Path(train_grpo.__file__).resolve().parent
RUNS = ROOT / "runs" / "lesson_06"
SEEDS = range(5)
T_95 = 2.776  # Student's t at 0.975 with 4 degrees of freedom
EVAL_EVERY = 5
COMMAND = "python lessons/06_grpo/figure.py"
STARTS = {"<": "to think", ">": "to answer at once"}  # the first token decides


def run(seed: int) -> Path:
    """The folder of that seed's run, made now if it is missing or unfinished."""
    out = RUNS / f"seed_{seed}"
    wanted = train_grpo.Config(seed=seed, out=str(out), eval_every=EVAL_EVERY)
    if (out / "config.json").exists():
        saved = json.loads((out / "config.json").read_text())["options"]
        ignored = {"out", "resume"}
        changed = [k for k, v in dataclasses.asdict(wanted).items() if k not in ignored and saved.get(k) != v]
        if changed:
            sys.exit(f"{out} was run with other options ({', '.join(changed)}): remove it and start again")
    if not (out / "summary.json").exists():
        options = ["--seed", str(seed), "--out", str(out), "--eval-every", str(EVAL_EVERY)]
        options += ["--resume"] if (out / "config.json").exists() else []
        subprocess.run([sys.executable, "train_grpo.py", *options], cwd=ROOT, check=True)
    return out


@torch.no_grad()
def accuracy_by_start(out: Path, seed: int) -> dict[str, dict[str, float]]:
    """{"before" | "after": {"<" | ">": accuracy}} on the held-out problems, sampled at temperature 1, when the
    response's first token is given: made to think, or made to answer at once."""
    path = out / "accuracy_by_start.json"
    if path.exists():
        return json.loads(path.read_text())
    config = train_grpo.Config(seed=seed)
    task = TASKS[config.task]()
    torch.manual_seed(seed)
    policy = GPT(policy_shape(task, config.size, task.max_new_tokens))
    problems = task.held_out_problems(config.eval_problems)

    def accuracies() -> dict[str, float]:
        found = {}
        for start in STARTS:
            prompts = [task.tokenizer.encode_prompt(p.prompt) + task.tokenizer.encode(start) for p in problems]
            rollout = Sampler(policy).generate(
                prompts, max_new_tokens=task.max_new_tokens - 1, stop_ids=[task.tokenizer.eos_id], seed=EVAL_SEED
            )
            texts = rollout.texts(task.tokenizer)
            right = [task.reward(problem, start + text) for problem, text in zip(problems, texts, strict=True)]
            found[start] = sum(right) / len(right)
        return found

    with torch.enable_grad():  # the warm start is the run's own unless the code has changed since
        cached_warm_start(policy, task, RUNS / "warm_starts", steps=task.warm_start_steps, seed=seed)
    result = {"before": accuracies()}
    policy.load_state_dict(load_file(checkpoint.latest(out / "checkpoint") / "policy.safetensors"))
    result["after"] = accuracies()
    path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def mean_and_half(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(seeds, points) -> mean and half width of its 95 % interval over seeds, (points,) each."""
    return values.mean(0), T_95 * values.std(0) / len(values) ** 0.5


def curve(axes, x: list[int], values: torch.Tensor, color: str, label: str | None = None) -> None:
    """Each seed thin, the mean thick with its interval. values (seeds, points)."""
    mean, half = mean_and_half(values)
    axes.plot(x, values.T, color=color, lw=0.7, alpha=0.5)
    axes.plot(x, mean, color=color, lw=2, label=label)
    low, high = mean - half, mean + half
    if values.max() <= 1:  # a share
        low, high = low.clamp(min=0), high.clamp(max=1)
    axes.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    axes.set(xlabel="step (updates)")
    axes.grid(alpha=0.3)


def draw(path: Path) -> None:
    outs, starts = [], []
    for seed in SEEDS:
        outs.append(run(seed))
        starts.append(accuracy_by_start(outs[-1], seed))
    metrics = [read_metrics(out) for out in outs]
    points = [evaluations(out, m) for out, m in zip(outs, metrics, strict=True)]
    at = [step for step, _ in points[0]]
    steps = [line["step"] for line in metrics[0]]

    def held_out(name: str) -> torch.Tensor:  # (seeds, points)
        return torch.tensor([[evaluation[name] for _, evaluation in p] for p in points])

    def trained_on(name: str) -> torch.Tensor:  # (seeds, steps)
        return torch.tensor([[line[name] for line in m] for m in metrics])

    figure = plt.figure(figsize=(11.5, 7.2))
    grid = figure.add_gridspec(2, 3)
    accuracy, by_start = figure.add_subplot(grid[0, :2]), figure.add_subplot(grid[0, 2])
    thinks, length, silent = (figure.add_subplot(grid[1, i]) for i in range(3))
    curve(accuracy, at, held_out("accuracy_greedy"), GREEDY, "greedy")
    curve(accuracy, at, held_out("accuracy"), SAMPLED, "sampled at T = 1")
    accuracy.set(ylabel="accuracy on 512 held-out problems", ylim=(0, 1.02))
    accuracy.legend(loc="lower right")
    accuracy.set_title("Most of the gain comes in the first 20 steps")
    curve(thinks, steps, trained_on("thinks"), SAMPLED)
    thinks.set(ylabel="share of responses that think", ylim=(0, 1.02), title="Thinking takes over ...")
    curve(length, steps, trained_on("length"), SAMPLED)
    length.set(ylabel="mean response length (tokens)", ylim=(0, None), title="... so responses grow longer ...")
    curve(silent, steps, trained_on("zero_variance_share"), "tab:red")
    silent.set(ylabel="share of groups with equal rewards", ylim=(0, 1.02), title="... and few groups still teach")

    for i, (when, color) in enumerate((("before", "0.65"), ("after", SAMPLED))):
        values = torch.tensor([[s[when][start] for start in STARTS] for s in starts])  # (seeds, 2)
        at_bars = torch.arange(2) + 0.4 * i - 0.2
        bars = by_start.bar(at_bars, values.mean(0), 0.38, color=color, label=when)
        by_start.bar_label(bars, fmt="%.2f", fontsize=9, label_type="center")
        by_start.plot(at_bars.expand_as(values), values, "k.", ms=4)
    by_start.set_xticks([0, 1], [f"made {name}\n(starts with {start})" for start, name in STARTS.items()], fontsize=9)
    by_start.set(ylabel="accuracy, sampled at T = 1", ylim=(0, 1.08), title="Thinking was right before RL")
    by_start.legend(loc="upper right", fontsize=9)

    def change(name: str) -> str:
        return f"{held_out(name)[:, 0].mean():.2f} to {held_out(name)[:, -1].mean():.2f}"

    figure.suptitle(
        f"Rewarded for the last digit alone, the model chooses to think: held-out accuracy {change('accuracy')}"
    )
    save(
        figure,
        path,
        f"{len(outs)} seeds of train_grpo.py with its defaults: each seed thin or a dot, mean thick, 95 % interval. "
        f"Drawn by: {COMMAND}",
    )
    write_results(path.with_name("README.md"), results(points, starts))


def results(points: list, starts: list) -> str:
    """Markdown: each seed before -> after, and the mean over seeds with its 95 % interval."""
    columns = {  # heading -> name in an evaluation, digits
        "accuracy, sampled": ("accuracy", 3),
        "accuracy, greedy": ("accuracy_greedy", 3),
        "length": ("mean_length", 1),
        "thinks": ("thinks", 3),
        "pass@4": ("pass@4", 3),
    }
    rows = [
        [(p[0][1][name], p[-1][1][name]) for name, _ in columns.values()]
        + [(start["before"][key], start["after"][key]) for key in STARTS]
        for p, start in zip(points, starts, strict=True)
    ]
    headings = ["seed", *columns, *(f"accuracy, made {name}" for name in STARTS.values())]
    digits = [n for _, n in columns.values()] + [3] * len(STARTS)
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for seed, row in zip(SEEDS, rows, strict=True):
        cells = [f"{before:.{n}f} -> {after:.{n}f}" for (before, after), n in zip(row, digits, strict=True)]
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    mean, half = mean_and_half(torch.tensor(rows))  # (columns, 2): before and after
    cells = [
        f"{m[0]:.{n}f} ± {h[0]:.{n}f} -> {m[1]:.{n}f} ± {h[1]:.{n}f}"
        for m, h, n in zip(mean.tolist(), half.tolist(), digits, strict=True)
    ]
    lines.append("| mean | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_results(page: Path, table: str) -> None:
    before, begin, rest = page.read_text().partition("<!-- results -->\n")
    _, end, after = rest.partition("<!-- end of results -->")
    page.write_text(f"{before}{begin}{table}\n{end}{after}")


if __name__ == "__main__":
    draw(Path(__file__).with_name("grpo.png"))
