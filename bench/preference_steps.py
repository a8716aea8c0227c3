"""Seconds of a DPO step and of a reward model's step against TRL: `python -m bench.preference_steps [S] [T]`, one core.

A step on both sides is one AdamW update on the same pairs, from the same weights, the gradient clipped to norm 1:

    dpo                  policy and reference score the chosen and the rejected responses, as TRL does by default
    dpo, precomputed     the reference's log-probs are known, as in train_dpo.py
    reward               Bradley-Terry on outcome scores

The two take turns inside TRL's own training loop. Their losses are compared at every step: in float32 they must agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bench.sizes import SIZES, Size, make_gpt, make_llama, make_prompts, make_reference, make_reward_model
from bench.timing import machine, one_core
from bench.trainers import CPU_TIME, DTYPES, EOS, WARMUP, copy_weights, in_turns, make_tokenizer, precisions
from nanorl.losses import bradley_terry_loss, dpo_loss
from nanorl.losses.aggregate import sequence_logprobs
from nanorl.model import GPT
from nanorl.optimizers import Optimizers
from nanorl.preferences import Pair, batch_of
from nanorl.scorer import score

LEARNING_RATE = 1e-4
BETA = 0.1
TOLERANCE = 1e-4  # of float32 losses after some updates
KINDS = ["dpo", "dpo, precomputed", "reward"]


def make_pairs(size: Size) -> list[list[Pair]]:
    """Of each step: `size.rows` responses of `size.new` random ids, <eos> the last of them."""
    steps, n = WARMUP + size.steps, size.rows // 2
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(4, size.vocab, (steps * n, 2, size.new - 1), generator=generator).tolist()
    prompts = make_prompts(size, steps * n)
    pairs = [Pair(p, [*chosen, EOS], [*rejected, EOS]) for p, (chosen, rejected) in zip(prompts, words, strict=True)]
    return [pairs[i : i + n] for i in range(0, len(pairs), n)]


def dpo_step(size: Size, dtype: torch.dtype, pairs: list[list[Pair]], precomputed: bool) -> Callable[[int], float]:
    """An update of train_dpo.py's loop at this size, as a function of the step's number; returns the loss."""
    policy = make_gpt(size)
    reference = make_reference(policy).to(dtype)
    policy.to(dtype)
    optimizers = Optimizers(policy, LEARNING_RATE, muon=False)

    def log_probs(model: GPT, pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
        rollout, _ = batch_of(pairs)
        return sequence_logprobs(score(model, rollout)[0], rollout.mask).chunk(2)

    known = {}
    if precomputed:
        with torch.no_grad():
            known = {step: log_probs(reference, batch) for step, batch in enumerate(pairs)}

    def run(step: int) -> float:
        optimizers.zero_grad()
        total, size_of_part = torch.zeros(()), size.micro_batch // 2
        for start in range(0, len(pairs[step]), size_of_part):
            part = slice(start, start + size_of_part)
            if precomputed:
                ref_chosen, ref_rejected = (values[part] for values in known[step])
            else:
                with torch.no_grad():
                    ref_chosen, ref_rejected = log_probs(reference, pairs[step][part])
            chosen, rejected = log_probs(policy, pairs[step][part])
            loss, _ = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=BETA, denominator=len(pairs[step]))
            loss.backward()
            total += loss.detach()
        optimizers.update(total)
        return total.item()

    return run


def reward_step(size: Size, dtype: torch.dtype, pairs: list[list[Pair]]) -> Callable[[int], float]:
    """An update of `train_reward_model` at this size, as a function of the step's number; returns the loss."""
    model = make_reward_model(size).to(dtype)
    optimizers = Optimizers(model, LEARNING_RATE, muon=False)

    def run(step: int) -> float:
        rollout, margins = batch_of(pairs[step])
        chosen, rejected = model.outcomes(rollout, raw=True).chunk(2)
        loss, _ = bradley_terry_loss(chosen, rejected, margin=margins)
        optimizers.zero_grad()
        loss.backward()
        optimizers.update(loss.detach())
        return loss.item()

    return run


