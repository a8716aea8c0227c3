"""Draws the figure of lesson 14 from real runs, and writes their tables into README.md.

    python lessons/14_reward_hacking/figure.py

Runs what is missing first: nanorl.frontier, as lesson 05 does, and train_ppo.py with a labeller who loves long reviews,
three seeds of each. About an hour on one free core, most of which lesson 05 needs as well. All of it is kept in
runs/frontier.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # nanorl, if it is not installed

import solution

from nanorl import checkpoint, frontier, reward_model
from nanorl.evaluation import EVAL_SEED, grade
from nanorl.intervals import mean_and_half
from nanorl.paired import estimate, plus_minus, table
from nanorl.plots import evaluations, read_metrics, save
from nanorl.preferences import collect_pairs
from nanorl.processes import SCRIPT, Job, cores, run_all
from nanorl.sampler import Sampler
from nanorl.tasks import Reviews
from nanorl.tasks.reviews import FOLLOWS, KIND, claims
from nanorl.tasks.reviews import gold as gold_of

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path("runs") / "frontier"  # from ROOT
SEEDS = 3
BETA = 0.1  # of the two labellers' runs
TEACHERS = "PPO, beta 0.05"  # whose runs asked for the pairs that all reward models of the labeller gold learned from
COMMAND = "python lessons/14_reward_hacking/figure.py"
RESPONSES = 2048  # of the warm start, to look for a length bias in
SHOWN_STEPS = (0, 10, 20, 30, 40, 50, 70, 90, 120, 150)  # of the responses without KL
SHOWN_AT_END = 2  # responses of each seed without KL
BINS = np.array([1, 5, 10, 16, 21])  # tokens, of the lower left panel: what 0, 1, 2 and 3 claims take
PEOPLE = {"gold": "tab:orange", "length": "tab:purple"}  # labeller -> color


def measured() -> tuple[dict, dict[str, list[Path]]]:
    """What frontier.json holds, and the folders of PPO's runs by labeller; all of it made now where it is missing."""
    command = ["-m", "nanorl.frontier", "--seeds", str(SEEDS), "--out", str(RUNS), *sys.argv[1:]]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    found = json.loads((ROOT / RUNS / "frontier.json").read_text())
    script, arguments = SCRIPT.with_name("train_ppo.py"), ("--labeller", "length", "--beta", f"{BETA:g}")
    name = f"ppo-length-{frontier.digest(script, arguments)}"
    jobs = [Job("PPO, labeller length", s, ROOT / RUNS / f"{name}-seed-{s}", arguments, script) for s in range(SEEDS)]
    run_all(jobs, 1 if "--processes" in sys.argv else cores(), frontier.say)
    same_beta = [ROOT / RUNS / name for name in found["runs"][f"PPO, beta {BETA:g}"]]
    return found, {"gold": same_beta, "length": [job.out for job in jobs]}


def courses(outs: Sequence[Path], name: str) -> tuple[list[int], torch.Tensor]:
    """Steps, and (seeds, steps) of an evaluation's number."""
    points = [evaluations(out, read_metrics(out)) for out in outs]
    values = [[evaluation[name] for _, evaluation in of_seed] for of_seed in points]
    return [step for step, _ in points[0]], torch.tensor(values, dtype=torch.float64)


@torch.no_grad()
def opinions(out: Path) -> dict[str, torch.Tensor]:
    """Gold, length and the reward model's score of RESPONSES of the policy that a run started from, (RESPONSES,)."""
    task = Reviews()
    policy = checkpoint.load_model(checkpoint.complete(out / "checkpoint")[0], "reference")
    judge, _ = reward_model.load(out)
    problems = task.held_out_problems(RESPONSES)
    rollout = Sampler(policy).generate(
        [task.tokenizer.encode_prompt(problem.prompt) for problem in problems],
        max_new_tokens=task.max_new_tokens,
        stop_ids=[task.tokenizer.eos_id],
        seed=EVAL_SEED,
    )
    golds = torch.tensor(grade(task, problems, rollout)[0], dtype=torch.float64)
    return {"gold": golds, "length": rollout.lengths.double(), "score": judge.outcomes(rollout).double()}


