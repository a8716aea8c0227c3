"""Draws the figure of lesson 08 from real runs, and writes their tables into README.md.

    python lessons/08_dapo/figure.py

Runs what is missing first: DAPO, DAPO with each of its parts switched off in turn, GRPO, two more upper
bounds of the clip and a tighter limit of length, five seeds of each, by nanorl.compare. About twenty minutes on two
free cores. Everything is kept in runs/lesson_08.
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
RUNS = Path("runs") / "lesson_08"  # from ROOT
SEEDS = 5
COMMAND = "python lessons/08_dapo/figure.py"
PROMPTS = 16  # problems a step, the default of train_grpo.py
RESPONSES = 8  # to each
SETTING = [  # a weaker warm start leaves something to learn; the clip needs several updates a batch
    *("--steps", "30", "--updates-per-rollout", "8", "--max-new-tokens", "27"),
    *("--warm-start-steps", "250", "--learning-rate", "5e-4"),
]
DAPO, LOW_CLIP = "dapo", "dapo --clip-high 0.2"
LOWEST_CLIP, WIDE_CLIP = "dapo --clip-high 0.05", "dapo --clip-high 1"
NOT_DYNAMIC = "dapo --extras overlong_penalty overlong_filtering"
NOT_DYNAMIC_LONG = f"{NOT_DYNAMIC} --steps 90"  # about as many responses as DAPO samples in 30
NO_PENALTY = "dapo --extras dynamic_sampling overlong_filtering"
NO_FILTER = "dapo --extras dynamic_sampling overlong_penalty"
TIGHT = "dapo --max-new-tokens 25"  # as long as a right chain: the penalty's buffer reaches into it
TIGHT_NO_PENALTY = f"{TIGHT} --extras dynamic_sampling overlong_filtering"
SEQUENCE_MEAN = "grpo --clip-high 0.28 --extras dynamic_sampling overlong_penalty overlong_filtering"
VARIANTS = {  # of nanorl.compare -> name here
    DAPO: "DAPO",
    LOW_CLIP: "clip 0.2 above",
    NOT_DYNAMIC: "no dynamic sampling",
    NOT_DYNAMIC_LONG: "no dynamic sampling, 90 steps",
    SEQUENCE_MEAN: "sequence mean",
    NO_PENALTY: "no overlong penalty",
    NO_FILTER: "no overlong filtering",
    "dapo --beta 0.04": "with KL, beta 0.04",
    "grpo": "GRPO: all of them",
    LOWEST_CLIP: "clip 0.05 above",
    WIDE_CLIP: "clip 1 above",
    TIGHT: "limit of 25 tokens",
    TIGHT_NO_PENALTY: "limit of 25, no penalty",
}
COLORS = {
    DAPO: "tab:blue",
    LOW_CLIP: "tab:orange",
    NOT_DYNAMIC: "tab:red",
    NOT_DYNAMIC_LONG: "0.5",
    SEQUENCE_MEAN: "tab:green",
    NO_PENALTY: "tab:brown",
    TIGHT: "tab:pink",
    TIGHT_NO_PENALTY: "tab:olive",
}
BOUNDS = {LOWEST_CLIP: "0.05", LOW_CLIP: "0.2", DAPO: "0.28", WIDE_CLIP: "1"}
BLOCK = 5  # steps, of the means in the panels of what is logged each step
EARLY = 10  # steps; the climb


def compare() -> dict[str, list[Path]]:
    """The folders of each variant's runs, made now where they are missing."""
    command = ["-m", "nanorl.compare", *VARIANTS, "--seeds", str(SEEDS), "--out", str(RUNS), "--", *SETTING]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    found = json.loads((ROOT / RUNS / "compare.json").read_text())["variants"]
    return {variant["label"]: [ROOT / RUNS / name for name in variant["runs"]] for variant in found}


def measured(outs: dict[str, list[Path]]) -> dict[str, dict[str, torch.Tensor]]:
    """Of each variant: evaluations (seeds, points), and what was logged of each step (seeds, steps)."""
    result = {}
    for label, folders in outs.items():
        metrics = [read_metrics(out) for out in folders]
        points = [evaluations(out, m) for out, m in zip(folders, metrics, strict=True)]
        logged = ("entropy", "length", "thinks", "truncated_share", "zero_variance_share", "sampling_rounds")
        logged += ("clip_fraction_high", "clip_fraction_low")
        values = {name: [[line[name] for line in m] for m in metrics] for name in logged}
        values["at"] = [[step for step, _ in p] for p in points]
        values["accuracy"] = [[evaluation["accuracy"] for _, evaluation in p] for p in points]
        run = {name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()}
        sampled = PROMPTS * run["sampling_rounds"]  # groups
        teach = ((1 - run["zero_variance_share"]) * sampled).round()
        run["teach_sampled"], run["teach_trained"] = teach / sampled, teach.clamp(max=PROMPTS) / PROMPTS
        # Responses until each evaluation.
        so_far = torch.nn.functional.pad((sampled * RESPONSES).cumsum(1), (1, 0))
        run["responses"] = so_far.gather(1, run["at"].long())
        result[label] = run
    return result


