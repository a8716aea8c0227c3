"""Draws the figure of lesson 04 from real runs, and writes their tables into README.md.

    python lessons/04_ppo/figure.py

Runs what is missing first: train_ppo.py with its defaults, and six variants that share its warm start and its reward
model. One seed; about a quarter of an hour on a free core. Everything is kept in runs/lesson_04.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # train_ppo.py, and nanorl if it is not installed

import train_ppo
from nanorl.paired import table
from nanorl.plots import evaluations, read_metrics, save
from nanorl.tasks import reviews

ROOT = Path(train_ppo.__file__).resolve().parent
RUNS = Path("runs") / "lesson_04"  # from ROOT
SEED = 0
FIRST = RUNS / "default"  # whose reward model the others share
VARIANTS = {  # folder -> name here, color, options
    "default": ("KL in the reward, lambda 0.95 (default)", "tab:blue", []),
    "kl_in_loss": ("KL in the loss", "tab:orange", ["--kl-in", "loss"]),
    "kl_in_loss_03": ("KL in the loss, beta 0.3", "tab:pink", ["--kl-in", "loss", "--beta", "0.3"]),
    "kl_in_loss_1": ("KL in the loss, beta 1", "tab:purple", ["--kl-in", "loss", "--beta", "1"]),
    "lam_0": ("lambda 0", "tab:red", ["--lam", "0"]),
    "lam_1": ("lambda 1", "tab:green", ["--lam", "1"]),
    "two_epochs": ("2 epochs of 2 mini-batches", "tab:brown", ["--epochs", "2", "--mini-batches", "2"]),
}
LAST = 10  # steps that the last columns of the first table are the mean of
PERCENT = 100
POLICY_CLIP, CRITIC_CLIP = ("clip_fraction_low", "clip_fraction_high"), ("value_clip_fraction",)  # summed
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
    kl.set(ylabel="KL to the warm start (nats a response)", title="In the loss, KL needs another beta", ylim=(0, None))
    length.set(ylabel="mean response length (tokens)", ylim=(0, None), title="First say less, then say good things")
    variance.set(ylabel="explained variance of the returns", title="The critic learns", ylim=(-0.75, 1.02))
    variance.legend(loc="lower right", fontsize=8)
    loss.set(ylabel="value loss", yscale="log", title="... and its loss falls")
    for name, keys, color, label in (
        (FIRST.name, POLICY_CLIP, VARIANTS[FIRST.name][1], "default, policy"),
        (FIRST.name, CRITIC_CLIP, "tab:cyan", "default, critic"),
        ("two_epochs", POLICY_CLIP, VARIANTS["two_epochs"][1], "2 epochs of 2, policy"),
    ):
        metrics = runs[name][0]
        share = [PERCENT * sum(line[key] for key in keys) for line in metrics]
        clipped.plot([line["step"] for line in metrics], share, color=color, label=label, lw=1.3)
    clipped.set(ylabel="clipped tokens (%)", title="The clip hardly ever acts", ylim=(0, 2))
    clipped.legend(loc="upper right", fontsize=8)
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
    text = page.read_text()
    for name, rows in (("results", results(runs)), ("courses", courses(runs)), ("texts", texts())):
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        text = f"{before}{begin}{table(rows)}\n{end}{after}"
    page.write_text(text)


def results(runs: dict) -> list[list[str]]:
    """Where each run got to."""
    rows = [["run", "gold at step 10", "20", "50", "at the end", "proxy", "KL", "length"]]
    rows[0] += ["explained variance", "value loss"]
    start = runs[FIRST.name][1][0][1]
    rows.append(["the first policy, before PPO", "", "", "", *where(start), "", ""])
    for name, (metrics, points) in runs.items():
        at = dict(points)
        row = [VARIANTS[name][0], *(f"{at[step]['gold']:.2f}" for step in (10, 20, 50)), *where(at[len(metrics)])]
        for key, digits in (("explained_variance", 2), ("value_loss", 3)):
            row.append(f"{sum(line[key] for line in metrics[-LAST:]) / LAST:.{digits}f}")
        rows.append(row)
    return rows


def where(found: dict) -> list[str]:
    """An evaluation in four cells: gold and half its interval, proxy, KL, length."""
    half = (found["gold_high"] - found["gold_low"]) / 2
    return [
        f"{found['gold']:.2f} ± {half:.2f}",
        *(f"{found[k]:.2f}" for k in ("proxy", "kl")),
        f"{found['mean_length']:.1f}",
    ]


def courses(runs: dict) -> list[list[str]]:
    """What happened on the way."""
    rows = [["run", "best gold", "deepest fall", "length in step 0", "shortest batch"]]
    rows[0] += ["explained variance in step 0", "20", "40", "value loss in step 0"]
    rows[0] += ["clipped, policy", "clipped, critic", "KL(old, policy)", "left early"]
    for name, (metrics, points) in runs.items():
        best_at, best = max(points, key=lambda point: point[1]["gold"])
        so_far = itertools.accumulate((found["gold"] for _, found in points), max)
        fall, fall_at, low = max(
            (top - found["gold"], at, found["gold"]) for top, (at, found) in zip(so_far, points, strict=True)
        )
        shortest = min(metrics, key=lambda line: line["length"])
        row = [
            VARIANTS[name][0],
            f"{best['gold']:.2f} in step {best_at}",
            f"{fall:.2f}, to {low:.2f} in step {fall_at}",
        ]
        row.append(f"{metrics[0]['length']:.1f}")
        row.append(f"{shortest['length']:.1f} in step {shortest['step']}")
        row += [f"{metrics[step]['explained_variance']:.2f}" for step in (0, 20, 40)]
        row.append(f"{metrics[0]['value_loss']:.3f}")
        for keys in (POLICY_CLIP, CRITIC_CLIP):
            shares = [PERCENT * sum(line[key] for key in keys) for line in metrics]
            row.append(f"{sum(shares) / len(shares):.2f} %, at most {max(shares):.1f} %")
        row.append(f"at most {max(line['kl_old'] for line in metrics):.3f}")
        most = max(line["updates"] for line in metrics)
        row.append(str(sum(line["updates"] < most for line in metrics)))
        rows.append(row)
    return rows


def texts() -> list[list[str]]:
    """What gold counts in the responses of the batches kept in samples.txt: the first one, and the last of each run."""
    rows = [
        [
            "run",
            "step",
            "good claims",
            "bad claims",
            "said again",
            "broken places",
            "words too many",
            "gold",
            "commonest adjective",
        ]
    ]
    rows += [["the first policy, before PPO", *counted(FIRST.name, 0)]]
    rows += [[shown, *counted(name, -1)] for name, (shown, *_) in VARIANTS.items()]
    return rows


def counted(name: str, which: int) -> list[str]:
    batch = (ROOT / RUNS / name / "samples.txt").read_text().split("--- after ")[1:][which]
    head, *lines = batch.splitlines()
    counts, gold, adjectives = [], [], Counter()
    for line in filter(None, lines):
        prompt, _, response = line.rpartition("   ")[0].partition("  ")
        counts.append(count(prompt, response))
        gold.append(reviews.gold(prompt, response))
        adjectives.update(adjective for _, adjective in reviews.claims(response.split()))
    means = [sum(column) / len(counts) for column in zip(*counts, strict=True)]
    [(commonest, times)] = adjectives.most_common(1)
    often = f"{commonest}, {PERCENT * times / adjectives.total():.0f} % of the claims"
    return [head.split()[0], *(f"{mean:.2f}" for mean in means), f"{sum(gold) / len(gold):.2f}", often]


def count(prompt: str, response: str) -> tuple[int, ...]:
    """Claims of a response that are good, bad, and about something or in a word that came before; places where its
    grammar is broken; words behind those that are read gladly."""
    before, words = prompt.split(), response.split()
    (said, *added) = (set(claim) for claim in reviews.claims(before + words))
    good = bad = again = 0
    for claim in added:
        new = not claim & said
        good += new and not claim.isdisjoint(reviews.GOOD)
        bad += new and not claim.isdisjoint(reviews.BAD)
        again += not new
        said |= claim
    kinds = [reviews.KIND[word] for word in [before[-1], *words]]
    broken = sum(b not in reviews.FOLLOWS[a] for a, b in itertools.pairwise(kinds)) + (kinds[-1] != ".")
    return good, bad, again, broken, max(0, len(words) - reviews.PATIENCE)


if __name__ == "__main__":
    draw(Path(__file__).with_name("ppo.png"))
