"""Draws the figure of lesson 03 from real reward models, and writes their tables into README.md.

    python lessons/03_rewards_from_preferences/figure.py

Trains what is missing first: for each of three seeds the warm start of train_ppo.py, reward models on 250 to 8,000
pairs, one more for half as many steps, and for one seed one that reads its score in the wrong place. About twenty
minutes on one core. Everything is kept in runs/lesson_03.
"""

from __future__ import annotations

import json
import random
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
from nanorl.tasks.reviews import BAD, GOOD, NOUNS, SHARPNESS, Reviews, claims, gold

RUNS = Path(train_ppo.__file__).resolve().parent / "runs" / "lesson_03"
SEEDS = range(3)
SIZES = [250, 1000, 2000, 8000]  # pairs to learn from, the first ones of the same list
ASKED, FRESH = 11_000, 4000  # pairs asked for: some are dropped
WRONG_SIZE, WRONG_SEED = 2000, 0  # pairs of the model that reads the padding, and the seed that has one
FEWER = 2  # the steps divided by this, for one more model on the most pairs
SHOWN = {250: "tab:red", 1000: "tab:orange", 8000: "tab:blue"}  # in the reliability diagram
INDICES = {  # where the score of a trained model is read -> of (rollout) the column of `scores` (B, T + 1)
    "behind the last token": lambda rollout: rollout.lengths,
    "one token too early": lambda rollout: rollout.lengths - 1,
    "at the end of the padding": lambda rollout: torch.full_like(rollout.lengths, rollout.tokens.shape[1]),
    "behind the prompt": lambda rollout: torch.zeros_like(rollout.lengths),
}
SAME_GOLD = {  # kinds of three claims -> what the hidden person thinks of them
    "three good claims": 3.0,
    "two of them bad": -1.0,
    "one noun three times": -1.0,
    "one adjective three times": -1.0,
}
DRAWS = 10  # of nouns and adjectives for each prompt
COMMAND = "python lessons/03_rewards_from_preferences/figure.py"


class ReadsThePadding(RewardModel):
    """The silent bug: the score is that of the batch's last column, whatever stands there."""

    def outcomes(self, rollout: Rollout, *, raw: bool = False) -> Tensor:
        return self.scores(rollout, raw=raw)[:, -1]


def written(kind: str, prompt: str, key: str) -> str:
    """Three claims of one of the kinds of SAME_GOLD, in words that the prompt has not used."""
    rng = random.Random(key)
    nouns = rng.sample([noun for noun in NOUNS if noun not in prompt.split()], 3)
    adjectives = rng.sample([adjective for adjective in GOOD if adjective not in prompt.split()], 3)
    if kind == "two of them bad":
        adjectives[1:] = rng.sample([adjective for adjective in BAD if adjective not in prompt.split()], 2)
    elif kind == "one noun three times":
        nouns = nouns[:1] * 3
    elif kind == "one adjective three times":
        adjectives = adjectives[:1] * 3
    return "".join(f" and the {n} was {a}" for n, a in zip(nouns, adjectives, strict=True)) + " ."


@torch.no_grad()
def scores_of_same_gold(model: RewardModel, task: Reviews) -> dict[str, float]:
    """Mean raw score of each kind, over the held-out prompts."""
    prompts = task.prompts[True] * DRAWS
    found = {}
    for kind, worth in SAME_GOLD.items():
        texts = [written(kind, prompt, f"same gold {i}") for i, prompt in enumerate(prompts)]
        assert all(gold(prompt, text) == worth for prompt, text in zip(prompts, texts, strict=True))
        ids = [task.tokenizer.encode_prompt(prompt) for prompt in prompts]
        rollout = Rollout.from_responses(ids, [task.tokenizer.encode_response(text) for text in texts])
        found[kind] = model.outcomes(rollout, raw=True).double().mean().item()
    return found


