"""Draws the figure of lesson 02 from real runs, and prints the numbers that the lesson quotes.

    python lessons/02_supervised_fine_tuning/figure.py

Runs what is missing first: three ways of training (imitate.py) x three seeds, about 40 seconds each on one free core.
What they showed is kept in runs/lesson_02; remove that folder to measure anew.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import imitate
import matplotlib

matplotlib.use("Agg")  # no screen needed
import matplotlib.pyplot as plt
import torch
from imitate import EXAMINED, STEPS, TASK, TRAINED_ON
from torch import Tensor

from nanorl.evaluation import EVAL_SEED, evaluate
from nanorl.model import GPT
from nanorl.plots import GREEDY, SAMPLED
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.sft import MICRO_BATCH, warm_start
from nanorl.tasks.chain import THINKING_SHARE

RUNS = Path(__file__).resolve().parents[2] / "runs" / "lesson_02"
SEEDS = range(3)
LOSS_EVERY, LOSS_PROBLEMS = 10, 256  # steps between looks at the loss; held-out demonstrations for it
THINK_EVERY, THINK_PROBLEMS = 20, 256  # steps between looks at the accuracy; held-out problems for it
KINDS = {  # of the tokens of a demonstration: label, color
    "guessed": ("digit of a direct answer", "tab:red"),
    "choice": ("first token: think or not", SAMPLED),
    "worked out": ("results of the steps", "tab:green"),
    "rest": ("all that is copied, and the stop token", "0.5"),
}
STARTS = {"<": "made\nto think", ">": "made to\nanswer"}
CHOICE_FLOOR = -sum(p * math.log(p) for p in (THINKING_SHARE, 1 - THINKING_SHARE))  # nats
COMMAND = "python lessons/02_supervised_fine_tuning/figure.py"


def held_out_demonstrations() -> Rollout:
    problems = TASK.held_out_problems(LOSS_PROBLEMS)
    return Rollout.from_responses(
        [TASK.tokenizer.encode_prompt(problem.prompt) for problem in problems],
        [TASK.tokenizer.encode_response(TASK.demonstration(problem, "held out")) for problem in problems],
    )


def kinds(part: Rollout) -> dict[str, Tensor]:
    """Which tokens (b, T) of demonstrations are of which kind; every token of a response is of one."""
    equals, close = (TASK.tokenizer.encode(mark)[0] for mark in "=>")
    before = torch.nn.functional.pad(part.tokens, (1, 0))[:, :-1]  # (b, T) the token before each
    place = torch.arange(part.tokens.shape[1])
    found = {
        "guessed": (place == 1) & (part.tokens[:, :1] == close),
        "choice": (place == 0).expand_as(part.mask),
        "worked out": (place > 0) & (before == equals),
    }
    found["rest"] = ~torch.stack(list(found.values())).any(0)
    return {kind: which & part.mask for kind, which in found.items()}


@torch.no_grad()
def loss_by_kind(policy: GPT, shown: Rollout) -> dict[str, float]:
    """Mean cross-entropy of each kind of token (nats)."""
    sums, counts = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    for part in shown.split(MICRO_BATCH):
        logprobs, _ = score(policy, part)
        for kind, which in kinds(part).items():
            sums[kind] -= logprobs[which].sum().item()
            counts[kind] += int(which.sum())
    return {kind: sums[kind] / counts[kind] for kind in KINDS}


def accuracy_from(policy: GPT, start: str, n: int) -> float:
    """On n held-out problems, sampled at temperature 1, when the response's first token is given."""
    problems = TASK.held_out_problems(n)
    rollout = Sampler(policy).generate(
        [TASK.tokenizer.encode_prompt(problem.prompt + start) for problem in problems],
        max_new_tokens=TASK.max_new_tokens - 1,
        stop_ids=[TASK.tokenizer.eos_id],
        seed=EVAL_SEED,
    )
    texts = rollout.texts(TASK.tokenizer)
    return sum(TASK.reward(problem, start + text) for problem, text in zip(problems, texts, strict=True)) / n


def run(trained_on: str, seed: int) -> dict:
    """What one run showed, from runs/lesson_02 if it is there."""
    path = RUNS / f"{trained_on.replace(' ', '_')}_{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    print(f"training on the {trained_on}, seed {seed} ...", flush=True)
    policy, shown = imitate.new_policy(seed), held_out_demonstrations()
    result = {"loss": [], "by_kind": [], "thinking_right": []}

    def look(done: int) -> None:
        if done % LOSS_EVERY == 0:
            result["by_kind"].append({"step": done, **loss_by_kind(policy, shown)})
        if done % THINK_EVERY == 0:
            result["thinking_right"].append((done, accuracy_from(policy, "<", THINK_PROBLEMS)))

    def report(step: int, loss: float) -> None:
        result["loss"].append(loss)
        look(step + 1)

    look(0)
    warm_start(policy, TRAINED_ON[trained_on], steps=STEPS, seed=seed, report=report)
    result["evaluation"] = evaluate(policy, TASK, TASK.held_out_problems(EXAMINED), TASK.max_new_tokens)
    result["by_start"] = {start: accuracy_from(policy, start, EXAMINED) for start in STARTS}
    RUNS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    return result


def curve(axes, x: list[int], values: Tensor, color: str, label: str) -> None:
    """Each seed thin, the mean thick. values (seeds, points)."""
    axes.plot(x, values.T, color=color, lw=0.7, alpha=0.6)
    axes.plot(x, values.mean(0), color=color, lw=2, label=label)


