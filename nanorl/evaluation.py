"""How good is a policy, and how sure are we: accuracy with its interval, pass@k, and gold against proxy and KL where
nothing can be verified."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanorl.model import GPT
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.tasks.task import Problem, Task

Z_95 = 1.959963984540054  # standard normal quantile at 0.975
EVAL_SEED = -1  # no run's seed: every run is examined with the same random numbers


def wilson_interval(right: int, n: int) -> tuple[float, float]:
    """95 % interval of a share, `right` of `n` (Wilson 1927): honest near 0 and 1, unlike p +- 2 sigma."""
    if not 0 <= right <= n or n < 1:
        raise ValueError(f"expected 0 <= right <= n with n >= 1, got {right} of {n}")
    p, z2 = right / n, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))  # rounding never passes 0, p or 1


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold at least one of the `right` ones.

    The unbiased estimate of Chen et al. 2021 (Codex), eq. 1: 1 - C(n - right, k) / C(n, k).
    """
    if not (1 <= k <= n and 0 <= right <= n):
        raise ValueError(f"expected 1 <= k <= n and 0 <= right <= n, got k = {k}, n = {n}, right = {right}")
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def grade(task: Task, problems: Sequence[Problem], rollout: Rollout) -> tuple[list[float], dict[str, list[float]]]:
    """Rewards (B) and, by name, the properties the task describes (B each). Row i answers problem groups[i]."""
    rewards, described = [], defaultdict(list)
    for group, text in zip(rollout.groups.tolist(), rollout.texts(task.tokenizer), strict=True):
        rewards.append(task.reward(problems[group], text))
        for name, value in task.describe(problems[group], text).items():
            described[name].append(value)
    return rewards, dict(described)


def sample_lines(
    task: Task, problems: Sequence[Problem], rollout: Rollout, rewards: Tensor, gold: Sequence[float] | None = None
) -> list[str]:
    """Each response as a line to read, with its reward (B); beside a hidden `gold` (B) that is called the proxy."""
    scored = [f"reward {reward:g}" for reward in rewards.tolist()]
    if gold is not None:
        scored = [f"gold {g:g}  proxy {reward:g}" for g, reward in zip(gold, rewards.tolist(), strict=True)]
    rows = zip(rollout.groups.tolist(), rollout.texts(task.tokenizer), scored, strict=True)
    return [f"{problems[group].prompt} {text}   {scores}" for group, text, scores in rows]


def evaluate(policy: GPT, task: Task, problems: Sequence[Problem], max_new_tokens: int, *, samples: int = 1) -> dict:
    """Held-out accuracy: sampled at temperature 1, `samples` responses a problem, and greedy.

    `accuracy` and its 95 % interval count the first sample of each problem, so that the samples are independent;
    `pass@k`, for k = 1, 2, 4, ... up to `samples`, counts all of them.
    """
    prompts = [task.tokenizer.encode_prompt(problem.prompt) for problem in problems]
    sampler = Sampler(policy)

    def sample(**how) -> tuple[Rollout, torch.Tensor, dict[str, torch.Tensor]]:
        rollout = sampler.generate(
            prompts, max_new_tokens=max_new_tokens, stop_ids=[task.tokenizer.eos_id], seed=EVAL_SEED, **how
        )
        rewards, described = grade(task, problems, rollout)
        return rollout, torch.tensor(rewards), {name: torch.tensor(values) for name, values in described.items()}

    def accuracy(name: str, rewards: torch.Tensor) -> dict[str, float]:
        right, n = int((rewards >= 1).sum()), len(rewards)
        low, high = wilson_interval(right, n)
        return {name: right / n, f"{name}_low": low, f"{name}_high": high}

    rollout, rewards, described = sample(samples_per_prompt=samples)
    _, greedy_rewards, _ = sample(greedy=True)
    result = {
        **accuracy("accuracy", rewards[::samples]),
        **accuracy("accuracy_greedy", greedy_rewards),
        "mean_length": rollout.lengths.double().mean().item(),
        "truncated_share": rollout.finish.count("length") / len(rollout),
        "problems": len(problems),
    }
    for name, values in described.items():
        result[name] = values.mean().item()
        with_it = rewards[values > 0] >= 1
        result[f"accuracy_{name}"] = with_it.double().mean().item() if len(with_it) else None
    right = (rewards.view(-1, samples) >= 1).sum(1).tolist()  # of each problem's samples
    for k in (2**i for i in range(samples.bit_length())):
        result[f"pass@{k}"] = sum(pass_at_k(samples, c, k) for c in right) / len(problems)
    return result


def has_reward_model(evaluation: dict) -> bool:
    """Whether `proxy` is a reward model's score. DPO, which examines pairs, has none: there it is the reward that its
    policy implies, beta log(pi / pi_ref)."""
    return "pair_accuracy" not in evaluation


def decimals(value: float | None) -> str:
    return "nan" if value is None else f"{value:.3f}"  # see Run.finish


def describe_evaluation(before: dict, after: dict) -> str:
    """The two evaluations side by side, for the console."""

    def line(name: str, key: str) -> str:
        low, high = after.get(key + "_low"), after.get(key + "_high")
        interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
        return f"{name:<28}{decimals(before[key])} -> {decimals(after[key])}{interval}"

    names = {
        "accuracy": "accuracy, sampled at T = 1",
        "accuracy_greedy": "accuracy, greedy",
        "gold": "gold score (hidden)",
        "proxy": "proxy score (learned)" if has_reward_model(after) else "reward the policy implies",
        "kl": "KL to the warm start (nats)",
        "mean_length": "mean length (tokens)",
        **{key: key for key in after if key.startswith("pass@")},
    }
    head = f"on {after['problems']} held-out problems      before -> after [95 % interval]"
    return "\n".join([head] + [line(name, key) for key, name in names.items() if key in after])


@torch.no_grad()
def evaluate_preferred(
    policy: GPT,
    reference: GPT,
    proxy: Callable[[Rollout], Tensor],
    task: Task,
    problems: Sequence[Problem],
    max_new_tokens: int,
) -> dict:
    """Where nothing can be verified: one response to each problem, sampled at temperature 1, and of these the means of

    gold     the hidden score that training never sees, with its 95 % interval (rather too wide: as if each response
             had a prompt of its own, though the held-out prompts come again and again)
    proxy    the learned score that it does see; for DPO see `has_reward_model`
    kl       log pi / pi_ref summed over the response: how far the policy has gone from the warm start, in nats
    """
    rollout = Sampler(policy).generate(
        [task.tokenizer.encode_prompt(problem.prompt) for problem in problems],
        max_new_tokens=max_new_tokens,
        stop_ids=[task.tokenizer.eos_id],
        seed=EVAL_SEED,
    )
    gold = torch.tensor(grade(task, problems, rollout)[0], dtype=torch.float64)
    half = Z_95 * gold.std().item() / math.sqrt(len(gold)) if len(gold) > 1 else math.inf
    return {
        "gold": gold.mean().item(),
        "gold_low": gold.mean().item() - half,
        "gold_high": gold.mean().item() + half,
        "proxy": proxy(rollout).double().mean().item(),
        "kl": (score(policy, rollout)[0] - score(reference, rollout)[0]).double().sum(1).mean().item(),
        "mean_length": rollout.lengths.double().mean().item(),
        "truncated_share": rollout.finish.count("length") / len(rollout),
        "problems": len(problems),
    }
