"""Draws the figure of lesson 09 from real runs, and writes their tables into README.md.

    python lessons/09_gspo/figure.py

Runs what is missing first: GRPO and GSPO with 1, 4 and 8 updates a batch, and GSPO with a wider band, three seeds of
each, by nanorl.compare. About eight minutes on two free cores. Everything is kept in runs/lesson_09.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # nanorl, if it is not installed

from nanorl.intervals import mean_and_half
from nanorl.paired import plus_minus, table
from nanorl.plots import evaluations, read_metrics, save

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path("runs") / "lesson_09"  # from ROOT
SEEDS = 3
COMMAND = "python lessons/09_gspo/figure.py"
VARIANTS = {  # of nanorl.compare -> name here, color
    "grpo": ("GRPO, 1 update a batch", "0.5"),
    "grpo --updates-per-rollout 4": ("GRPO, 4", "tab:blue"),
    "grpo --updates-per-rollout 8": ("GRPO, 8", "tab:red"),
    "gspo --updates-per-rollout 1": ("GSPO, 1 update a batch", "0.5"),
    "gspo": ("GSPO, 4", "tab:blue"),
    "gspo --updates-per-rollout 8": ("GSPO, 8", "tab:red"),
    "gspo --clip-low 0.012 --clip-high 0.016": ("GSPO, 4, 40 times the band", "tab:green"),
}
PAIRS = {  # GRPO, GSPO
    "1 update a batch": ("grpo", "gspo --updates-per-rollout 1"),
    "4 updates a batch": ("grpo --updates-per-rollout 4", "gspo"),
    "4, 40 times the band": ("grpo --updates-per-rollout 4", "gspo --clip-low 0.012 --clip-high 0.016"),
    "8 updates a batch": ("grpo --updates-per-rollout 8", "gspo --updates-per-rollout 8"),
}
EARLY = 10  # steps; the climb
BLOCK = 10  # steps, of the means in the lower panels
MIDDLE = (20, 50)  # steps; where several updates a batch cost accuracy again


def compare() -> dict[str, list[Path]]:
    """The folders of each variant's runs, made now where they are missing."""
    command = ["-m", "nanorl.compare", *VARIANTS, "--seeds", str(SEEDS), "--out", str(RUNS)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    found = json.loads((ROOT / RUNS / "compare.json").read_text())["variants"]
    return {variant["label"]: [ROOT / RUNS / name for name in variant["runs"]] for variant in found}


def measured(outs: dict[str, list[Path]]) -> dict[str, dict[str, torch.Tensor]]:
    """Of each variant: evaluations (seeds, points), and what was logged of each step (seeds, steps)."""
    result = {}
    for label, folders in outs.items():
        metrics = [read_metrics(out) for out in folders]
        points = [evaluations(out, m) for out, m in zip(folders, metrics, strict=True)]
        of_steps = {"kl_old": [[line["kl_old"] for line in m] for m in metrics]}
        of_steps["clipped"] = [[line["clip_fraction_low"] + line["clip_fraction_high"] for line in m] for m in metrics]
        of_steps["at"] = [[step for step, _ in p] for p in points]
        of_steps["accuracy"] = [[evaluation["accuracy"] for _, evaluation in p] for p in points]
        result[label] = {name: torch.tensor(values, dtype=torch.float64) for name, values in of_steps.items()}
    return result


def draw(path: Path) -> None:
    runs = measured(compare())
    figure, ((grpo, gspo), (clipped, moved)) = plt.subplots(2, 2, figsize=(11, 8))
    for variant, (shown, color) in VARIANTS.items():
        run, axes = runs[variant], grpo if shown.startswith("GRPO") else gspo
        axes.plot(run["at"][0], run["accuracy"].T, color=color, lw=0.7, alpha=0.5)
        axes.plot(run["at"][0], run["accuracy"].mean(0), color=color, lw=2, label=shown)
        if "1 update" in shown:
            continue  # 0 in every step
        line = "--" if axes is grpo else "-"
        for axes, name in ((clipped, "clipped"), (moved, "kl_old")):
            means = run[name].unflatten(1, (-1, BLOCK)).mean((0, 2))
            means[means == 0] = torch.nan  # no place on a logarithmic axis
            axes.plot(torch.arange(len(means)) * BLOCK + BLOCK / 2, means, line, color=color, label=shown, marker=".")
    for axes in (grpo, gspo):
        axes.set(ylabel="held-out accuracy, sampled", ylim=(0.35, 1.01))
        axes.legend(loc="lower right", fontsize=9)
    grpo.set_title("GRPO: more updates climb faster, then cost")
    gspo.set_title("GSPO: the same, and slower at first")
    clipped.set(yscale="log", ylabel="share of tokens (GRPO), of responses (GSPO)", title="What the clip leaves out")
    moved.set(yscale="log", ylabel="KL(old || policy) (nats a token)", title="How far a batch's updates go")
    moved.legend(loc="lower left", fontsize=9)
    for axes in figure.axes:
        axes.set(xlabel="step (batches of 128 responses)")
        axes.grid(alpha=0.3)
    figure.suptitle(title(runs))
    caption = f"{SEEDS} seeds: each thin, mean thick; below, means of {BLOCK} steps and all seeds. Drawn by: {COMMAND}"
    save(figure, path, caption)
    page = path.with_name("README.md")
    write_between(page, "results", results(runs))
    write_between(page, "differences", differences(runs))


def title(runs: dict) -> str:
    clipped = runs["gspo"]["clipped"].mean()
    tokens = runs["grpo --updates-per-rollout 4"]["clipped"].mean()
    return f"With 4 updates a batch GSPO leaves out {clipped:.0%} of the responses, GRPO {tokens:.1%} of the tokens"


def estimate(values: torch.Tensor, sign: str = "") -> str:
    """(seeds,) -> mean ± half its 95 % interval."""
    mean, half = (x.item() for x in mean_and_half(values))
    return plus_minus({"mean": mean, "half": half, "values": values.tolist()}, sign)


def accuracies(run: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """After the climb, on average over the middle, at the end: (seeds,) each."""
    at = run["at"][0]
    middle = (at >= MIDDLE[0]) & (at <= MIDDLE[1])
    return [run["accuracy"][:, at == EARLY][:, 0], run["accuracy"][:, middle].mean(1), run["accuracy"][:, -1]]


HEADS = [f"accuracy after {EARLY} steps", f"mean from {MIDDLE[0]} to {MIDDLE[1]}", "at the end"]


def results(runs: dict) -> str:
    rows = [["variant", *HEADS, f"clipped, first {EARLY} steps", "clipped, all steps"]]
    for variant, (shown, _) in VARIANTS.items():
        clipped = runs[variant]["clipped"]
        rows.append([shown, *map(estimate, [*accuracies(runs[variant]), clipped[:, :EARLY].mean(1), clipped.mean(1)])])
    return table(rows)


def differences(runs: dict) -> str:
    """GSPO minus GRPO, seed by seed."""
    rows = [["GSPO minus GRPO", *HEADS]]
    for shown, (grpo, gspo) in PAIRS.items():
        gaps = [b - a for a, b in zip(accuracies(runs[grpo]), accuracies(runs[gspo]), strict=True)]
        rows.append([shown, *(estimate(gap, "+") for gap in gaps)])
    return table(rows)


def write_between(page: Path, name: str, text: str) -> None:
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    draw(Path(__file__).with_name("gspo.png"))
