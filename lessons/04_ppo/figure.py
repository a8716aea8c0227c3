"""Draws the figure of lesson 04 from real runs, and writes their table into README.md.

    python lessons/04_ppo/figure.py

Runs what is missing first: train_ppo.py with its defaults, and four variants that share its warm start and its reward
model. One seed; about eight minutes on a free core. Everything is kept in runs/lesson_04.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # train_ppo.py, and nanorl if it is not installed

import train_ppo
from nanorl.paired import table
from nanorl.plots import evaluations, read_metrics, save

ROOT = Path(train_ppo.__file__).resolve().parent
RUNS = Path("runs") / "lesson_04"  # from ROOT
SEED = 0
FIRST = RUNS / "default"  # whose reward model the others share
VARIANTS = {  # folder -> name here, color, options
    "default": ("KL in the reward, lambda 0.95 (default)", "tab:blue", []),
    "kl_in_loss": ("KL in the loss", "tab:orange", ["--kl-in", "loss"]),
    "kl_in_loss_half": ("KL in the loss, beta 0.5", "tab:purple", ["--kl-in", "loss", "--beta", "0.5"]),
    "lam_0": ("lambda 0", "tab:red", ["--lam", "0"]),
    "lam_1": ("lambda 1", "tab:green", ["--lam", "1"]),
}
LAST = 10  # steps that the last columns of the table are the mean of
COMMAND = "python lessons/04_ppo/figure.py"


def run(name: str) -> Path:
    """The folder of that variant's run, made now if it is missing or unfinished."""
    out = ROOT / RUNS / name
    options = ["--seed", str(SEED), "--out", str(RUNS / name), *VARIANTS[name][2]]
    options += ["--reward", f"rm:{FIRST}"] if name != FIRST.name else []
    if not (out / "summary.json").exists():
        options += ["--resume"] if (out / "config.json").exists() else []
        subprocess.run([sys.executable, "train_ppo.py", *options], cwd=ROOT, check=True)
    return out


def draw(path: Path) -> None:
    runs = {}
    for name in VARIANTS:
        out = run(name)
        metrics = read_metrics(out)
        runs[name] = metrics, evaluations(out, metrics)
    figure, ((score, kl, length), (variance, loss, clipped)) = plt.subplots(2, 3, figsize=(14, 8))
    for name, (shown, color, _) in VARIANTS.items():
        metrics, points = runs[name]
        steps, at = [line["step"] for line in metrics], [step for step, _ in points]
        for key, style in (("gold", "-"), ("proxy", ":")):
            score.plot(at, [e[key] for _, e in points], style, color=color, marker="o", ms=3)
        score.fill_between(
            at, *([e[key] for _, e in points] for key in ("gold_low", "gold_high")), color=color, alpha=0.15
        )
        kl.plot(at, [e["kl"] for _, e in points], color=color, marker="o", ms=3)
        for axes, key in ((length, "length"), (variance, "explained_variance"), (loss, "value_loss")):
            axes.plot(steps, [line[key] for line in metrics], color=color, lw=1.3, label=shown)
    score.plot([], [], "0.3", label="solid: gold, hidden (95 % interval)")
    score.plot([], [], ":", color="0.3", label="dotted: proxy, what is trained on")
    score.set(ylabel="held-out score of a response", title="Default: gold follows the proxy", ylim=(-1.5, None))
    score.legend(loc="lower left", fontsize=8)
    kl.set(
        ylabel="KL to the warm start (nats a response)", title="The same beta in the loss holds nothing", ylim=(0, None)
    )
    length.set(ylabel="mean response length (tokens)", ylim=(0, None), title="First say less, then say good things")
    variance.set(ylabel="explained variance of the returns", title="The critic learns", ylim=(-0.75, 1.02))
    variance.legend(loc="lower right", fontsize=8)
    loss.set(ylabel="value loss", yscale="log", title="... and its loss falls by two orders")
    metrics = runs["default"][0]
    for key, color, label in (
        ("clip_fraction_low", "tab:cyan", "policy, below 1 - 0.2"),
        ("clip_fraction_high", "tab:purple", "policy, above 1 + 0.2"),
        ("value_clip_fraction", "tab:brown", "critic"),
    ):
        share = [100 * line[key] for line in metrics]
        clipped.plot([line["step"] for line in metrics], share, color=color, label=label, lw=1.3)
    clipped.set(ylabel="clipped tokens (%), linear below 1", title="Default: the clip acts at the start")
    clipped.set_yscale("symlog", linthresh=1)
    clipped.set_yticks([0, 1, 10, 30], ["0", "1", "10", "30"])
    clipped.set_ylim(0, None)
    clipped.legend(fontsize=8)
    for axes in figure.axes:
        axes.set(xlabel=f"step (batches of {train_ppo.Config().prompts} responses)")
        axes.grid(alpha=0.3)
    before, after = (runs["default"][1][i][1] for i in (0, -1))
    figure.suptitle(
        f"PPO on a learned reward: hidden gold score {before['gold']:.2f} to {after['gold']:.2f}, "
        f"at a KL of {after['kl']:.1f} nats a response"
    )
    save(figure, path, f"train_ppo.py --seed {SEED}, and variants on the same reward model. Drawn by: {COMMAND}")
    page = path.with_name("README.md")
    before, begin, rest = page.read_text().partition("<!-- results -->\n")
    _, end, after = rest.partition("<!-- end of results -->")
    page.write_text(f"{before}{begin}{results(runs)}\n{end}{after}")


def results(runs: dict) -> str:
    rows = [["run", "gold at step 10", "20", "50", "at the end", "proxy", "KL", "length"]]
    rows[0] += ["explained variance", "value loss"]
    for name, (metrics, points) in runs.items():
        at = dict(points)
        after = at[len(metrics)]
        half = (after["gold_high"] - after["gold_low"]) / 2
        row = [VARIANTS[name][0], *(f"{at[step]['gold']:.2f}" for step in (10, 20, 50))]
        row += [f"{after['gold']:.2f} ± {half:.2f}", *(f"{after[key]:.2f}" for key in ("proxy", "kl"))]
        row += [f"{after['mean_length']:.1f}"]
        for key, digits in (("explained_variance", 2), ("value_loss", 4)):
            row.append(f"{sum(line[key] for line in metrics[-LAST:]) / LAST:.{digits}f}")
        rows.append(row)
    return table(rows)


if __name__ == "__main__":
    draw(Path(__file__).with_name("ppo.png"))