def trl_trainer(kind: str, size: Size, bf16: bool, pairs: list[list[Pair]], losses: list[float], callback):
    """TRL's trainer around the same weights; it adds the loss of each step to `losses`."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    settings = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": bf16,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": size.rows // 2,
        "train_sampling_strategy": "sequential",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,  # ours
        "max_grad_norm": 1.0,
        "max_length": None,
        "max_steps": WARMUP + size.steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1000,
    }
    flat = [pair for batch in pairs for pair in batch]
    common = {"processing_class": make_tokenizer(size), "callbacks": [callback]}
    if kind == "reward":
        rows = {
            "chosen_ids": [pair.prompt + pair.chosen for pair in flat],
            "rejected_ids": [pair.prompt + pair.rejected for pair in flat],
        }
        model = copy_weights(make_reward_model(size), make_llama(size, score=True))
        config = RewardConfig(**settings)
        trainer = RewardTrainer(model=model, args=config, train_dataset=Dataset.from_dict(rows), **common)
    else:

        def text(ids: list[int]) -> str:
            return "".join(f" w{i}" for i in ids)

        rows = {  # TRL adds the <eos>
            "prompt": [text(pair.prompt) for pair in flat],
            "chosen": [text(pair.chosen[:-1]) for pair in flat],
            "rejected": [text(pair.rejected[:-1]) for pair in flat],
        }
        policy = make_gpt(size)
        trainer = DPOTrainer(
            model=copy_weights(policy, make_llama(size)),
            ref_model=copy_weights(make_reference(policy), make_llama(size)),
            args=DPOConfig(**settings, beta=BETA, precompute_ref_log_probs=kind == "dpo, precomputed"),
            train_dataset=Dataset.from_dict(rows),
            **common,
        )
    compute_loss = trainer.compute_loss

    def noting_the_loss(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        losses.append(loss.item())
        return loss

    trainer.compute_loss = noting_the_loss
    return trainer


def turns(
    kind: str, size: Size, dtype: str, trl_bf16: bool, clock: Callable[[], float]
) -> tuple[dict[str, float], float]:
    """Median seconds a step of each side, and the largest distance of two losses."""
    pairs = make_pairs(size)
    if kind == "reward":
        step = reward_step(size, DTYPES[dtype], pairs)
    else:
        step = dpo_step(size, DTYPES[dtype], pairs, precomputed=kind != "dpo")
    ours, theirs = [], []
    make_trainer = partial(trl_trainer, kind, size, trl_bf16, pairs, theirs)
    seconds = in_turns(make_trainer, lambda i: ours.append(step(i)), clock)
    medians = {side: statistics.median(values[WARMUP:]) for side, values in seconds.items()}
    return medians, max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=["S"], help="S, T")
    parser.add_argument("--steps", type=int, help="timed ones; default: the size's")
    parser.add_argument("--cpu-time", action="store_true", help=CPU_TIME)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this; may be given again")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    one_core()
    print(machine())
    for name in args.sizes:
        size = replace(SIZES[name], steps=args.steps or SIZES[name].steps)
        print(f"\n{name}: {size.rows // 2} pairs, {size}")
        print(f"{'':18}{'nanorl':>10}{'TRL':>10}{'seconds':>10}{'TRL':>8}{'ratio':>8}  losses differ by")
        for kind in args.kind or KINDS:
            for dtype, trl_bf16 in precisions():
                s, distance = turns(kind, size, dtype, trl_bf16, clock)
                other = "bfloat16" if trl_bf16 else "float32"
                print(
                    f"{kind:18}{dtype:>10}{other:>10}{s['nanorl']:10.3f}{s['trl']:8.3f}{s['nanorl'] / s['trl']:8.2f}"
                    f"  {distance:.1g}",
                    flush=True,
                )
                if dtype == "float32" and distance > TOLERANCE:
                    raise SystemExit("the losses are not equal: the times do not compare")


if __name__ == "__main__":
    main()