def draw(path: Path) -> None:
    runs = measured(compare())
    figure, (upper, lower) = plt.subplots(2, 4, figsize=(20, 8.8))
    draw_entropy(*upper[:2], runs)
    teach, cost, (means, lengths, buffer, gaps) = *upper[2:], lower
    band(teach, runs[DAPO]["teach_trained"], COLORS[DAPO], "DAPO, after filling")
    band(teach, runs[DAPO]["teach_sampled"], COLORS[DAPO], "DAPO, as sampled", "--")
    band(teach, runs[NOT_DYNAMIC]["teach_trained"], COLORS[NOT_DYNAMIC], VARIANTS[NOT_DYNAMIC])
    teach.set(ylabel=f"share of a batch's {PROMPTS} groups", ylim=(0, 1.05), title="Groups that teach")
    for variant in (NOT_DYNAMIC_LONG, DAPO, NOT_DYNAMIC):
        run = runs[variant]
        for seed in range(SEEDS):
            shown = VARIANTS[variant] if seed == 0 else None
            cost.plot(
                run["responses"][seed] / 1000, run["accuracy"][seed], color=COLORS[variant], marker=".", label=shown
            )
    cost.set(
        xlabel="responses sampled (thousands)", ylabel="held-out accuracy, sampled", title="What dynamic sampling costs"
    )
    for variant in (DAPO, SEQUENCE_MEAN):
        run, color = runs[variant], COLORS[variant]
        means.plot(run["at"][0], run["accuracy"].T, color=color, lw=0.7, alpha=0.5)
        means.plot(run["at"][0], run["accuracy"].mean(0), color=color, lw=2, label=VARIANTS[variant])
        band(lengths, run["length"], color, VARIANTS[variant])
    means.set(ylabel="held-out accuracy, sampled", title="Token mean, sequence mean: accuracy")
    lengths.set(ylabel="response length (tokens)", title="Token mean, sequence mean: length")
    for variant in (DAPO, NO_PENALTY, TIGHT, TIGHT_NO_PENALTY):
        line = "--" if variant in (NO_PENALTY, TIGHT_NO_PENALTY) else "-"
        shown = f"limit of 27: {VARIANTS[variant]}" if variant in (DAPO, NO_PENALTY) else VARIANTS[variant]
        band(buffer, runs[variant]["thinks"], COLORS[variant], shown, line)
    buffer.set(ylabel="share that thinks", ylim=(0, 1.05), title="A buffer that reaches into right answers")
    draw_gaps(gaps, runs)
    for axes in (*upper[:3], *lower[:3]):
        axes.set_xlabel(f"step (batches of {PROMPTS * RESPONSES} responses)")
    for axes in (*upper, *lower[:3]):
        axes.legend(fontsize=9)
        axes.grid(alpha=0.3)
    figure.suptitle(title(runs))
    caption = f"{SEEDS} seeds; bands: mean of {BLOCK} steps and its 95 % interval over seeds. Drawn by: {COMMAND}"
    save(figure, path, caption)
    page = path.with_name("README.md")
    write_between(page, "results", results(runs))
    write_between(page, "differences", differences(runs))


def blocks(values: torch.Tensor) -> torch.Tensor:
    """(seeds, steps) -> (seeds, blocks): means of BLOCK steps."""
    return values.unflatten(1, (-1, BLOCK)).mean(2)


def band(axes, values: torch.Tensor, color: str, label: str, line: str = "-") -> None:
    """values (seeds, steps): mean and interval over seeds."""
    mean, half = mean_and_half(blocks(values))
    at = torch.arange(len(mean)) * BLOCK + BLOCK / 2
    axes.plot(at, mean, line, color=color, label=label)
    axes.fill_between(at, mean - half, mean + half, color=color, alpha=0.12, lw=0)