def seen(pairs: list[Pair], task: Reviews) -> dict[str, float]:
    """The share of responses to learn from that hold each kind of mistake."""
    rollout, _ = batch_of(pairs)
    count = dict.fromkeys(SAME_GOLD, 0)
    for prompt, text in zip(rollout.prompts, rollout.texts(task.tokenizer), strict=True):
        said = claims((task.tokenizer.decode(prompt) + text).split())
        nouns, adjectives = zip(*said, strict=True)
        count["two of them bad"] += any(adjective in BAD for adjective in adjectives[1:])
        count["one noun three times"] += len(set(nouns)) < len(nouns)
        count["one adjective three times"] += len(set(adjectives)) < len(adjectives)
    return {kind: n / (2 * len(pairs)) for kind, n in count.items()}


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
    wanted = [str(size) for size in SIZES] + ["indices", "shorter"] + ["reads the padding"] * (seed == WRONG_SEED)
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
    done |= {"lengths": torch.stack(rollout.lengths.chunk(2), 1).tolist(), "seen": seen(pairs[: SIZES[-1]], task)}

    def trained(kind: type[RewardModel], size: int, fewer: int = 1) -> RewardModel:
        model = kind.from_policy(policy)
        train_reward_model(model, pairs[:size], steps=settings["steps"] // fewer, seed=seed)
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
                done["same_gold"] = scores_of_same_gold(model, task)
                keep("indices", {name: scores_at(model, fresh, index) for name, index in INDICES.items()})
    if "shorter" not in done["scores"]:
        keep("shorter", scores_at(trained(RewardModel, SIZES[-1], FEWER), fresh))
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
    shorter = [quality(*pairs_of(d["scores"]["shorter"])) for d in seeds]
    dots = [SIZES[-1]] * len(seeds), [f["accuracy"] for f in shorter]
    accuracy.plot(*dots, "*", color="tab:purple", ms=8, alpha=0.8, label="half the steps")
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
    well = opened_well(prompts)
    jitter = 0.25 * (torch.rand(len(golds), generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5)
    scores = scores - scores.mean()
    for rows, color, label in ((well, "tab:green", "good"), (~well, "tab:red", "bad")):
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
    half_way = torch.tensor([f["accuracy"] for f in shorter]).mean().item()
    figure.suptitle(
        f"{SIZES[-1]:,} noisy comparisons teach a score that is right on {top:.1%} of fresh pairs, "
        f"on {half_way:.1%} with half the steps; {mean:.1%} is possible"
    )
    save(figure, path, f"{len(SEEDS)} seeds, each thin or a dot; 95 % intervals. Drawn by: {COMMAND}")
    page = path.with_name("README.md")
    write_between(page, "results", results(found, shorter, best))
    write_between(page, "where", where_read(seeds))
    write_between(page, "same gold", same_gold(seeds))
    write_between(page, "seeds", seed_by_seed(seeds))
    print(f"usable pairs {[d['pairs'] for d in seeds]}, dropped {[d['dropped'] for d in seeds]}")
    print(f"fresh pairs {[len(d['gold']) for d in seeds]}")


def interval(share: float, n: int) -> tuple[float, float]:
    """How far the 95 % interval of a share of n reaches below and above it."""
    low, high = wilson_interval(round(share * n), n)
    return share - low, high - share


def estimate(values: list[float]) -> str:
    mean, half = (x.item() for x in mean_and_half(values))
    return f"{mean:.3f} ± {half:.3f}"


def results(found: list[dict], shorter: list[dict], best: list[dict]) -> str:
    rows = [["pairs", "accuracy", "loss", "certainty off by"]]
    for size in SIZES:
        rows.append(
            [f"{size:,}", *(estimate([f[size][name] for f in found]) for name in ("accuracy", "loss", "off by"))]
        )
    for name, models in ((f"{SIZES[-1]:,}, half the steps", shorter), ("the best possible", best)):
        rows.append([name, *(estimate([m[key] for m in models]) for key in ("accuracy", "loss", "off by"))])
    return table(rows)


def where_read(seeds: list[dict]) -> str:
    rows = [["read", "accuracy", "loss"]]
    for name in INDICES:
        measures = [quality(*pairs_of(d["scores"]["indices"][name])) for d in seeds]
        rows.append([name, *(estimate([m[key] for m in measures]) for key in ("accuracy", "loss"))])
    wrong = seeds[WRONG_SEED]["scores"]["reads the padding"]
    for name, scores in (
        ("trained at the end of the padding", wrong["in batches"]),
        ("the same, alone", wrong["alone"]),
    ):
        m = quality(*pairs_of(scores))
        rows.append([name, *(f"{m[key]:.3f}" for key in ("accuracy", "loss"))])
    return table(rows)


def same_gold(seeds: list[dict]) -> str:
    """How far below three good claims each kind scores."""
    rows = [["response", "gold", "training responses with such a mistake", *(f"seed {seed}" for seed in SEEDS)]]
    best, *others = SAME_GOLD
    rows.append([best, f"{SAME_GOLD[best]:g}", "", *("0" for _ in SEEDS)])
    for kind in others:
        less = [f"{d['same_gold'][kind] - d['same_gold'][best]:.2f}" for d in seeds]
        share = torch.tensor([d["seen"][kind] for d in seeds]).mean().item()
        rows.append([kind, f"{SAME_GOLD[kind]:g}", f"{share:.1%}".replace("%", " %"), *less])
    return table(rows)


def seed_by_seed(seeds: list[dict]) -> str:
    columns = [of_one_seed(done) for done in seeds]
    rows = [["", *(f"seed {seed}" for seed in SEEDS)]]
    rows += [[name, *(column[name] for column in columns)] for name in columns[0]]
    return table(rows)


def of_one_seed(done: dict) -> dict[str, str]:
    """What the text says of each seed."""
    asked = {f"{size:,} pairs": str(size) for size in SIZES} | {f"{SIZES[-1]:,}, half the steps": "shorter"}
    found = {
        f"accuracy, {name}": f"{quality(*pairs_of(done['scores'][key]))['accuracy']:.3f}" for name, key in asked.items()
    }
    for name in list(asked)[-2:]:
        found[f"certainty off by, {name}"] = f"{quality(*pairs_of(done['scores'][asked[name]]))['off by']:.3f}"
    found["accuracy, at the end of the padding"] = (
        f"{quality(*pairs_of(done['scores']['indices']['at the end of the padding']))['accuracy']:.3f}"
    )
    sure, right = certainty(*pairs_of(done["scores"][str(SIZES[0])]))
    found[f"{SIZES[0]} pairs: more than 90 % sure of"] = f"{(sure > 0.9).double().mean():.3f}"
    found["of these right"] = f"{right[sure > 0.9].mean():.3f}"
    golds, scores, prompts = gold_and_scores(done, SIZES[-1])
    centred = within_prompts(golds, prompts), within_prompts(scores, prompts)
    lengths = torch.cat(pairs_of(done["lengths"]))
    found["correlation of score and gold"] = f"{correlation(scores, golds):.2f}"
    found["within prompts"] = f"{correlation(*centred):.2f}"
    found["slope within prompts"] = f"{(centred[0] @ centred[1] / (centred[0] @ centred[0])).item():.2f}"
    well = opened_well(prompts)
    at = {g: [scores[(golds == g) & rows] for rows in (well, ~well)] for g in range(-3, 4)}
    level = {g: torch.stack([x.mean() for x in both]).mean().item() for g, both in at.items()}
    weights = torch.tensor([min(len(x) for x in both) for both in at.values()], dtype=torch.float64)
    higher = torch.stack([both[0].mean() - both[1].mean() for both in at.values()])
    found["how much higher behind a good opening, at equal gold"] = f"{(weights @ higher / weights.sum()).item():.2f}"
    for g in range(-1, 3):
        found[f"rise of the score from gold {g} to {g + 1}"] = f"{level[g + 1] - level[g]:.2f}"
    found["share of responses of gold 3"] = f"{(golds == 3).double().mean():.3f}"
    found["correlation of score and length"] = f"{correlation(scores, lengths):.2f}"
    found["of gold and length"] = f"{correlation(golds, lengths):.2f}"
    return found


def opened_well(prompts: list[str]) -> Tensor:
    return torch.tensor([prompt.split()[-1] in GOOD for prompt in prompts])


def write_between(page: Path, name: str, text: str) -> None:
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(Path(__file__).with_name("reward_model.png"))
