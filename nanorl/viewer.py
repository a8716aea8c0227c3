"""samples.html: the same held-out prompts answered before and after training, each token with its numbers.

One file that works offline. The page is viewer.html beside this file; the responses go into it as JSON in which `<` is
escaped, so that no response can end the element it stands in, and the page's security policy lets the browser run the
one script whose digest it names and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanorl import checkpoint
from nanorl.advantages import group_advantages
from nanorl.evaluation import EVAL_SEED, decimals, grade, has_reward_model
from nanorl.model import GPT
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.tasks.task import PreferenceTask, Problem, Task

PAGE = Path(__file__).with_name("viewer.html")
PROBLEMS = 16  # shown: enough to see what changed, few enough to look through


def collect(
    before: GPT,
    after: GPT,
    task: Task,
    problems: Sequence[Problem],
    *,
    samples: int,
    max_new_tokens: int,
    seed: int = EVAL_SEED,
    scale: str = "group",
    proxy: Callable[[Rollout], Tensor] | None = None,
) -> dict:
    """`samples` responses of both policies to each problem, sampled at temperature 1, as plain data for `write`.

    With the same seed and number of samples `evaluate` counts the same responses. `scale`: see `group_advantages`.
    `proxy`: the reward model's score (B), if there is one. Where nothing can be verified no answer is shown.
    """
    prompts = [task.tokenizer.encode_prompt(problem.prompt) for problem in problems]
    verified = not isinstance(task, PreferenceTask)
    shown = [{"prompt": p.prompt} | ({"answer": p.answer} if verified else {}) for p in problems]
    for name, policy in (("before", before), ("after", after)):
        rollout = Sampler(policy).generate(
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=[task.tokenizer.eos_id],
            samples_per_prompt=samples,
            seed=seed,
        )
        rows = responses(rollout, policy, before, after, task, problems, scale=scale, proxy=proxy)
        for i, problem in enumerate(shown):
            problem[name] = rows[i * samples : (i + 1) * samples]
    return {"problems": shown, "vocabulary": task.tokenizer.vocab_size}


@torch.no_grad()
def responses(
    rollout: Rollout,
    writer: GPT,
    before: GPT,
    after: GPT,
    task: Task,
    problems: Sequence[Problem],
    *,
    scale: str = "group",
    proxy: Callable[[Rollout], Tensor] | None = None,
) -> list[dict]:
    """Each response of a rollout as plain data: its scores, its tokens, and for each token its log-prob and the entropy
    under the policy that wrote it and its ratio pi_after / pi_before. Tokens outside the mask have no numbers.

    With a verifier the scores are the reward and what the task describes, a response is right or not, and its tokens
    have their advantage. Without one they are the hidden gold, from which no advantage was ever taken, and the proxy.
    """
    (logprobs, entropy), (old, _), (new, _) = (score(policy, rollout) for policy in (writer, before, after))  # (B, T)
    numbers = {"logprob": logprobs, "entropy": entropy, "ratio": (new - old).exp()}
    rewards, described = grade(task, problems, rollout)
    verified = not isinstance(task, PreferenceTask)
    if verified:
        scores = {"reward": rewards} | described
        valid = rollout.mask.any(1)
        advantages = group_advantages(
            torch.tensor(rewards, dtype=torch.float64, device=valid.device), rollout.groups, scale=scale, valid=valid
        )
        numbers["advantage"] = advantages[:, None].expand(logprobs.shape)
    else:
        scores = {"gold": rewards} | ({"proxy": proxy(rollout).tolist()} if proxy else {}) | described
    rows = []
    for row, length in enumerate(rollout.lengths.tolist()):
        ids, mask = rollout.tokens[row, :length].tolist(), rollout.mask[row, :length].tolist()
        rows.append(
            {
                "ids": ids,
                "texts": [task.tokenizer.token_bytes(i).decode(errors="backslashreplace") for i in ids],
                "mask": mask,
                **{name: in_mask(values[row, :length].tolist(), mask) for name, values in numbers.items()},
                "stop": [i == task.tokenizer.eos_id for i in ids],
                "finish": rollout.finish[row],
                "scores": {name: number(values[row]) for name, values in scores.items()},
                **({"right": rewards[row] >= 1} if verified else {}),
            }
        )
    return rows


def in_mask(values: list[float], mask: list[bool]) -> list[float | None]:
    return [number(value) if chosen else None for value, chosen in zip(values, mask, strict=True)]


def number(value: float) -> float | None:
    """Five digits, enough to read and half the size; JSON has no NaN and no infinity."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def write_run(
    out: Path, policy: GPT, task: Task, problems: Sequence[Problem], eval_before: dict, eval_after: dict, **how
) -> Path:
    """samples.html of a finished run: its first checkpoint against `policy`, on PROBLEMS of the problems. `how` goes to
    `collect`. Returns the file's path. Raises RunError if that checkpoint cannot be read."""
    if isinstance(task, PreferenceTask):
        names, chosen = ["gold", "proxy"] if has_reward_model(eval_after) else ["gold"], spread(problems)
    else:
        names, chosen = ["accuracy"], problems[:PROBLEMS]
    changes = [f"{name} {decimals(eval_before[name])} → {decimals(eval_after[name])}" for name in names]
    result = f"{', '.join(changes)} on {len(problems)} held-out problems"
    before = checkpoint.load_model(out / "checkpoint" / checkpoint.FIRST).to(policy.head.device)
    path = out / "samples.html"
    write(path, collect(before, policy, task, chosen, **how), title=out.resolve().name, result=result)
    return path


def spread(problems: Sequence[Problem]) -> list[Problem]:
    """PROBLEMS with different prompts, evenly spaced: prompts that come again stand in order, like ones together."""
    distinct = list({problem.prompt: problem for problem in problems}.values())
    count = min(PROBLEMS, len(distinct))
    return [distinct[i * len(distinct) // count] for i in range(count)]


def write(path: Path, data: dict, *, title: str, result: str) -> None:
    """The page with `data` from `collect` in it; `title` and `result` (one line) stand at its top."""
    page = PAGE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    embedded = json.dumps(data | {"title": title, "result": result}, allow_nan=False).replace("<", "\\u003c")
    # The data last: nothing looks for places to fill in what a model wrote.
    path.write_text(page.replace("SCRIPT_DIGEST", digest).replace("DATA_AS_JSON", embedded), encoding="utf-8")
