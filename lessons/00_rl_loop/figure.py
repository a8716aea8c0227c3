"""Draws the figure of lesson 00 from fresh runs of reinforce.py, about half a minute on one core.

python lessons/00_rl_loop/figure.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import reinforce
import torch
from torch import Tensor

from nanorl.plots import save

SEEDS = 20
T_95 = 2.093  # Student's t at 0.975 with 19 degrees of freedom
BATCHES = 1000  # of the untrained table, for the noise of its gradient
CASES = [  # label, color, options of reinforce()
    ("baseline (any reward + constant)", "tab:blue", {"baseline": True}),
    ("no baseline", "tab:orange", {"baseline": False}),
    ("no baseline, every reward + 1", "tab:red", {"baseline": False, "added": 1.0}),
]
COMMAND = "python lessons/00_rl_loop/figure.py"


def curves(options: dict) -> dict[str, Tensor]:
    """Name -> (SEEDS, UPDATES)."""
    histories = [reinforce.reinforce(seed, **options)[1] for seed in range(SEEDS)]
    return {name: torch.tensor([[update[name] for update in h] for h in histories]) for name in ("reward", "loss")}


def noise(options: dict) -> float:
    """Of the first update's gradient: standard deviation over batches, relative to the length of the mean gradient."""
    tables = [reinforce.reinforce(seed, updates=1, **options)[0] for seed in range(BATCHES)]
    gradients = torch.stack(tables).flatten(1) / -reinforce.LEARNING_RATE  # (BATCHES, 100): one plain SGD step from 0
    return (gradients.var(0).sum().sqrt() / gradients.mean(0).norm()).item()


def draw(path: Path) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4.2), width_ratios=[4, 4, 3])
    noises = []
    for label, color, options in CASES:
        runs = curves(options)
        noises.append(noise(options))
        for axes, name in ((left, "reward"), (middle, "loss")):
            mean, half = runs[name].mean(0), T_95 * runs[name].std(0) / SEEDS**0.5
            axes.plot(mean, color=color, label=label)
            axes.fill_between(range(len(mean)), mean - half, mean + half, color=color, alpha=0.2, lw=0)
        last = runs["reward"][:, -20:].mean(1)
        half = T_95 * last.std() / SEEDS**0.5
        print(f"{label:<34}reward of the last 20 updates {last.mean():.3f} +- {half:.3f} (worst seed {last.min():.3f})")
        at = (0, 10, 20, 50, len(runs["loss"][0]) - 1)
        print(" " * 34 + "loss at update " + ", ".join(f"{step}: {runs['loss'].mean(0)[step]:.2f}" for step in at))
        print(" " * 34 + f"noise of the first gradient {noises[-1]:.2f} times its length")
    left.set(title="How much is learned", xlabel="update", ylabel="mean reward (share of right digits)", ylim=(0, 1.02))
    left.legend(loc="lower right", fontsize=9)
    middle.axhline(0, color="0.5", lw=0.8)
    middle.set(title="What the loss shows", xlabel="update", ylabel="loss (nats)")
    bars = right.bar(range(len(CASES)), noises, color=[color for _, color, _ in CASES])
    right.bar_label(bars, fmt="%.1f")
    right.set_xticks(range(len(CASES)), ["baseline", "no\nbaseline", "no baseline,\nreward + 1"], fontsize=9)
    right.set(title="Noise of the first gradient", ylabel="standard deviation / length of the mean", ylim=(0, 10))
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(
        "Without a baseline, adding 1 to every reward stalls learning, while the loss falls as if all were well"
    )
    save(
        figure,
        path,
        f"{SEEDS} seeds, mean and 95 % interval; updates of {reinforce.ROWS} responses. Drawn by: {COMMAND}",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors of a few numbers
    draw(Path(__file__).with_name("reinforce.png"))
