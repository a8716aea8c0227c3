"""Draws the figure of lesson 03 from real reward models, and writes their tables into README.md.

    python lessons/03_rewards_from_preferences/figure.py

Trains what is missing first: for each of three seeds the warm start of train_ppo.py, reward models on 250 to 8,000
pairs, one more for twice as many steps, and for one seed one that reads its score in the wrong place. About twenty
minutes on one core. Everything is kept in runs/lesson_03.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # train_ppo.py, and nanorl if it is not installed

import train_ppo
from nanorl.evaluation import wilson_interval
from nanorl.intervals import mean_and_half
from nanorl.losses import bradley_terry_loss
from nanorl.model import GPT
from nanorl.options import policy_shape, seed_generators
from nanorl.paired import table
from nanorl.plots import save
from nanorl.preferences import Pair, batch_of, collect_pairs
from nanorl.reward_model import BATCH, BINS, RewardModel, correlation, train_reward_model
from nanorl.rollout import Rollout
from nanorl.sft import cached_warm_start
from nanorl.tasks.reviews import GOOD, SHARPNESS, Reviews, gold

RUNS = Path(train_ppo.__file__).resolve().parent / "runs" / "lesson_03"
SEEDS = range(3)
SIZES = [250, 500, 1000, 2000, 8000]  # pairs to learn from, the first ones of the same list
ASKED, FRESH = 10_000, 4000  # pairs asked for: some are dropped
WRONG_SIZE, WRONG_SEED = 2000, 0  # pairs of the model that reads the padding, and the seed that has one
LONGER = 2  # times the steps, for one more model on the most pairs
SHOWN = {250: "tab:red", 1000: "tab:orange", 8000: "tab:blue"}  # in the reliability diagram
INDICES = {  # where the score of a trained model is read -> of (rollout) the column of `scores` (B, T + 1)
    "behind the last token": lambda rollout: rollout.lengths,
    "one token too early": lambda rollout: rollout.lengths - 1,
    "at the end of the padding": lambda rollout: torch.full_like(rollout.lengths, rollout.tokens.shape[1]),
    "behind the prompt": lambda rollout: torch.zeros_like(rollout.lengths),
}
COMMAND = "python lessons/03_rewards_from_preferences/figure.py"


class ReadsThePadding(RewardModel):
    """The silent bug: the score is that of the batch's last column, whatever stands there."""

    def outcomes(self, rollout: Rollout, *, raw: bool = False) -> Tensor:
        return self.scores(rollout, raw=raw)[:, -1]


@torch.no_grad()
def scores_at(model: RewardModel, pairs: list[Pair], index=INDICES["behind the last token"]) -> list[list[float]]:
    """[[chosen, rejected], ...], raw, in batches as long as those of training."""
    found = []
    for start in range(0, len(pairs), BATCH):
        rollout, _ = batch_of(pairs[start : start + BATCH])
        scores = model.scores(rollout, raw=True).gather(1, index(rollout)[:, None]).squeeze(1)
        found += torch.stack(scores.chunk(2), dim=1).tolist()
    return found


