"""Draws the figure of lesson 07 from real runs, and writes their tables into README.md.

    python lessons/07_dr_grpo/figure.py

Runs what is missing first: GRPO, Dr. GRPO, its two halves alone, and the standard deviation of the batch, by
nanorl.compare, five seeds of each; the first two with the default learning rate too. About half an hour on two free
cores. Everything is kept in runs/lesson_07.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # nanorl, if it is not installed

from nanorl.advantages import group_advantages
from nanorl.intervals import mean_and_half
from nanorl.paired import plus_minus, table
from nanorl.plots import evaluations, read_metrics, save
from nanorl.tasks.free_length import IN_DOUBT, FreeLength

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("lessons") / "07_dr_grpo"  # from ROOT, as the next
RUNS = Path("runs") / "lesson_07"
SEEDS = 5
COMMAND = f"python {HERE}/figure.py"
OPTIONS = ["--task", "free_length", "--eval-problems", "256"]
RATE = "--learning-rate 5e-4"  # half the default: lengths wander less, see README.md
GRPO, DR_GRPO = f"grpo {RATE}", f"dr_grpo {RATE}"
VARIANTS = {  # of nanorl.compare -> name here, color
    GRPO: ("GRPO", "tab:red"),
    f"{HERE}/only_std.py:grpo_loss {RATE}": ("no division by std", "tab:orange"),
    f"{HERE}/only_length.py:dr_grpo_loss {RATE}": ("no division by length", "tab:green"),
    DR_GRPO: ("Dr. GRPO: neither", "tab:blue"),
    f"{HERE}/batch_std.py:dr_grpo_loss {RATE}": ("Dr. GRPO, std of the batch", "tab:purple"),
}
FASTER = {"grpo": "GRPO, twice the rate", "dr_grpo": "Dr. GRPO, twice the rate"}  # the default
NAMES = {variant: shown for variant, (shown, _) in VARIANTS.items()} | FASTER
BLOCK = 10  # steps, of all means
SCALES = {"group": ("GRPO: divided by the group's std", "tab:red"), "none": ("Dr. GRPO: not divided", "tab:blue")}
GROUP = 8  # responses to a problem
LIMIT = FreeLength.max_new_tokens


def compare() -> dict[str, list[Path]]:
    """The folders of each variant's runs, made now where they are missing."""
    command = ["-m", "nanorl.compare", *VARIANTS, *FASTER, "--seeds", str(SEEDS), "--out", str(RUNS), "--", *OPTIONS]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    found = json.loads((ROOT / RUNS / "compare.json").read_text())["variants"]
    return {variant["label"]: [ROOT / RUNS / name for name in variant["runs"]] for variant in found}


def measured(folders: list[Path]) -> dict[str, torch.Tensor]:
    """Lengths in blocks of steps (seeds, blocks); at the end (seeds,); how many of a group are right (groups,)."""
    logged = [read_metrics(out) for out in folders]
    result = {}
    for name in ("length_right", "length_wrong"):
        steps = torch.tensor([[float("nan") if x[name] is None else x[name] for x in m] for m in logged])  # NaN: none
        result[name] = steps.double().unflatten(1, (-1, BLOCK)).nanmean(2)
    final = [evaluations(out, m)[-1][1] for out, m in zip(folders, logged, strict=True)]
    for name in ("accuracy", "accuracy_greedy"):
        result[name] = torch.tensor([evaluation[name] for evaluation in final], dtype=torch.float64)
    batches = [samples(out) for out in folders]
    for name, doubt in (("length_sure", False), ("length_in_doubt", True)):
        last = [[min(len(text) + 1, LIMIT) for text, _ in b[-1] if (IN_DOUBT in text) == doubt] for b in batches]
        result[name] = torch.tensor([statistics.mean(lengths) for lengths in last], dtype=torch.float64)
    rewards = torch.tensor([reward for b in batches for batch in b for _, reward in batch])
    result["right"] = rewards.view(-1, GROUP).sum(1)
    return result


def samples(out: Path) -> list[list[tuple[str, int]]]:
    """Response and reward, of each batch in samples.txt: those of the steps with an evaluation."""
    batches = (out / "samples.txt").read_text().split("--- after ")[1:]
    lines = (re.findall(r"= (\S*)   reward ([01])$", batch, re.M) for batch in batches)
    return [[(text, int(reward)) for text, reward in batch] for batch in lines]


def weight(right: int, scale: str) -> float:
    """Mean |advantage| of a group with that many right answers."""
    rewards = torch.tensor([1.0] * right + [0.0] * (GROUP - right))
    return group_advantages(rewards, torch.zeros(GROUP, dtype=torch.long), scale=scale).abs().mean().item()


def shares(right: torch.Tensor, scale: str | None) -> list[float]:
    """For 0 to GROUP right answers: the share of the groups, or of their weight."""
    counts = Counter(right.tolist())
    of_each = [counts[n] * (1.0 if scale is None else weight(n, scale)) for n in range(GROUP + 1)]
    return [value / sum(of_each) for value in of_each]