def draw_entropy(left, right, runs: dict) -> None:
    """Entropy with both upper bounds, and each bound's entropy by that of DAPO in the same seed."""
    for variant in (LOW_CLIP, DAPO):
        entropy, color = blocks(runs[variant]["entropy"]), COLORS[variant]
        at = torch.arange(entropy.shape[1]) * BLOCK + BLOCK / 2
        left.plot(at, entropy.T, color=color, lw=0.7, alpha=0.6)
        left.plot(at, entropy.mean(0), color=color, lw=2, label=f"upper bound 1 + {BOUNDS[variant]}")
    for variant, color in ((LOWEST_CLIP, "0.5"), (LOW_CLIP, COLORS[LOW_CLIP]), (WIDE_CLIP, "tab:purple")):
        ratio = blocks(runs[variant]["entropy"]).log() - blocks(runs[DAPO]["entropy"]).log()
        mean, half = mean_and_half(ratio)
        right.plot(at, mean.exp(), color=color, label=f"1 + {BOUNDS[variant]}")
        right.fill_between(at, (mean - half).exp(), (mean + half).exp(), color=color, alpha=0.12, lw=0)
    right.axhline(1, color=COLORS[DAPO], label=f"1 + {BOUNDS[DAPO]}")
    left.set(yscale="log", ylabel="entropy (nats a token)", title="Clip-higher: entropy")
    right.set(ylabel="entropy / DAPO's, same seed", title="Entropy by the upper bound")


def draw_gaps(axes, runs: dict) -> None:
    """Accuracy of each variant minus DAPO's, seed by seed."""
    others = [variant for variant in VARIANTS if variant not in (DAPO, TIGHT, TIGHT_NO_PENALTY)]
    for shift, color, take, label in (
        (-0.15, "0.6", climb, f"after {EARLY} steps"),
        (0.15, "black", final, "at the end"),
    ):
        estimates = [mean_and_half(take(runs[variant]) - take(runs[DAPO])) for variant in others]
        mean, half = (torch.stack(x) for x in zip(*estimates, strict=True))
        at = torch.arange(len(others)) + shift
        axes.errorbar(mean, at, xerr=half, fmt="o", color=color, ms=4, capsize=3, label=label)
    axes.axvline(0, color="tab:blue", lw=1)
    axes.set_yticks(range(len(others)), [VARIANTS[variant].replace(", ", ",\n") for variant in others], fontsize=9)
    axes.set_ylim(len(others) + 1, -0.6)  # the first on top, and room for the legend
    axes.locator_params(axis="x", nbins=5)
    axes.set(xlabel="accuracy minus DAPO's, and its 95 % interval", title="One part off at a time")
    axes.legend(loc="lower left", fontsize=9)
    axes.grid(alpha=0.3, axis="x")


def title(runs: dict) -> str:
    found = [runs[variant]["teach_trained"].mean() for variant in (DAPO, NOT_DYNAMIC)]
    taught = f"With dynamic sampling {found[0]:.0%} of a batch's groups teach, without it {found[1]:.0%}"
    mean, half = mean_and_half(runs[LOW_CLIP]["entropy"].mean(1) - runs[DAPO]["entropy"].mean(1))
    changes = "changes" if mean.abs() > half else "does not visibly change"
    return f"{taught}. Clip-higher {changes} the entropy"


# ---- numbers


def climb(run: dict[str, torch.Tensor]) -> torch.Tensor:
    return run["accuracy"][:, run["at"][0] == EARLY][:, 0]


def final(run: dict[str, torch.Tensor]) -> torch.Tensor:
    return run["accuracy"][:, -1]


COLUMNS = {  # head -> of a run (seeds,)
    f"accuracy after {EARLY} steps": climb,
    "at the end": final,
    "entropy, mean of all steps": lambda run: run["entropy"].mean(1),
    f"length, steps {EARLY - BLOCK} to {EARLY}": lambda run: run["length"][:, EARLY - BLOCK : EARLY].mean(1),
    "cut off, %": lambda run: 100 * run["truncated_share"].mean(1),
    "clipped above, %": lambda run: 100 * run["clip_fraction_high"].mean(1),
    "trained groups that teach": lambda run: run["teach_trained"].mean(1),
    "responses sampled, thousands": lambda run: run["responses"][:, -1] / 1000,
}


def estimate(values: torch.Tensor, sign: str = "") -> str:
    """(seeds,) -> mean ± half its 95 % interval."""
    mean, half = (x.item() for x in mean_and_half(values))
    return plus_minus({"mean": mean, "half": half, "values": values.tolist()}, sign)


def results(runs: dict) -> str:
    rows = [["variant", *COLUMNS]]
    rows += [[VARIANTS[v], *(estimate(of(run)) for of in COLUMNS.values())] for v, run in runs.items()]
    return table(rows)


def differences(runs: dict) -> str:
    """Each variant minus DAPO, seed by seed."""
    rows = [["minus DAPO", *COLUMNS]]
    for variant in list(runs)[1:]:
        gaps = [of(runs[variant]) - of(runs[DAPO]) for of in COLUMNS.values()]
        rows.append([VARIANTS[variant], *(estimate(gap, "+") for gap in gaps)])
    return table(rows)


def write_between(page: Path, name: str, text: str) -> None:
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    draw(Path(__file__).with_name("dapo.png"))
