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
VARIANTS = {  # of nanorl.compare -> name here, color, line
    "grpo": ("GRPO, 1 update a batch", "tab:blue", ":"),
    "grpo --updates-per-rollout 4": ("GRPO, 4", "tab:blue", "--"),
    "grpo --updates-per-rollout 8": ("GRPO, 8", "tab:blue", "-"),
    "gspo --updates-per-rollout 1": ("GSPO, 1 update a batch", "tab:orange", ":"),
    "gspo": ("GSPO, 4", "tab:orange", "--"),
    "gspo --updates-per-rollout 8": ("GSPO, 8", "tab:orange", "-"),
    "gspo --clip-low 0.012 --clip-high 0.016": ("GSPO, 4, 40 times the band", "tab:green", "--"),
}
PAIRS = {  # GRPO, GSPO
    "1 update a batch": ("grpo", "gspo --updates-per-rollout 1"),
    "4 updates a batch": ("grpo --updates-per-rollout 4", "gspo"),
    "4, 40 times the band": ("grpo --updates-per-rollout 4", "gspo --clip-low 0.012 --clip-high 0.016"),
    "8 updates a batch": ("grpo --updates-per-rollout 8", "gspo --updates-per-rollout 8"),
}
EARLY = 10  # steps; the climb
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
        of_steps = {name: [[line[name] for line in m] for m in metrics] for name in ("ratio", "kl_old", "reward")}
        of_steps["clipped"] = [[line["clip_fraction_low"] + line["clip_fraction_high"] for line in m] for m in metrics]
        of_steps["at"] = [[step for step, _ in p] for p in points]
        for name in ("accuracy", "accuracy_greedy"):
            of_steps[name] = [[evaluation[name] for _, evaluation in p] for p in points]
        result[label] = {name: torch.tensor(values, dtype=torch.float64) for name, values in of_steps.items()}
    return result


def draw(path: Path) -> None:
    runs = measured(compare())
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 4.6))
    panels = {
        "accuracy": "accuracy on 512 held-out problems, sampled",
        "clipped": "share clipped: of tokens (GRPO), of responses (GSPO)",
        "kl_old": "KL(old || policy) over a batch's updates (nats a token)",
    }
    for ax, (name, label) in zip(axes, panels.items(), strict=True):
        for variant, (shown, color, line) in VARIANTS.items():
            if name != "accuracy" and "1 update" in shown:
                continue  # 0 in every step
            values = runs[variant][name]  # (seeds, points)
            x = runs[variant]["at"][0] if name == "accuracy" else torch.arange(values.shape[1])
            mean, half = mean_and_half(values)
            ax.plot(x, mean, color=color, ls=line, label=shown)
            if name == "accuracy":
                ax.fill_between(
                    x, (mean - half).clamp(min=0), (mean + half).clamp(max=1), color=color, alpha=0.12, lw=0
                )
        ax.set(xlabel="step (batches of 128 responses)", ylabel=label)
        ax.grid(alpha=0.3)
    axes[0].set(ylim=(0.3, 1.02))
    axes[0].legend(loc="lower right", fontsize=8)
    axes[1].set_yscale("log")
    axes[2].set_yscale("log")
    figure.suptitle(title(runs))
    save(figure, path, f"Mean of {SEEDS} seeds, left with its 95 % interval. Drawn by: {COMMAND}")
    page = path.with_name("README.md")
    write_between(page, "results", results(runs))
    write_between(page, "differences", differences(runs))


def title(runs: dict) -> str:
    clipped = runs["gspo"]["clipped"].mean()
    tokens = runs["grpo --updates-per-rollout 4"]["clipped"].mean()
    return f"With 4 updates a batch GSPO clips {clipped:.0%} of the responses, GRPO {tokens:.1%} of the tokens"


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
    for variant, (shown, _, _) in VARIANTS.items():
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
