"""Runs of several variants over the same seeds, as numbers, tables and a picture.

Seeds are paired: runs of one seed share weights, warm start and problems, so the difference of two variants is taken
seed by seed, and its interval is narrower than those of the two means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from nanorl.intervals import mean_and_half
from nanorl.plots import evaluations, read_metrics, save

LAST = 10  # steps that the final length, entropy and KL are the mean of
GRID = 60  # points of a curve against seconds
SMALLEST = 1e-4  # the least height of an axis: below it a KL is rounding
CURVES = {  # name -> label of its axis
    "accuracy": "held-out accuracy, sampled at T = 1",
    "length": "mean response length (tokens)",
    "entropy": "entropy (nats a token)",
    "kl_ref": "KL to the warm start (nats a token)",
    "kl_old": "KL within a batch (nats a token)",
}


@dataclass
class Course:
    """Of one run: what happened when."""

    seconds: np.ndarray  # (steps + 1,): of training, evaluations left out, before each step and after the last
    curves: dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (updates taken, value), NaN where it was not finite

    @property
    def accuracy(self) -> float:
        return float(self.curves["accuracy"][1][-1])

    def last(self, name: str) -> float:
        return float(self.curves[name][1][-LAST:].mean()) if name in self.curves else math.nan

    def steps_to(self, target: float) -> float:
        """Updates until accuracy reaches `target`, on a straight line between evaluations; NaN if it never does."""
        points = list(zip(*self.curves["accuracy"], strict=True))
        if points[0][1] >= target:
            return float(points[0][0])
        for (x, y), (x_next, y_next) in itertools.pairwise(points):
            if y_next >= target:
                return float(x + (x_next - x) * (target - y) / (y_next - y))
        return math.nan

    def seconds_at(self, steps: np.ndarray | float) -> np.ndarray:
        return np.interp(steps, np.arange(len(self.seconds)), self.seconds)


def read_course(out: Path) -> Course:
    """From the folder of a finished run."""
    lines = read_metrics(out)
    spent = [line["seconds"]["step"] - line["seconds"].get("eval", 0.0) for line in lines]
    points = evaluations(out, lines)
    curves = {"accuracy": ([step for step, _ in points], [e["accuracy"] for _, e in points])}
    for name in CURVES.keys() - {"accuracy"}:
        if name in lines[0]:
            curves[name] = ([line["step"] for line in lines], [line[name] for line in lines])
    arrays = {name: (np.array(x, float), np.array(y, float)) for name, (x, y) in curves.items()}  # None becomes NaN
    return Course(np.concatenate([[0.0], np.cumsum(spent)]), arrays)


def shown_curves(courses: dict[str, list[Course]]) -> list[str]:
    """Four of them: KL to the warm start if every run has it, else that of a batch, which own losses may leave out."""
    runs = list(itertools.chain(*courses.values()))
    kl = "kl_ref" if all("kl_ref" in run.curves for run in runs) else "kl_old"
    return ["accuracy", "length", "entropy", kl]


def finals(course: Course, target: float, kl: str) -> dict[str, float]:
    """What a run comes down to: name -> value. NaN: it never reached the target."""
    steps = course.steps_to(target)
    return {
        "accuracy": course.accuracy,
        f"steps to {target:.0%}": steps,
        f"seconds to {target:.0%}": float(course.seconds_at(steps)) if math.isfinite(steps) else math.nan,
        "seconds": float(course.seconds[-1]),
        "length": course.last("length"),
        "entropy": course.last("entropy"),
        kl: course.last(kl),
    }


def estimate(values: Sequence[float]) -> dict:
    """Mean and half width of its 95 % interval, over the seeds that have a value."""
    values = [round_off(value) for value in values]
    there = [value for value in values if value is not None]
    mean, half = mean_and_half(there) if there else (math.nan, math.nan)
    return {"mean": round_off(mean), "half": round_off(half), "values": values}


def round_off(value: float) -> float | None:
    """Six digits; JSON has no NaN and no infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def summarize(courses: dict[str, list[Course]], target: float) -> list[dict]:
    """Of each variant, as plain data: final values, their paired differences to the first variant, and curves."""
    shown = shown_curves(courses)
    values = {label: [finals(run, target, shown[-1]) for run in runs] for label, runs in courses.items()}
    first = next(iter(values.values()))
    result = []
    for label, runs in courses.items():
        final, difference = {}, {}
        for name in first[0]:
            final[name] = estimate([run[name] for run in values[label]])
            difference[name] = estimate([b[name] - a[name] for a, b in zip(first, values[label], strict=True)])
        curves = {name: mean_curve(runs, name) for name in shown if name in runs[0].curves}
        result.append({"label": label, "final": final, "difference": difference, "curves": curves})
    return result