def draw(path: Path) -> None:
    runs = {variant: measured(folders) for variant, folders in compare().items()}
    figure, ((lengths, gap), (difficulty, accuracy)) = plt.subplots(2, 2, figsize=(11, 8))
    for variant, shown in ((GRPO, "GRPO"), (DR_GRPO, "Dr. GRPO")):
        _, color = VARIANTS[variant]
        band(lengths, runs[variant]["length_wrong"], color, f"{shown}, wrong")
        band(lengths, runs[variant]["length_right"], color, f"{shown}, right", "--")
    for row, (variant, (shown, color)) in enumerate(VARIANTS.items()):
        band(gap, runs[variant]["length_wrong"] - runs[variant]["length_right"], color, shown)
        if variant != GRPO:
            values = runs[variant]["accuracy"] - runs[GRPO]["accuracy"]
            mean, half = mean_and_half(values)
            accuracy.errorbar(mean, row, xerr=half, color=color, fmt="o", capsize=4)
            accuracy.plot(values, [row + 0.2] * len(values), ".", color=color, alpha=0.6)
            accuracy.annotate(shown, (mean, row - 0.15), ha="center", fontsize=9)
    right = runs[GRPO]["right"]
    numbers = range(GROUP + 1)
    difficulty.bar(numbers, shares(right, None), width=0.9, color="0.85", label="share of the groups")
    for offset, (scale, (shown, color)) in zip((-0.2, 0.2), SCALES.items(), strict=True):
        at = [n + offset for n in numbers]
        difficulty.bar(at, shares(right, scale), width=0.38, color=color, label=f"of the weight, {shown}")
    lengths.set(ylabel="tokens, stop token included", title="Length of wrong and of right answers", ylim=(0, None))
    gap.set(ylabel="tokens", title="Wrong minus right: only the length division matters")
    for axes in (lengths, gap):
        axes.set(xlabel=f"step (means of {BLOCK}; batches of 128 responses)")
        axes.legend(fontsize=9, loc="upper left")
    gap.set_ylim(top=1.6 * gap.get_ylim()[1])  # room for the legend
    difficulty.set(xlabel=f"right answers in a group of {GROUP} (runs of GRPO)", ylabel="share", ylim=(0, 0.3))
    difficulty.set_title("The std gives groups near 0 and 8 more weight")
    difficulty.legend(fontsize=9, loc="upper center")
    accuracy.set(xlabel="held-out accuracy minus GRPO's, seed by seed", title="What it does to accuracy", yticks=[])
    accuracy.set_ylim(len(VARIANTS) - 0.5, 0.5)
    accuracy.axvline(0, color=VARIANTS[GRPO][1])
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.suptitle(title(runs))
    save(figure, path, f"Mean and 95 % interval of {SEEDS} seeds. Drawn by: {COMMAND}")
    page = path.with_name("README.md")
    write_between(page, "results", results(runs))
    write_between(page, "differences", differences(runs))
    write_between(page, "groups", groups(right))


def band(axes, values: torch.Tensor, color: str, label: str, line: str = "-") -> None:
    """Mean and interval of (seeds, blocks)."""
    mean, half = mean_and_half(values)
    at = torch.arange(len(mean)) * BLOCK + BLOCK / 2
    axes.plot(at, mean, line, color=color, label=label)
    axes.fill_between(at, mean - half, mean + half, color=color, alpha=0.15, lw=0)


def title(runs: dict) -> str:
    grpo, dr_grpo = (runs[variant]["length_wrong"].mean(0) for variant in (GRPO, DR_GRPO))
    return (
        f"Length of wrong answers, first to last {BLOCK} steps: GRPO {grpo[0]:.1f} to {grpo[-1]:.1f} tokens, "
        f"Dr. GRPO {dr_grpo[0]:.1f} to {dr_grpo[-1]:.1f}"
    )


def estimate(values: torch.Tensor, sign: str = "") -> str:
    """(seeds,) -> mean ± half its 95 % interval."""
    mean, half = (x.item() for x in mean_and_half(values))
    return plus_minus({"mean": mean, "half": half, "values": values.tolist()}, sign)


HEADS = ["length, wrong", "right", "wrong minus right", "in doubt", "sure", "accuracy, sampled", "greedy"]


def columns(run: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """In the last block of steps, in the last batch of samples.txt, and held out at the end: (seeds,) each."""
    wrong, right = run["length_wrong"][:, -1], run["length_right"][:, -1]
    names = ("length_in_doubt", "length_sure", "accuracy", "accuracy_greedy")
    return [wrong, right, wrong - right, *(run[name] for name in names)]


def results(runs: dict) -> str:
    rows = [["variant", *HEADS]]
    for variant, shown in NAMES.items():
        rows.append([shown, *map(estimate, columns(runs[variant]))])
    return table(rows)


def differences(runs: dict) -> str:
    """Minus GRPO with the same rate, seed by seed."""
    rows = [["minus GRPO", *HEADS]]
    pairs = [(GRPO, variant) for variant in VARIANTS if variant != GRPO] + [("grpo", "dr_grpo")]
    for grpo, variant in pairs:
        gaps = [b - a for a, b in zip(columns(runs[grpo]), columns(runs[variant]), strict=True)]
        rows.append([NAMES[variant], *(estimate(gap, "+") for gap in gaps)])
    return table(rows)


def groups(right: torch.Tensor) -> str:
    rows = [["right of 8", "weight, GRPO", "weight, Dr. GRPO", "groups", "of GRPO's weight", "of Dr. GRPO's"]]
    of_groups, grpo, dr_grpo = (shares(right, scale) for scale in (None, *SCALES))
    for n in range(GROUP + 1):
        numbers = [f"{weight(n, scale):.3f}" for scale in SCALES]
        rows.append([f"{n}", *numbers, *(f"{x[n]:.1%}".replace("%", " %") for x in (of_groups, grpo, dr_grpo))])
    return table(rows)


def write_between(page: Path, name: str, text: str) -> None:
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    draw(Path(__file__).with_name("dr_grpo.png"))