def measured(seed: int) -> dict:
    """Of one seed's models: what they say about the same fresh pairs. Kept after each model."""
    path = RUNS / f"seed_{seed}.json"
    settings = {"asked": ASKED, "fresh": FRESH, "steps": train_ppo.Config().reward_model_steps, "batch": BATCH}
    done = json.loads(path.read_text()) if path.exists() else {}
    if done and done["settings"] != settings:
        sys.exit(f"{path} was made with other settings: remove it and start again")
    wanted = [str(size) for size in SIZES] + ["indices", "longer"] + ["reads the padding"] * (seed == WRONG_SEED)
    if all(name in done.get("scores", {}) for name in wanted):
        return done

    config, task = train_ppo.Config(seed=seed), Reviews()
    seed_generators(seed)
    policy = GPT(policy_shape(task, config.size, task.max_new_tokens))
    cached_warm_start(policy, task, RUNS / "warm_starts", steps=task.warm_start_steps, seed=seed)
    asking = {"seed": seed, "labeller": "gold", "max_new_tokens": task.max_new_tokens}
    pairs, dropped = collect_pairs(policy, task, ASKED, **asking)
    fresh, _ = collect_pairs(policy, task, FRESH, **asking, held_out=True)
    if len(pairs) < SIZES[-1]:
        sys.exit(f"only {len(pairs)} pairs were usable: raise ASKED")
    rollout, _ = batch_of(fresh)
    prompts, texts = [task.tokenizer.decode(prompt) for prompt in rollout.prompts], rollout.texts(task.tokenizer)
    golds = torch.tensor([gold(p, t) for p, t in zip(prompts, texts, strict=True)])
    done.setdefault("scores", {})
    done |= {"settings": settings, "pairs": len(pairs), "dropped": dropped, "prompts": prompts[: len(fresh)]}
    done |= {"gold": torch.stack(golds.chunk(2), 1).tolist()}
    done |= {"lengths": torch.stack(rollout.lengths.chunk(2), 1).tolist()}

    def trained(kind: type[RewardModel], size: int, longer: int = 1) -> RewardModel:
        model = kind.from_policy(policy)
        train_reward_model(model, pairs[:size], steps=settings["steps"] * longer, seed=seed)
        return model

    def keep(name: str, scores: list) -> None:
        done["scores"][name] = scores
        path.write_text(json.dumps(done))
        print(f"seed {seed}: {name}", flush=True)

    for size in SIZES:
        if str(size) not in done["scores"] or (size == SIZES[-1] and "indices" not in done["scores"]):
            model = trained(RewardModel, size)
            keep(str(size), scores_at(model, fresh))
            if size == SIZES[-1]:
                keep("indices", {name: scores_at(model, fresh, index) for name, index in INDICES.items()})
    if "longer" not in done["scores"]:
        keep("longer", scores_at(trained(RewardModel, SIZES[-1], LONGER), fresh))
    if seed == WRONG_SEED and "reads the padding" not in done["scores"]:
        model = trained(ReadsThePadding, WRONG_SIZE)
        padded = scores_at(model, fresh, INDICES["at the end of the padding"])
        keep("reads the padding", {"in batches": padded, "alone": scores_at(model, fresh)})
    return done


def pairs_of(scores: list) -> tuple[Tensor, Tensor]:
    """chosen, rejected (n,)"""
    return tuple(torch.tensor(scores, dtype=torch.float64).T)


def quality(chosen: Tensor, rejected: Tensor) -> dict[str, float]:
    """As `nanorl.reward_model.examine` has it."""
    sure, right = certainty(chosen, rejected)
    distance = sum(abs(p - q) * n for p, q, n in reliability(sure, right))
    loss, _ = bradley_terry_loss(chosen, rejected)
    return {"accuracy": right.mean().item(), "loss": loss.item(), "off by": distance / len(sure)}