def mean_curve(runs: Sequence[Course], name: str) -> dict[str, dict[str, list]]:
    """Mean over seeds and half its interval, against updates and against seconds of training."""
    steps, values = zip(*(run.curves[name] for run in runs), strict=True)
    seconds = [run.seconds_at(x) for run, x in zip(runs, steps, strict=True)]
    grid = np.linspace(0, min(x[-1] for x in seconds), GRID)  # as far as all seeds have come
    result = {}
    for against, x, found in (("steps", steps[0], steps), ("seconds", grid, seconds)):
        y = [np.interp(x, at, of_run).tolist() for at, of_run in zip(found, values, strict=True)]  # (seeds, points)
        mean, half = mean_and_half(y)
        result[against] = {
            "x": [round_off(v) for v in x],
            "mean": [round_off(v) for v in mean.tolist()],
            "half": [round_off(v) for v in half.tolist()],
        }
    return result


# ---- for people


def tables(variants: Sequence[dict]) -> str:
    """Markdown: final values, and differences to the first variant, each with its 95 % interval."""
    names = list(variants[0]["final"])
    rows = [["variant", *names]]
    rows += [[v["label"], *(plus_minus(v["final"][name]) for name in names)] for v in variants]
    text = table(rows)
    if len(variants) > 1:
        rows = [[f"minus {variants[0]['label']}, seed by seed", *names]]
        rows += [[v["label"], *(plus_minus(v["difference"][name], "+") for name in names)] for v in variants[1:]]
        text += "\n\n" + table(rows)
    return text


def plus_minus(estimate: dict, sign: str = "") -> str:
    """0.987 ± 0.004; of how many seeds, where some have no value."""
    mean, half, values = estimate["mean"], estimate["half"], estimate["values"]
    if mean is None:
        return "-"
    digits = 1 if max(abs(mean), half or 0) >= 10 else 2 if max(abs(mean), half or 0) >= 2 else 4
    text = f"{mean:{sign}.{digits}f}" + (f" ± {half:.{digits}f}" if half is not None else "")
    missing = values.count(None)
    return text + (f" ({len(values) - missing} of {len(values)} seeds)" if missing else "")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown that can be read as it is; the first row is the head."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def finding(variants: Sequence[dict]) -> str:
    """Which variants' accuracy differs from that of the first."""
    first, *others = variants
    if not others:
        return f"{first['label']}: final accuracy {plus_minus(first['final']['accuracy'])}"
    differ = []
    for variant in others:
        gap = variant["difference"]["accuracy"]
        if gap["half"] is not None and abs(gap["mean"]) > gap["half"]:
            differ.append(f"{variant['label']} {plus_minus(gap, '+')}")
    seeds = len(first["final"]["accuracy"]["values"])
    if differ:
        return f"Final accuracy differs from that of {first['label']}: {', '.join(differ)} ({seeds} seeds)"
    return f"No final accuracy differs from that of {first['label']} by more than its 95 % interval ({seeds} seeds)"


def draw(variants: Sequence[dict], path: Path, caption: str) -> Path:
    """Mean and 95 % interval over seeds, against steps in the upper row and against seconds in the lower."""
    names = [name for name in CURVES if any(name in variant["curves"] for variant in variants)]
    figure, rows = plt.subplots(2, len(names), figsize=(4.2 * len(names), 7.5))
    for axes_row, against, label in zip(
        rows, ("steps", "seconds"), ("step (updates)", "seconds of training"), strict=True
    ):
        for axes, name in zip(axes_row, names, strict=True):
            highest = SMALLEST
            for number, variant in enumerate(variants):
                if name not in variant["curves"]:
                    continue
                curve = variant["curves"][name][against]
                x, mean, half = (np.array(curve[key], float) for key in ("x", "mean", "half"))
                axes.plot(x, mean, color=f"C{number}", label=variant["label"])
                axes.fill_between(x, mean - half, mean + half, color=f"C{number}", alpha=0.2, lw=0)
                highest = max(highest, np.nanmax(mean, initial=0))
            # None of these is negative; the means decide the height, or two seeds' wide intervals would.
            axes.set(xlabel=label, ylabel=CURVES[name], ylim=(0, 1.02 if name == "accuracy" else 1.3 * highest))
            axes.grid(alpha=0.3)
    rows[0][0].legend(loc="lower right", fontsize=8)
    figure.suptitle(finding(variants))
    return save(figure, path, caption)
