"""Best-of-n: sample n responses, keep the one that a reward model likes best. It trains nothing, and what it gets for
its KL is hard to beat. `python -m nanorl.frontier` runs it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanorl import checkpoint, reward_model
from nanorl.evaluation import EVAL_SEED, grade
from nanorl.run import write_json
from nanorl.sampler import Sampler
from nanorl.tasks import PREFERENCE_TASKS


def mean_of_best(scores: Tensor, values: Tensor, n: int) -> Tensor:
    """The expected value of the response with the highest score among n, from a pool of N >= n of them: the mean over
    all C(N, n) choices, so an estimate without bias. Of these the r-th lowest score is the highest in C(r - 1, n - 1).

    scores, values (..., N) -> (...)
    """
    pool = scores.shape[-1]
    if not 1 <= n <= pool:
        raise ValueError(f"expected 1 <= n <= {pool}, the pool, got n = {n}")
    weights = [math.comb(below, n - 1) / math.comb(pool, n) for below in range(pool)]
    return values.gather(-1, scores.argsort(-1)) @ torch.tensor(weights, dtype=values.dtype)


def kl_of_best(n: int) -> float:
    """log n - (n - 1) / n nats, KL(best-of-n || policy): an upper bound, exact as long as the n are all different
    (Beirami et al. 2024, arXiv:2401.01879)."""
    return math.log(n) - (n - 1) / n


@torch.no_grad()
def best_of_n(run: Path, ns: Sequence[int], pool: int) -> list[dict]:
    """Of each n: KL, gold, proxy and length on held-out prompts. `run`, of train_ppo.py, names the reward model that
    chooses and the policy to sample from, the one it started with: `pool` responses to each prompt. Kept in its folder.
    """
    kept = run / f"best_of_n_{pool}.json"
    done = json.loads(kept.read_text()) if kept.exists() else {}
    if done.get("ns") == list(ns):
        return done["found"]
    options = json.loads((run / "config.json").read_text())["options"]
    task = PREFERENCE_TASKS[options["task"]]()
    policy = checkpoint.load_model(checkpoint.complete(run / "checkpoint")[0], "reference")
    judge, _ = reward_model.load(run)
    problems = list({problem.prompt: problem for problem in task.held_out_problems(options["eval_problems"])}.values())
    found = []
    for row, problem in enumerate(problems):
        rollout = Sampler(policy).generate(
            [task.tokenizer.encode_prompt(problem.prompt)],
            samples_per_prompt=pool,
            max_new_tokens=options["max_new_tokens"] or task.max_new_tokens,
            stop_ids=[task.tokenizer.eos_id],
            seed=EVAL_SEED,
            sample_ids=range(row * pool, (row + 1) * pool),
        )
        gold = torch.tensor(grade(task, [problem], rollout)[0], dtype=torch.float64)
        found.append(torch.stack([gold, judge.outcomes(rollout).double(), rollout.lengths.double()]))
    values = torch.stack(found)  # (prompts, 3, N)
    scores = values[:, 1:2].expand_as(values)
    result = []
    for n in ns:
        gold, proxy, length = mean_of_best(scores, values, n).mean(0).tolist()
        result.append({"kl": kl_of_best(n), "gold": gold, "proxy": proxy, "mean_length": length})
    write_json(kept, {"ns": list(ns), "found": result})
    return result
