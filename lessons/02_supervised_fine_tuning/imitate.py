"""Supervised fine-tuning of a fresh GPT on chain arithmetic, and what becomes of it when one thing about it is changed.

    python lessons/02_supervised_fine_tuning/imitate.py                            about half a minute on one core
    python lessons/02_supervised_fine_tuning/imitate.py "response without stop"
    python lessons/02_supervised_fine_tuning/imitate.py "prompt and response"

Trained on the response it does what `nanorl.sft.warm_start` does, to the last bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for a checkout that is not installed

from nanorl.evaluation import evaluate
from nanorl.losses.aggregate import token_count, token_mean
from nanorl.model import GPT, GPTConfig
from nanorl.optimizers import Optimizers, decayed
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.sft import BATCH, DECAY_SHARE, LEARNING_RATE, MICRO_BATCH, demonstrations
from nanorl.tasks.chain import ChainArithmetic

STEPS = 340  # as many as train_grpo.py takes before its first update
TASK = ChainArithmetic()


def without_stop(batch: Rollout) -> Rollout:
    """The last token of each response, its <eos>, is not trained."""
    last = torch.arange(batch.tokens.shape[1]) == batch.lengths[:, None] - 1
    return replace(batch, mask=batch.mask & ~last)


def with_prompt(batch: Rollout) -> Rollout:
    """The prompt is trained as if it were response; all but its first token, which has nothing before it."""
    responses = [row[:n].tolist() for row, n in zip(batch.tokens, batch.lengths.tolist(), strict=True)]
    return Rollout.from_responses(
        [prompt[:1] for prompt in batch.prompts],
        [prompt[1:] + response for prompt, response in zip(batch.prompts, responses, strict=True)],
    )


TRAINED_ON = {
    "response": lambda batch: batch,
    "response without stop": without_stop,
    "prompt and response": with_prompt,
}


def new_policy(seed: int) -> GPT:
    torch.manual_seed(seed)
    context = TASK.max_prompt_tokens + TASK.max_new_tokens
    return GPT(GPTConfig(vocab_size=TASK.tokenizer.vocab_size, max_context=context))


def imitate(
    policy: GPT,
    seed: int,
    trained_on: str = "response",
    *,
    steps: int = STEPS,
    watch: Callable[[int, Rollout, Tensor], None] = lambda step, part, logprobs: None,
) -> None:
    """Train `policy` in place. `watch(step, micro-batch, log-probs (b, T))` sees what the loss is made of."""
    optimizers = Optimizers(policy, LEARNING_RATE)
    for step in range(steps):
        batch = TRAINED_ON[trained_on](demonstrations(TASK, BATCH, f"sft {seed} {step}"))
        tokens = token_count(batch.mask)  # of the whole batch, whatever the micro-batches
        optimizers.zero_grad()
        for part in batch.split(MICRO_BATCH):
            logprobs, _ = score(policy, part)  # (b, T)
            loss = token_mean(-logprobs, part.mask, denominator=tokens)
            loss.backward()
            watch(step, part, logprobs.detach())
        optimizers.clip_gradients()
        optimizers.step(decayed(step, steps, DECAY_SHARE))


def main(trained_on: str = "response") -> None:
    def watch(step: int, part: Rollout, logprobs: Tensor) -> None:
        total[step] = total.get(step, 0.0) - logprobs.sum().item()
        count[step] = count.get(step, 0) + token_count(part.mask)
        if (step == 0 or (step + 1) % 20 == 0) and count[step] == count[step]:
            shown[step] = total[step] / count[step]

    if trained_on not in TRAINED_ON:
        sys.exit(f"train on one of {', '.join(map(repr, TRAINED_ON))}, not on {trained_on!r}")
    total, count, shown = {}, {}, {}
    policy = new_policy(seed=0)
    imitate(policy, 0, trained_on, watch=watch)
    print(shown)
    print(evaluate(policy, TASK, TASK.held_out_problems(512), TASK.max_new_tokens))
    problems = TASK.held_out_problems(8)
    r = Sampler(policy).generate([TASK.tokenizer.encode_prompt(p.prompt) for p in problems], max_new_tokens=TASK.max_new_tokens, stop_ids=[TASK.tokenizer.eos_id])
    for p, t in zip(problems, r.texts(TASK.tokenizer)):
        print(p.prompt, t)


if __name__ == "__main__":
    torch.set_num_threads(1)  # faster than two for a model this small
    main(*sys.argv[1:])