def band(axes, x, values: torch.Tensor, color: str, label: str, line: str = "-", shade: float = 0.12) -> None:
    """(seeds, points): mean and interval, seeds thin."""
    mean, half = mean_and_half(values)
    axes.plot(x, values.T, color=color, lw=0.7, alpha=0.5)
    axes.plot(x, mean, line, color=color, label=label)
    axes.fill_between(x, mean - half, mean + half, color=color, alpha=shade, lw=0)


def draw(path: Path) -> None:
    found, people = measured()
    said = {who: [opinions(out) for out in outs] for who, outs in people.items()}
    figure, ((course, held), (bias, longer)) = plt.subplots(2, 2, figsize=(12, 9))
    frontier.draw_course(course, found["course"])
    seen = np.array([found["course"][name]["values"] for name in ("gold", "proxy")], float)
    course.set(ylim=(seen.min() - 1, seen.max() + 1))  # three seeds' intervals would reach far beyond what was seen
    runs = [(name.removeprefix("PPO, beta "), outs) for name, outs in found["runs"].items() if "PPO" in name]
    for number, (beta, outs) in enumerate(runs):
        shade = 0.12 if float(beta) else 0.0  # without KL the seeds are so far apart that it would cover all
        band(held, *courses([ROOT / RUNS / out for out in outs], "gold"), f"C{number}", f"beta {beta}", shade=shade)
    low = min(courses([ROOT / RUNS / out for out in outs], "gold")[1].mean(0).min().item() for b, outs in runs[:-1])
    held.set(xlabel="step of PPO", ylabel="gold on held-out prompts", ylim=(low - 2, 3))
    held.set_title("What beta holds back", fontsize=11)
    for who in people:
        color = PEOPLE[who]
        band(bias, (BINS[1:] + BINS[:-1]) / 2, by_length(said[who], "score"), color, f"reward model, labeller {who}")
        band(longer, *courses(people[who], "mean_length"), color, f"length, labeller {who}")
    of_gold = [{**one, "score": (one["gold"] - one["gold"].mean()) / one["gold"].std()} for one in said["gold"]]
    band(bias, (BINS[1:] + BINS[:-1]) / 2, by_length(of_gold, "score"), "0.4", "gold itself", ":")
    bias.set(xlabel="length of a response of the warm start (tokens)", ylabel="mean score (standard deviations)")
    bias.set_title("Before PPO: what each reward model thinks of long responses", fontsize=11)
    longer.set(xlabel="step of PPO", ylabel="mean length of responses (tokens)", ylim=(0, None))
    longer.set_title(f"PPO with beta {BETA:g}: what becomes of it", fontsize=11)
    for axes in (held, bias, longer):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left", fontsize=8)
    figure.suptitle(title(found["course"]))
    save(figure, path, f"Mean and 95 % interval of {SEEDS} seeds. Drawn by: {COMMAND}")
    page = path.with_name("README.md")
    hacked, teachers = ([ROOT / RUNS / out for out in found["runs"][name]] for name in ("PPO, beta 0", TEACHERS))
    write_between(page, "course", of_course(found["course"]))
    write_between(page, "turns", of_turns(found))
    write_between(page, "responses", of_responses(hacked[0]))
    write_between(page, "ends", of_ends(hacked))
    write_between(page, "seen", of_seen(teachers, hacked))
    write_between(page, "labellers", of_labellers(people, said))


def title(course: dict) -> str:
    gold, proxy = (course[name]["mean"] for name in ("gold", "proxy"))
    best = max(range(len(gold)), key=lambda i: gold[i])
    return (
        f"Without KL gold rises to {gold[best]:.2f} at step {course['steps'][best]}, then falls to {gold[-1]:.2f}, "
        f"while the proxy goes from {proxy[best]:.2f} to {proxy[-1]:.2f}"
    )


