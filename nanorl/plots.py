"""The course of a run, drawn from what it wrote: `python -m nanorl.plots runs/grpo-1`."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen needed
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from nanorl.evaluation import has_reward_model
from nanorl.run import read_lines

SAMPLED, GREEDY, TRAINING = "tab:blue", "tab:orange", "0.6"


def read_metrics(out: Path) -> list[dict]:
    return read_lines(out / "metrics.jsonl")


def evaluations(out: Path, metrics: list[dict]) -> list[tuple[int, dict]]:
    """(updates taken, held-out evaluation), the last one from summary.json."""
    points = [(line["step"], line["eval"]) for line in metrics if "eval" in line]
    summary = out / "summary.json"
    if summary.exists():
        saved = json.loads(summary.read_text())
        points.append((saved["steps"], saved["eval_after"]))
    return points


def draw_accuracy(axes, steps: list[int], metrics: list[dict], points: list[tuple[int, dict]]) -> None:
    axes.plot(steps, [line["reward"] for line in metrics], color=TRAINING, lw=1, label="mean reward, training batch")
    for name, color, label in (
        ("accuracy", SAMPLED, "held out, T = 1"),
        ("accuracy_greedy", GREEDY, "held out, greedy"),
    ):
        at = [step for step, _ in points]
        value = [e[name] for _, e in points]
        axes.plot(at, value, color=color, marker="o", ms=4, label=label)
        axes.fill_between(
            at,
            [e[f"{name}_low"] for _, e in points],
            [e[f"{name}_high"] for _, e in points],
            color=color,
            alpha=0.2,
            lw=0,
        )
    axes.set(ylabel="accuracy (95 % interval)", ylim=(0, 1.02))
    axes.legend(loc="lower right", fontsize=8)


def draw_gold(axes, points: list[tuple[int, dict]]) -> None:
    at = [step for step, _ in points]
    axes.plot(at, [e["gold"] for _, e in points], color=GREEDY, marker="o", ms=4, label="gold: hidden, what is wanted")
    low, high = ([math.nan if e[key] is None else e[key] for _, e in points] for key in ("gold_low", "gold_high"))
    axes.fill_between(at, low, high, color=GREEDY, alpha=0.2, lw=0)
    learned = has_reward_model(points[0][1])
    label = "proxy: what is trained on" if learned else "reward the policy implies: beta log(pi / pi_ref)"
    axes.plot(at, [e["proxy"] for _, e in points], color=SAMPLED, marker="o", ms=4, label=label)
    axes.axhline(0, color=TRAINING, lw=0.8)
    axes.set(ylabel="held-out score (95 % interval)")
    axes.legend(loc="best", fontsize=8)


def draw_curves(out: Path) -> Path:
    """curves.png: how good, how long, how sure, and what else a run is about, against steps. Returns its path."""
    metrics = read_metrics(out)
    points = evaluations(out, metrics)
    at, evaluated = [step for step, _ in points], [e for _, e in points]
    steps = [line["step"] for line in metrics]
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True)
    good = "gold" if evaluated and "gold" in evaluated[0] else "accuracy"
    if good == "gold":
        draw_gold(a, points)
    else:
        draw_accuracy(a, steps, metrics, points)
    if "length" in metrics[0]:
        b.plot(steps, [line["length"] for line in metrics], color=SAMPLED)
    else:  # nothing is sampled in training
        b.plot(at, [e["mean_length"] for e in evaluated], color=SAMPLED, marker="o", ms=4)
    b.set(ylabel="mean response length (tokens)", ylim=(0, None))
    curve = next(name for name in ("entropy", "loss") if name in metrics[0])
    c.plot(steps, [line[curve] for line in metrics], color=SAMPLED)
    label = {"entropy": "entropy (nats a token)", "loss": "loss (nats a pair)"}[curve]
    c.set(ylabel=label, xlabel="step", ylim=(0, None))
    if good == "gold":
        d.plot(at, [e["kl"] for e in evaluated], color=SAMPLED, marker="o", ms=4)
        d.set(ylabel="KL to the warm start (nats a response)", xlabel="step", ylim=(0, None))
    elif "thinks" in metrics[0]:
        d.plot(steps, [line["thinks"] for line in metrics], color=SAMPLED)
        d.set(ylabel="share of responses that think", xlabel="step", ylim=(0, 1.02))
    else:
        d.plot(steps, [line["reward_std"] for line in metrics], color=SAMPLED)
        d.set(ylabel="standard deviation of the reward", xlabel="step", ylim=(0, None))
    for axes in (a, b, c, d):
        axes.grid(alpha=0.3)
    if len(points) > 1:
        first, last = evaluated[0], evaluated[-1]
        figure.suptitle(
            f"Held-out {good} {first[good]:.2f} -> {last[good]:.2f}, "
            f"mean length {first['mean_length']:.0f} -> {last['mean_length']:.0f} tokens"
        )
    command = json.loads((out / "config.json").read_text())["command"]
    return save(figure, out / "curves.png", f"Drawn by: python {shlex.join([Path(command[0]).name, *command[1:]])}")


def save(figure: Figure, path: Path, caption: str) -> Path:
    """Write the figure with a small caption under it, which says what drew it. Returns `path`."""
    figure.supxlabel(caption, fontsize=8, color="0.35", parse_math=False)  # a path in it may hold a $
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "metrics.jsonl").exists():
        sys.exit("usage: python -m nanorl.plots RUN_FOLDER (one that holds metrics.jsonl)")
    print(draw_curves(Path(sys.argv[1])))
