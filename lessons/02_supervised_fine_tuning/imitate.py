"""Supervised fine-tuning of a fresh GPT on chain arithmetic, and what becomes of it when one thing about it is changed.

    python lessons/02_supervised_fine_tuning/imitate.py                  less than a minute on one core
    python lessons/02_supervised_fine_tuning/imitate.py without-stop
    python lessons/02_supervised_fine_tuning/imitate.py with-prompt
    python lessons/02_supervised_fine_tuning/imitate.py own-means

The first is what train_grpo.py does before its first update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # train_grpo.py, and nanorl if it is not installed

from nanorl import sft
from nanorl.evaluation import EVAL_SEED, evaluate
from nanorl.losses.aggregate import token_mean
from nanorl.model import GPT, GPTConfig
from nanorl.sampler import Sampler
from nanorl.tasks.chain import ChainArithmetic
from nanorl.tasks.task import Problem
from nanorl.tokenizer import Tokenizer

STEPS = ChainArithmetic.warm_start_steps
TASK = ChainArithmetic()
EXAMINED, SAMPLES = 512, 4  # held-out problems, responses to each


class EndlessTokenizer(Tokenizer):
    def encode_response(self, text: str) -> list[int]:
        return self.encode(text)  # no <eos>


class WithoutStop(ChainArithmetic):
    """No demonstration shows its stop token."""

    tokenizer = EndlessTokenizer.characters("0123456789+-*=<>")


class WithPrompt(ChainArithmetic):
    """The prompt is trained as if it were response: all but its first token, which has nothing before it."""

    def training_problems(self, n: int, key: str) -> list[Problem]:
        problems = super().training_problems(n, key)
        return [Problem(p.prompt[:1], p.prompt[1:] + super(WithPrompt, self).demonstration(p, key)) for p in problems]

    def demonstration(self, problem: Problem, key: str) -> str:
        return problem.answer


def own_mean(values: Tensor, mask: Tensor, denominator: int) -> Tensor:
    """Each of three micro-batches takes the mean over its own tokens; the loss is the mean of those means."""
    return token_mean(values, mask) / 3


WAYS = {  # task, mean, rows of a micro-batch
    "as-it-should-be": (TASK, token_mean, sft.MICRO_BATCH),
    "without-stop": (WithoutStop(), token_mean, sft.MICRO_BATCH),
    "with-prompt": (WithPrompt(), token_mean, sft.MICRO_BATCH),
    "own-means": (TASK, own_mean, sft.BATCH // 3),
}


def new_policy(seed: int) -> GPT:
    torch.manual_seed(seed)
    context = TASK.max_prompt_tokens + TASK.max_new_tokens
    return GPT(GPTConfig(vocab_size=TASK.tokenizer.vocab_size, max_context=context))


def imitate(policy: GPT, way: str, seed: int, report: Callable[[int, float], None], *, steps: int = STEPS) -> None:
    """The library's warm start, with the task and the mean that this way of training has."""
    task, mean, rows = WAYS[way]
    with mock.patch.multiple(sft, token_mean=mean, MICRO_BATCH=rows):
        sft.warm_start(policy, task, steps=steps, seed=seed, report=report)


def main(way: str = "as-it-should-be") -> None:
    def report(step: int, loss: float) -> None:
        if step == 0 or (step + 1) % 40 == 0:
            print(f"step {step + 1:3d}/{STEPS}  loss {loss:.3f} nats a token")

    if way not in WAYS:
        sys.exit(f"there is no way of training {way!r}: choose one of {', '.join(WAYS)}")
    policy = new_policy(seed=0)
    imitate(policy, way, 0, report)
    problems = TASK.held_out_problems(EXAMINED)
    found = evaluate(policy, TASK, problems, TASK.max_new_tokens, samples=SAMPLES)
    for name in ("pass@1", "accuracy_greedy", "thinks", "accuracy_thinks", "mean_length", "truncated_share"):
        print(f"{name:<16}{found[name]:7.3f}")
    rollout = Sampler(policy).generate(
        [TASK.tokenizer.encode_prompt(problem.prompt) for problem in problems],
        max_new_tokens=TASK.max_new_tokens,
        stop_ids=[TASK.tokenizer.eos_id],
        samples_per_prompt=SAMPLES,
        seed=EVAL_SEED,
    )
    answered = [problems[group] for group in rollout.groups.tolist()]
    texts = rollout.texts(TASK.tokenizer)
    cut = [text[: text.find(">") + 2] for text in texts]  # behind the first digit that claims to be the answer
    right = [TASK.reward(problem, text) for problem, text in zip(answered, cut, strict=True)]
    print(f"pass@1 would be {sum(right) / len(right):.3f} if each response were cut off behind its first answer")
    for problem, text, finish in list(zip(answered, texts, rollout.finish, strict=True))[: 8 * SAMPLES : SAMPLES]:
        print(f"{problem.prompt} {text:<30}{'right' if TASK.reward(problem, text) else 'wrong'}, {finish}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # more are slower for a model this small
    main(*sys.argv[1:])