def by_length(said: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    """(seeds, bins): the mean of responses whose length falls into each of BINS; NaN where there are none."""
    rows = []
    for one in said:
        of_bin = torch.bucketize(one["length"], torch.tensor(BINS, dtype=torch.float64), right=True) - 1
        rows.append([one[name][of_bin == number].mean().item() for number in range(len(BINS) - 1)])
    return torch.tensor(rows, dtype=torch.float64)


def of_course(course: dict) -> str:
    names = {"gold": "gold", "proxy": "proxy", "kl": "KL (nats a response)", "mean_length": "length (tokens)"}
    rows = [["step", *names.values()]]
    for at, step in enumerate(course["steps"]):
        cells = [{key: course[name][key][at] for key in ("mean", "half")} | {"values": []} for name in names]
        rows.append([str(step), *map(plus_minus, cells)])
    return table(rows)


def of_turns(found: dict) -> str:
    """Of each run of PPO: its best evaluation by gold, its end, and when the script warned."""
    rows = [
        ["beta", "seed", "best gold", "at step", "at KL", "proxy there", "gold at the end", "proxy", "KL", "warned"]
    ]
    for name, outs in found["runs"].items():
        for seed, out in enumerate(outs if name.startswith("PPO") else []):
            points = evaluations(ROOT / RUNS / out, read_metrics(ROOT / RUNS / out))
            step, best = max(points, key=lambda point: point[1]["gold"])
            last = points[-1][1]
            row = [name.removeprefix("PPO, beta "), str(seed), f"{best['gold']:.2f}", str(step), f"{best['kl']:.1f}"]
            row += [f"{best['proxy']:.2f}", f"{last['gold']:.2f}", f"{last['proxy']:.2f}", f"{last['kl']:.1f}"]
            rows.append([*row, str(warned(points))])
    return table(rows)


def warned(points: list[tuple[int, dict]]) -> int | str:
    """The first step at which train_ppo.py warns of over-optimization."""
    best = points[0][1]
    for step, now in points[1:]:
        if now["gold"] > best["gold"]:
            best = now
        elif now["gold_high"] < best["gold_low"] and now["proxy"] > best["proxy"]:
            return step
    return "-"


def samples(out: Path) -> dict[int, list[tuple[str, str, str]]]:
    """step -> (prompt, response, proxy) of each response of the training batch of that step."""
    lines = (out / "samples.txt").read_text().splitlines()
    found: dict[int, list[tuple[str, str, str]]] = {}
    for line in lines:
        if head := re.fullmatch(r"--- after (\d+) steps", line):
            found[int(head[1])] = batch = []
        else:
            text, _, scores = line.rpartition("   ")  # gold 1  proxy 0.5
            batch.append((*re.fullmatch(r"( the \w+ was(?: very)? \w+) (.*)", text).groups(), scores.split()[-1]))
    return found


def shown(prompt: str, response: str, proxy: str) -> list[str]:
    return [f"*{prompt.strip()}* {response.strip()}", f"{float(proxy):.2f}", f"{gold_of(prompt, response):.1f}"]


def of_responses(out: Path) -> str:
    """The first response of each batch in SHOWN_STEPS, not a chosen one."""
    rows = [[str(step), *shown(*batch[0])] for step, batch in samples(out).items() if step in SHOWN_STEPS]
    return list_of([["step", "prompt and response", "proxy", "gold"], *rows])


def of_ends(outs: Sequence[Path]) -> str:
    """The first responses of each seed's last shown batch."""
    rows = [
        [str(seed), *shown(*one)]
        for seed, out in enumerate(outs)
        for one in [*samples(out).values()][-1][:SHOWN_AT_END]
    ]
    return list_of([["seed", "prompt and response", "proxy", "gold"], *rows])


def list_of(rows: Sequence[Sequence[str]]) -> str:
    """A table whose texts are too long to be padded."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def asked_about(out: Path) -> list[tuple[str, str]]:
    """(prompt, response) of all pairs that a run's reward model learned from, asked for once more."""
    options, task = json.loads((out / "config.json").read_text())["options"], Reviews()
    policy = checkpoint.load_model(checkpoint.complete(out / "checkpoint")[0], "reference")
    asking = {"seed": options["seed"], "labeller": options["labeller"], "max_new_tokens": task.max_new_tokens}
    pairs, _ = collect_pairs(policy, task, int(options["pairs"]), **asking)
    decode, stop = task.tokenizer.decode, task.tokenizer.eos_id
    both = [(pair.prompt, ids) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    return [(decode(prompt), decode([token for token in ids if token != stop])) for prompt, ids in both]


def faults(prompt: str, response: str) -> dict[str, int]:
    """What gold takes points for, as counts."""
    before, words = prompt.split(), response.split()
    text, said, again = before + words, set(), 0
    for noun, adjective in claims(text):
        again += bool({noun, adjective} & said)
        said |= {noun, adjective}
    broken = sum(KIND[b] not in FOLLOWS[KIND[a]] for a, b in itertools.pairwise(text[len(before) - 1 :]))
    return {"broken": broken + (words[-1:] != ["."]), "again": again, "words": len(words)}


def of_seen(teachers: Sequence[Path], hacked: Sequence[Path]) -> str:
    """What the reward models were asked about, and what the policies without KL write at the end."""
    rows = [["seed", "responses", "words", "said again", "breaches of grammar", "with one", "with two or more"]]
    for seed, (teacher, out) in enumerate(zip(teachers, hacked, strict=True)):
        end = [faults(prompt, response) for prompt, response, _ in [*samples(out).values()][-1]]
        pairs = [faults(*one) for one in asked_about(teacher)]
        for name, found in ((f"of the {len(pairs) // 2:,} pairs", pairs), ("at the end", end)):
            means = [np.mean([one[key] for one in found]) for key in ("words", "again", "broken")]
            shares = [np.mean([one["broken"] >= least for one in found]) for least in (1, 2)]
            rows.append([str(seed), name, f"{means[0]:.1f}", *(f"{x:.2f}" for x in means[1:])])
            rows[-1] += [f"{100 * share:.2f} %" for share in shares]
    return table(rows)


def of_labellers(people: dict[str, list[Path]], said: dict[str, list[dict]]) -> str:
    rows = [["", *(f"labeller {who}" for who in people)]]

    def row(name: str, value) -> None:
        rows.append([name, *(plus_minus(estimate([value(who, seed) for seed in range(SEEDS)])) for who in people)])

    def correlation(who: str, seed: int, a: str, b: str) -> float:
        return reward_model.correlation(said[who][seed][a], said[who][seed][b])

    def summary(who: str, seed: int) -> dict:
        return json.loads((people[who][seed] / "summary.json").read_text())

    row(
        "accuracy on fresh pairs of the same labeller", lambda who, seed: summary(who, seed)["reward_model"]["accuracy"]
    )
    row("correlation of score and gold", lambda who, seed: correlation(who, seed, "score", "gold"))
    row("correlation of score and length", lambda who, seed: correlation(who, seed, "score", "length"))
    row("the same among responses of equal gold", lambda who, seed: solution.length_bias(**said[who][seed]))
    row("correlation of gold and length", lambda who, seed: correlation(who, seed, "gold", "length"))
    for name, key in (("gold", "gold"), ("length", "mean_length"), ("KL", "kl")):
        row(f"{name} after PPO", lambda who, seed, key=key: summary(who, seed)["eval_after"][key])
    return table(rows)


def write_between(page: Path, name: str, text: str) -> None:
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    draw(Path(__file__).with_name("hacking.png"))
