"""Draws the figure of lesson 05 from real runs, and writes their tables into README.md.

    python lessons/05_dpo/figure.py

Runs what is missing first: nanorl.frontier, three seeds of PPO, GRPO, DPO and best-of-n. About an hour on one free
core. Everything is kept in runs/frontier, which lesson 14 draws from as well.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # nanorl, if it is not installed

import dpo_world

from nanorl import frontier
from nanorl.intervals import mean_and_half
from nanorl.paired import estimate, plus_minus, table
from nanorl.plots import read_metrics, save

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path("runs") / "frontier"  # from ROOT
SEEDS = 3
COMMAND = "python lessons/05_dpo/figure.py"
BLOCK = 10  # steps, of the means in the middle panel
LINES = ("-", "--", ":")  # of the betas


def measured() -> dict:
    """What frontier.json holds, its runs made now where they are missing."""
    command = ["-m", "nanorl.frontier", "--seeds", str(SEEDS), "--out", str(RUNS), *sys.argv[1:]]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    return json.loads((ROOT / RUNS / "frontier.json").read_text())


def dpo_runs(found: dict) -> dict[str, list[Path]]:
    """beta -> the folders of its runs."""
    runs = found["runs"].items()
    return {
        name.removeprefix("DPO, beta "): [ROOT / RUNS / out for out in outs] for name, outs in runs if "DPO" in name
    }


def drifts(outs: list[Path], beta: float, which: str) -> torch.Tensor:
    """(seeds, steps): mean log pi / pi_ref of the chosen or rejected responses of each batch."""
    lines = [read_metrics(out) for out in outs]
    return torch.tensor([[line[f"{which}_reward"] / beta for line in run] for run in lines], dtype=torch.float64)


def draw(path: Path) -> None:
    found = measured()
    figure, (world, drift, gold) = plt.subplots(1, 3, figsize=(16, 5.2))
    for beta, line in zip(dpo_world.BETAS, LINES, strict=True):
        _, distances = dpo_world.train(beta)
        world.plot(distances, line, color="tab:green", label=f"beta {beta:g}")
    world.set(xscale="symlog", yscale="log", ylim=(1e-4, 1), xlim=(0, dpo_world.UPDATES))
    world.set(xlabel="update", ylabel="total variation to the best policy")
    world.set_title("World of 27 responses: DPO arrives", fontsize=11)
    for (beta, outs), line in zip(dpo_runs(found).items(), itertools.cycle(LINES), strict=False):
        for which, color in (("chosen", "tab:green"), ("rejected", "tab:red")):
            means = drifts(outs, float(beta), which).unflatten(1, (-1, BLOCK)).mean(2)  # (seeds, blocks)
            mean, half = mean_and_half(means)
            at = torch.arange(len(mean)) * BLOCK + BLOCK / 2
            drift.plot(at, mean, line, color=color, label=f"{which}, beta {beta}")
            drift.fill_between(at, mean - half, mean + half, color=color, alpha=0.1, lw=0)
    drift.axhline(0, color="0.6", lw=0.8)
    drift.set(xlabel="step of DPO", ylabel="log-prob minus that of the reference (nats a response)")
    drift.set_title("Film reviews: what happens to the log-probs", fontsize=11)
    frontier.draw_frontier(gold, found["points"], found["course"])
    gold.set_xlim(0, 12)  # where the methods are; the way without KL leads far out
    gold.legend(loc="lower left", fontsize=8)
    for axes in (world, drift):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left", fontsize=8)
    figure.suptitle(frontier.finding(found["points"]))
    save(figure, path, f"Mean and 95 % interval of {SEEDS} seeds. Drawn by: {COMMAND}")
    page = path.with_name("README.md")
    write_between(page, "world", of_world())
    write_between(page, "dpo", of_dpo(found))
    write_between(page, "frontier", frontier.markdown(found["points"]))


def of_world() -> str:
    found = {beta: dpo_world.found(dpo_world.train(beta)[0], beta) for beta in dpo_world.BETAS}
    rows = [["beta", "off by", "reward", "KL", "chosen", "rejected", "mean of the two", "KL(ref, pi)"]]
    for beta, of in found.items():
        mean = (of["chosen"] + of["rejected"]) / 2
        shown = [of["reward"], of["KL"], of["chosen"], of["rejected"], mean, of["KL(ref, pi)"]]
        rows.append([f"{beta:g}", f"{of['off by']:.4f}", *(f"{value:.3f}" for value in shown)])
    return table(rows)


def of_dpo(found: dict) -> str:
    """Where the runs of DPO ended: log-ratios are means of the last BLOCK batches."""
    rows = [["beta", "accuracy on fresh pairs", "gold", "KL", "length", "chosen", "rejected"]]
    for beta, outs in dpo_runs(found).items():
        ends = [json.loads((out / "summary.json").read_text())["eval_after"] for out in outs]
        values = [[end[name] for end in ends] for name in ("pair_accuracy", "gold", "kl", "mean_length")]
        values += [drifts(outs, float(beta), which)[:, -BLOCK:].mean(1).tolist() for which in ("chosen", "rejected")]
        rows.append([beta, *(plus_minus(estimate(of_seeds)) for of_seeds in values)])
    return table(rows)


def write_between(page: Path, name: str, text: str) -> None:
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    draw(Path(__file__).with_name("dpo.png"))