def certainty(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) the probability a model gives its favourite, and whether that one was chosen."""
    return (chosen - rejected).abs().sigmoid(), (chosen > rejected).double()


def reliability(sure: Tensor, right: Tensor) -> list[tuple[float, float, int]]:
    """(mean certainty, share right, pairs) of each bin."""
    bins = ((sure - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    inside = [bins == b for b in bins.unique()]
    return [(sure[rows].mean().item(), right[rows].mean().item(), int(rows.sum())) for rows in inside]


def best_possible(done: dict) -> dict[str, float]:
    """Of a model that knows the gold score and how sharply people judge by it."""
    return quality(*(SHARPNESS * x for x in pairs_of(done["gold"])))


def gold_and_scores(done: dict, size: int) -> tuple[Tensor, Tensor, list[str]]:
    """(2 n,) of all responses, and their prompts."""
    golds, scores = (torch.cat(pairs_of(x)) for x in (done["gold"], done["scores"][str(size)]))
    return golds, scores, done["prompts"] * 2


def within_prompts(values: Tensor, prompts: list[str]) -> Tensor:
    """Less the mean of the responses to the same prompt."""
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    index = torch.tensor([number[prompt] for prompt in prompts])
    sums = torch.zeros(len(number), dtype=values.dtype).index_add(0, index, values)
    return values - (sums / torch.bincount(index))[index]


def draw(path: Path) -> None:
    seeds = [measured(seed) for seed in SEEDS]
    found = [{size: quality(*pairs_of(d["scores"][str(size)])) for size in SIZES} for d in seeds]
    best = [best_possible(d) for d in seeds]
    figure, ((accuracy, reliable), (scatter, where)) = plt.subplots(2, 2, figsize=(11, 8.6))

    values = torch.tensor([[f[size]["accuracy"] for size in SIZES] for f in found])  # (seeds, sizes)
    mean, half = mean_and_half(values)
    accuracy.plot(SIZES, values.T, color="tab:blue", lw=0.7, alpha=0.5)
    accuracy.plot(SIZES, mean, color="tab:blue", lw=2, marker="o", ms=4, label="reward model")
    accuracy.fill_between(SIZES, mean - half, mean + half, color="tab:blue", alpha=0.2, lw=0)
    longer = [quality(*pairs_of(d["scores"]["longer"])) for d in seeds]
    dots = [SIZES[-1]] * len(seeds), [f["accuracy"] for f in longer]
    accuracy.plot(*dots, "*", color="tab:purple", ms=8, alpha=0.8, label="twice the steps")
    mean, half = (x.item() for x in mean_and_half([b["accuracy"] for b in best]))
    accuracy.axhline(mean, color="k", ls="--", label="knows the gold score: the best possible")
    accuracy.axhspan(mean - half, mean + half, color="k", alpha=0.1, lw=0)
    accuracy.set(
        xscale="log",
        xlabel="pairs to learn from",
        ylabel="accuracy on fresh pairs",
        title="More pairs help; the labels' noise is not the limit",
    )
    accuracy.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
    accuracy.minorticks_off()
    accuracy.legend(loc="lower right", fontsize=9)

    for size, color in SHOWN.items():
        pooled = [certainty(*pairs_of(d["scores"][str(size)])) for d in seeds]
        for rows in pooled:
            reliable.plot(
                *zip(*[(p, q) for p, q, _ in reliability(*rows)], strict=True), color=color, lw=0.6, alpha=0.5
            )
        points = reliability(*(torch.cat(x) for x in zip(*pooled, strict=True)))
        p, q, n = zip(*points, strict=True)
        bars = [
            [max(0.0, end) for end in ends]
            for ends in zip(*(interval(q, n) for q, n in zip(q, n, strict=True)), strict=True)
        ]
        reliable.errorbar(p, q, yerr=bars, color=color, marker="o", ms=5, lw=1.5, capsize=3, label=f"{size:,} pairs")
    reliable.plot([0.5, 1], [0.5, 1], color="0.5", ls="--", label="says what it knows")
    reliable.set(
        xlabel="how sure of its favourite",
        ylabel="share of these that were chosen",
        title="A model that knows few pairs is far too sure",
    )
    reliable.legend(loc="upper left", fontsize=9)

    golds, scores, prompts = gold_and_scores(seeds[0], SIZES[-1])
    opened_well = torch.tensor([prompt.split()[-1] in GOOD for prompt in prompts])
    jitter = 0.25 * (torch.rand(len(golds), generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5)
    scores = scores - scores.mean()
    for rows, color, label in ((opened_well, "tab:green", "good"), (~opened_well, "tab:red", "bad")):
        scatter.plot(
            (golds + jitter)[rows],
            scores[rows],
            ".",
            ms=2,
            alpha=0.4,
            color=color,
            label=f"prompt opens with a {label} claim",
        )
    line = torch.tensor([golds.min(), golds.max()])
    scatter.plot(
        line, SHARPNESS * (line - golds.mean()), "k--", lw=1, label=f"slope {SHARPNESS:g}: what the labels follow"
    )
    scatter.set(
        xlabel="gold score of the response (hidden)",
        ylabel="learned score (mean 0)",
        title="Each prompt has a zero of its own",
    )
    scatter.legend(loc="upper left", fontsize=9, markerscale=5)

    names = list(INDICES)
    shares = torch.tensor(
        [[quality(*pairs_of(d["scores"]["indices"][name]))["accuracy"] for name in names] for d in seeds]
    )
    where.barh(range(len(names)), shares.mean(0), color=["tab:blue", "0.65", "0.65", "0.65"])
    for place, share in enumerate(shares.mean(0).tolist()):
        where.text(0.02, place, f"{share:.3f}" if share else f"{share:.3f}: all pairs tie", va="center")
    where.plot(shares.T, torch.arange(len(names))[:, None].expand(-1, len(seeds)), "k.", ms=4)
    where.axvline(0.5, color="0.5", ls="--")
    where.set_yticks(range(len(names)), [name.replace(" the ", " the\n") for name in names])
    where.invert_yaxis()
    where.set(xlabel="accuracy of the same models (dashed: chance)", xlim=(0, 1.05), title="Where the score is read")

    for axes in (accuracy, reliable, scatter):
        axes.grid(alpha=0.3)
    top = torch.tensor([f[SIZES[-1]]["accuracy"] for f in found]).mean().item()
    twice = torch.tensor([f["accuracy"] for f in longer]).mean().item()
    figure.suptitle(
        f"{SIZES[-1]:,} noisy comparisons teach a score that is right on {top:.1%} of fresh pairs, "
        f"on {twice:.1%} with twice the steps; {mean:.1%} is possible"
    )
    save(figure, path, f"{len(SEEDS)} seeds, each thin or a dot; 95 % intervals. Drawn by: {COMMAND}")
    page = path.with_name("README.md")
    write_between(page, "results", results(found, longer, best))
    write_between(page, "where", where_read(seeds))
    for line in facts(seeds):
        print(line)


def interval(share: float, n: int) -> tuple[float, float]:
    """How far the 95 % interval of a share of n reaches below and above it."""
    low, high = wilson_interval(round(share * n), n)
    return share - low, high - share


def estimate(values: list[float]) -> str:
    mean, half = (x.item() for x in mean_and_half(values))
    return f"{mean:.3f} ± {half:.3f}"


def results(found: list[dict], longer: list[dict], best: list[dict]) -> str:
    rows = [["pairs", "accuracy", "loss", "certainty off by"]]
    for size in SIZES:
        rows.append(
            [f"{size:,}", *(estimate([f[size][name] for f in found]) for name in ("accuracy", "loss", "off by"))]
        )
    for name, models in ((f"{SIZES[-1]:,}, twice the steps", longer), ("the best possible", best)):
        rows.append([name, *(estimate([m[key] for m in models]) for key in ("accuracy", "loss", "off by"))])
    return table(rows)


def where_read(seeds: list[dict]) -> str:
    rows = [["read", "accuracy", "loss"]]
    for name in INDICES:
        measures = [quality(*pairs_of(d["scores"]["indices"][name])) for d in seeds]
        rows.append([name, *(estimate([m[key] for m in measures]) for key in ("accuracy", "loss"))])
    return table(rows)


def facts(seeds: list[dict]) -> list[str]:
    """What the text quotes beside the tables."""
    lines = [f"pairs {[d['pairs'] for d in seeds]}, fresh {[len(d['gold']) for d in seeds]}"]
    lines.append(f"dropped {[d['dropped'] for d in seeds]}")
    for seed, done in zip(SEEDS, seeds, strict=True):
        golds, scores, prompts = gold_and_scores(done, SIZES[-1])
        centred = within_prompts(golds, prompts), within_prompts(scores, prompts)
        slope = (centred[0] @ centred[1] / (centred[0] @ centred[0])).item()
        lengths = torch.cat(pairs_of(done["lengths"]))
        lines.append(
            f"seed {seed}: correlation of score and gold {correlation(scores, golds):.3f}, within prompts "
            f"{correlation(*centred):.3f}, slope within prompts {slope:.2f}, with length: score "
            f"{correlation(scores, lengths):+.3f}, gold {correlation(golds, lengths):+.3f}"
        )
        for name, said in done["scores"].get("reads the padding", {}).items():
            lines.append(f"  reads the padding, {name}: {quality(*pairs_of(said))}")
    return lines


def write_between(page: Path, name: str, text: str) -> None:
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(Path(__file__).with_name("reward_model.png"))
