"""Draws the figure of lesson 02 from real runs, and prints the numbers that the lesson quotes.

    python lessons/02_supervised_fine_tuning/figure.py

Runs what is missing first: four ways of training (imitate.py) x three seeds, about 40 seconds each on one free core.
What they showed is kept in runs/lesson_02; remove that folder to measure anew.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import imitate
import matplotlib.pyplot as plt
import torch
from imitate import EXAMINED, SAMPLES, STEPS, TASK, WAYS
from torch import Tensor

from nanorl.evaluation import EVAL_SEED, evaluate
from nanorl.model import GPT
from nanorl.plots import GREEDY, SAMPLED, save
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.sft import MICRO_BATCH
from nanorl.tasks.chain import THINKING_SHARE, think

RUNS = Path(__file__).resolve().parents[2] / "runs" / "lesson_02"
SEEDS = range(3)
LOSS_EVERY, LOSS_PROBLEMS = 10, 200  # steps between looks at the loss; held-out demonstrations for it
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
    """Of which exactly THINKING_SHARE think, so that the loss of the choice has the floor it has in training."""
    problems = TASK.held_out_problems(LOSS_PROBLEMS)
    shown = [think(problem.prompt) for problem in problems[: round(THINKING_SHARE * LOSS_PROBLEMS)]]
    shown += [">"] * (LOSS_PROBLEMS - len(shown))
    return Rollout.from_responses(
        [TASK.tokenizer.encode_prompt(problem.prompt) for problem in problems],
        [TASK.tokenizer.encode_response(s + problem.answer) for s, problem in zip(shown, problems, strict=True)],
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


@torch.no_grad()
def chance_to_think(policy: GPT) -> float:
    """The probability of `<` behind a held-out prompt, mean over prompts: exact where a count of samples is not."""
    prompts = torch.tensor([TASK.tokenizer.encode_prompt(p.prompt) for p in TASK.held_out_problems(EXAMINED)])
    logits = policy(prompts)[:, -1] @ policy.head.T  # (EXAMINED, V)
    return logits.softmax(-1)[:, TASK.tokenizer.encode("<")[0]].mean().item()


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


def run(way: str, seed: int) -> dict:
    """What one run showed, from runs/lesson_02 if it is there."""
    path = RUNS / f"{way}_{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    print(f"{way}, seed {seed} ...", flush=True)
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
    imitate.imitate(policy, way, seed, report)
    result["evaluation"] = evaluate(
        policy, TASK, TASK.held_out_problems(EXAMINED), TASK.max_new_tokens, samples=SAMPLES
    )
    result["evaluation"]["chance_to_think"] = chance_to_think(policy)
    result["by_start"] = {start: accuracy_from(policy, start, EXAMINED) for start in STARTS}
    RUNS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    return result


def curve(axes, x: list[int], values: Tensor, color: str, label: str) -> None:
    """Each seed thin, the mean thick. values (seeds, points)."""
    axes.plot(x, values.T, color=color, lw=0.7, alpha=0.6)
    axes.plot(x, values.mean(0), color=color, lw=2, label=label)


def bars(axes, x: Tensor, values: Tensor, color: str, width: float, label: str | None = None) -> None:
    """The mean as a bar, each seed as a point. values (seeds, bars)."""
    axes.bar(x, values.mean(0), width, color=color, label=label)
    for place, mean, top in zip(x.tolist(), values.mean(0).tolist(), values.amax(0).tolist(), strict=True):
        axes.text(place, top + 0.03, f"{mean:.2f}", ha="center", fontsize=9)
    axes.plot(x.expand_as(values).flatten(), values.flatten(), "k.", ms=4)


def draw(path: Path) -> None:
    runs = {way: [run(way, seed) for seed in SEEDS] for way in WAYS}
    plain = runs["as-it-should-be"]
    figure, ((loss, thinking), (mistakes, mixture)) = plt.subplots(2, 2, figsize=(11.5, 8))

    at = [point["step"] for point in plain[0]["by_kind"]]
    for kind, (label, color) in KINDS.items():
        curve(loss, at, torch.tensor([[point[kind] for point in r["by_kind"]] for r in plain]), color, label)
    loss.axhline(CHOICE_FLOOR, color=SAMPLED, ls=":", lw=1.5)
    loss.text(STEPS, CHOICE_FLOOR + 0.05, f"entropy of the mixture: {CHOICE_FLOOR:.2f}", ha="right", fontsize=9)
    loss.set(ylabel="cross-entropy, held out (nats a token)", ylim=(0, 3), title="What the loss is made of")

    for way, color, label in (
        ("as-it-should-be", SAMPLED, "loss on the response"),
        ("with-prompt", GREEDY, "prompt trained too"),
    ):
        points = [r["thinking_right"] for r in runs[way]]
        curve(
            thinking, [step for step, _ in points[0]], torch.tensor([[a for _, a in p] for p in points]), color, label
        )
    thinking.set(
        ylabel="accuracy when made to think", ylim=(0, 1.02), title="Training the prompt too is slower, if anything"
    )

    names = {"truncated_share": "never ends", "chance_to_think": "thinks\n(probability)", "pass@1": "is right"}
    for i, (way, color, label) in enumerate(
        (
            ("as-it-should-be", SAMPLED, "as it should be"),
            ("without-stop", "tab:red", "stop token not shown"),
            ("own-means", "tab:purple", "a mean for each micro-batch"),
        )
    ):
        values = torch.tensor([[r["evaluation"][name] for name in names] for r in runs[way]])
        bars(mistakes, torch.arange(len(names)) + 0.27 * (i - 1), values, color, 0.24, label)
    mistakes.set_xticks(range(len(names)), list(names.values()))
    mistakes.set(ylabel="share of responses", title="Two mistakes, one line each")

    values = [[r["evaluation"][n] for n in ("chance_to_think", "pass@1", "accuracy_greedy")] for r in plain]
    values = torch.tensor([v + [r["by_start"][start] for start in STARTS] for v, r in zip(values, plain, strict=True)])
    bars(mixture, torch.arange(5), values, SAMPLED, 0.7)
    mixture.patches[0].set_color("0.6")
    mixture.axhline(THINKING_SHARE, xmin=0.02, xmax=0.18, color="k", ls=":", lw=1.5)
    mixture.set_xticks(
        range(5),
        ["thinks\n(probability)", "right,\nsampled", "right,\ngreedy", *(f"right,\n{s}" for s in STARTS.values())],
    )
    mixture.set(ylabel="share of responses", title="It imitates the mixture; thinking would be right")

    for axes in (loss, thinking):
        axes.set(xlabel="step (updates)")
        axes.legend(loc="center right" if axes is loss else "upper left", fontsize=9)
    mistakes.legend(loc="upper right", fontsize=9)
    for axes in (mistakes, mixture):
        axes.set_ylim(0, 1.12)
    for axes in (loss, thinking, mistakes, mixture):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    sampled, made_to_think = values[:, 1].mean(), values[:, 3].mean()
    figure.suptitle(
        f"Imitation learns how to think ({made_to_think:.2f} right), not that it pays ({sampled:.2f} right in all)"
    )
    save(
        figure,
        path,
        f"{len(SEEDS)} seeds: thin lines and points; mean: thick lines and bars. Drawn by: {COMMAND}",
    )
    report_numbers(runs)


def report_numbers(runs: dict[str, list[dict]]) -> None:
    """What README.md quotes."""
    names = ["pass@1", "accuracy_greedy", "chance_to_think", "accuracy_thinks", "mean_length", "truncated_share"]
    for way, results in runs.items():
        for seed, r in zip(SEEDS, results, strict=True):
            shown = "  ".join(f"{name} {r['evaluation'][name]:.3f}" for name in names)
            starts = "  ".join(f"from {start} {share:.3f}" for start, share in r["by_start"].items())
            print(f"{way}, seed {seed}: {shown}  {starts}  loss of the last 20 steps {sum(r['loss'][-20:]) / 20:.3f}")
        print(
            "    step: made to think, right  "
            + ", ".join(
                f"{step[0][0]}: " + " ".join(f"{share:.2f}" for _, share in step)
                for step in zip(*(r["thinking_right"] for r in results), strict=True)
            )
        )
    print("loss by kind, mean over seeds")
    for point in zip(*(r["by_kind"] for r in runs["as-it-should-be"]), strict=True):
        if point[0]["step"] % 40 == 0:
            means = (f"{kind} {sum(p[kind] for p in point) / len(point):.3f}" for kind in KINDS)
            print(f"    {point[0]['step']:3d}  " + "  ".join(means))


if __name__ == "__main__":
    torch.set_num_threads(1)  # more are slower for a model this small
    draw(Path(__file__).with_name("imitation.png"))