def bars(axes, x: Tensor, values: Tensor, color: str, label: str | None = None) -> None:
    """The mean as a bar, each seed as a point. values (seeds, bars)."""
    drawn = axes.bar(x, values.mean(0), 0.36 if label else 0.7, color=color, label=label)
    axes.bar_label(drawn, fmt="%.2f", fontsize=9, padding=3)
    axes.plot(x.expand_as(values).flatten(), values.flatten(), "k.", ms=4)


def draw(path: Path) -> None:
    runs = {trained_on: [run(trained_on, seed) for seed in SEEDS] for trained_on in TRAINED_ON}
    plain = runs["response"]
    figure, ((loss, think), (stop, mixture)) = plt.subplots(2, 2, figsize=(11.5, 8))

    at = [point["step"] for point in plain[0]["by_kind"]]
    for kind, (label, color) in KINDS.items():
        curve(loss, at, torch.tensor([[point[kind] for point in r["by_kind"]] for r in plain]), color, label)
    loss.axhline(CHOICE_FLOOR, color=SAMPLED, ls=":", lw=1.5)
    loss.text(STEPS, CHOICE_FLOOR + 0.05, f"entropy of the 30/70 mixture: {CHOICE_FLOOR:.2f}", ha="right", fontsize=9)
    loss.set(ylabel="cross-entropy, held out (nats a token)", ylim=(0, 3), title="What the loss is made of")

    styles = {"response": (SAMPLED, "loss on the response"), "prompt and response": (GREEDY, "prompt trained too")}
    for trained_on, (color, label) in styles.items():
        points = [r["thinking_right"] for r in runs[trained_on]]
        curve(think, [step for step, _ in points[0]], torch.tensor([[a for _, a in p] for p in points]), color, label)
    think.set(ylabel="accuracy when made to think", ylim=(0, 1.02), title="Training the prompt too changes little here")

    pairs = [("response", "stop token trained", SAMPLED), ("response without stop", "left out", "tab:red")]
    names = {"truncated_share": "never ends", "accuracy": "right, sampled", "accuracy_thinks": "right when\nit thinks"}
    for i, (trained_on, label, color) in enumerate(pairs):
        values = torch.tensor([[r["evaluation"][name] for name in names] for r in runs[trained_on]])
        bars(stop, torch.arange(len(names)) + 0.4 * i - 0.2, values, color, label)
    stop.set_xticks(range(len(names)), list(names.values()))
    stop.set(ylabel="share of 512 responses", title="Without the stop token no response ends")

    values = [[r["evaluation"][n] for n in ("thinks", "accuracy", "accuracy_greedy")] for r in plain]
    values = torch.tensor([v + [r["by_start"][start] for start in STARTS] for v, r in zip(values, plain, strict=True)])
    bars(mixture, torch.arange(5), values, SAMPLED)
    mixture.patches[0].set_color("0.6")
    mixture.axhline(THINKING_SHARE, xmin=0.02, xmax=0.18, color="k", ls=":", lw=1.5)
    mixture.set_xticks(
        range(5), ["thinks", "right,\nsampled", "right,\ngreedy", *(f"right,\n{s}" for s in STARTS.values())]
    )
    mixture.set(ylabel="share of 512 responses", title="It imitates the mixture; thinking would be right")

    for axes in (loss, think):
        axes.set(xlabel="step (updates)")
        axes.legend(loc="center right" if axes is loss else "upper left", fontsize=9)
    stop.legend(loc="upper right", fontsize=9)
    for axes in (stop, mixture):
        axes.set_ylim(0, 1.12)
    for axes in (loss, think, stop, mixture):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    sampled, made_to_think = values[:, 1].mean(), values[:, 3].mean()
    figure.suptitle(
        f"Imitation learns to think ({made_to_think:.2f} right), not that thinking is better ({sampled:.2f} right overall)"
    )
    figure.text(
        0.5,
        0.01,
        f"{len(SEEDS)} seeds: thin lines and points; mean: thick lines and bars. Drawn by: {COMMAND}",
        ha="center",
        fontsize=8,
        color="0.35",
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)
    report_numbers(runs)


def report_numbers(runs: dict[str, list[dict]]) -> None:
    """What README.md quotes."""
    names = ["accuracy", "accuracy_greedy", "thinks", "accuracy_thinks", "mean_length", "truncated_share"]
    for trained_on, results in runs.items():
        for seed, r in zip(SEEDS, results, strict=True):
            shown = "  ".join(f"{name} {r['evaluation'][name]:.3f}" for name in names)
            starts = "  ".join(f"{start} {share:.3f}" for start, share in r["by_start"].items())
            print(f"{trained_on}, seed {seed}: {shown}  from {starts}  last losses {sum(r['loss'][-20:]) / 20:.3f}")
        if trained_on == "response":
            for point in zip(*(r["by_kind"] for r in results), strict=True):
                if point[0]["step"] % 40 == 0 or point is results:
                    means = {kind: sum(p[kind] for p in point) / len(point) for kind in KINDS}
                    print(point[0]["step"], "  ".join(f"{kind} {value:.3f}" for kind, value in means.items()))
        if trained_on != "response without stop":
            for step in zip(*(r["thinking_right"] for r in results), strict=True):
                print(step[0][0], " ".join(f"{share:.2f}" for _, share in step))


if __name__ == "__main__":
    torch.set_num_threads(1)  # faster than two for a model this small
    draw(Path(__file__).with_name("imitation.png"))
