"""Seconds and peak memory of one GRPO step against TRL's GRPOTrainer: `python -m bench.grpo_step [S] [T]`, one core.

A step on both sides: sample `groups` x `group_size` responses of at most `new` tokens, reward them (share of even
ids: cheap, never constant), advantages, one AdamW update with the gradient clipped to norm 1. Same architecture, sizes
and prompts; no reference model. The two take turns inside TRL's own training loop. With --memory each side also runs
alone in a fresh process.

nanorl scores the batch in two micro-batches, which is faster than at once and takes less memory; the update is the
same. TRL takes it at once; --accumulate 2 lets it do the same as we do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from bench.sizes import SIZES, Size, make_gpt, make_llama, make_prompts
from bench.timing import machine, matmul_rate, one_core
from bench.trainers import DTYPES, EOS, WARMUP, in_turns, make_tokenizer, precisions
from nanorl.advantages import group_advantages
from nanorl.algorithms import ALGORITHMS
from nanorl.optimizers import Optimizers
from nanorl.sampler import Sampler
from nanorl.scorer import score


def nanorl_step(size: Size, dtype: torch.dtype):
    """One step of train_grpo.py's loop at this size, as a function of the step's number."""
    policy = make_gpt(size).to(dtype)
    optimizers = Optimizers(policy, 1e-4, muon=False)
    sampler, algorithm = Sampler(policy), ALGORITHMS["grpo"]
    prompts = make_prompts(size, size.groups * (WARMUP + size.steps))

    def run(step: int) -> float:
        chosen = prompts[step * size.groups : (step + 1) * size.groups]
        rollout = sampler.generate(
            chosen, samples_per_prompt=size.group_size, max_new_tokens=size.new, stop_ids=[EOS], seed=step
        )
        even = (rollout.tokens % 2 == 0) & rollout.mask
        rewards = even.sum(1) / rollout.mask.sum(1)
        rollout.advantages = group_advantages(rewards, rollout.groups)
        denominator = algorithm.denominator(rollout.mask)
        optimizers.zero_grad()
        whole = torch.zeros(())
        for part in rollout.split(size.micro_batch):
            logprobs, _ = score(policy, part)
            old = part.behavior_logprobs if dtype == torch.float32 else logprobs.detach()
            loss, _ = algorithm.loss(logprobs, old, part.advantages, part.mask, denominator=denominator)
            loss.backward()
            whole += loss.detach()
        optimizers.update(whole)
        return rollout.lengths.double().mean().item()

    return run


def trl_trainer(size: Size, bf16: bool, accumulate: int, callback):
    """TRL's trainer around the same architecture, its step timed by `callback`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts = [" ".join(f"w{i}" for i in p) for p in make_prompts(size, size.groups * (WARMUP + size.steps))]

    def reward(completion_ids, **_):
        return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=bf16,
        gradient_checkpointing=False,
        per_device_train_batch_size=size.rows // accumulate,
        gradient_accumulation_steps=accumulate,
        num_generations=size.group_size,
        max_completion_length=size.new,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_steps=WARMUP + size.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
    )
    return GRPOTrainer(
        model=make_llama(size),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(size),
        callbacks=[callback],
    )


def turns(
    size: Size, dtype: str, trl_bf16: bool, accumulate: int, ours: bool = True, theirs: bool = True
) -> dict[str, float]:
    """Median seconds a step of each side, the steps taking turns."""
    run = nanorl_step(size, DTYPES[dtype]) if ours else lambda step: None
    if not theirs:
        seconds = []
        for step in range(WARMUP + size.steps):
            began = time.perf_counter()
            run(step)
            seconds.append(time.perf_counter() - began)
        return {"nanorl": statistics.median(seconds[WARMUP:])}
    seconds = in_turns(partial(trl_trainer, size, trl_bf16, accumulate), run)
    return {side: statistics.median(values[WARMUP:]) for side, values in seconds.items()}


def alone(side: str, name: str, dtype: str, accumulate: int) -> dict[str, float]:
    """In this process only one side runs: its seconds a step and the peak of resident memory."""
    seconds = turns(SIZES[name], dtype, dtype == "bfloat16", accumulate, ours=side == "nanorl", theirs=side == "trl")[
        side
    ]
    return {"seconds": seconds, "peak_mb": peak_mb()}


def peak_mb() -> float:
    """Of this program alone; ru_maxrss would count what the process held before it became this program."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def in_fresh_process(side: str, name: str, dtype: str, accumulate: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.grpo_step", name, "--alone", side, "--dtype", dtype]
    command += ["--accumulate", str(accumulate)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=list(SIZES), help="S, T")
    parser.add_argument("--memory", action="store_true", help="also the peak of each side in a process of its own")
    parser.add_argument("--alone", choices=["nanorl", "trl"], help="run one side only and print JSON")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="with --alone")
    parser.add_argument("--accumulate", type=int, default=1, help="TRL's gradient_accumulation_steps")
    args = parser.parse_args()
    one_core()
    if args.alone:
        print(json.dumps(alone(args.alone, args.sizes[0], args.dtype, args.accumulate)))
        return
    print(machine())
    for name in args.sizes:
        size = SIZES[name]
        print(f"\n{name}: {size}\n{'nanorl':>10}{'TRL':>10}{'seconds':>10}{'TRL':>8}{'ratio':>8}")
        for dtype, trl_bf16 in precisions():
            s = turns(size, dtype, trl_bf16, args.accumulate)
            other = "bfloat16" if trl_bf16 else "float32"
            print(f"{dtype:>10}{other:>10}{s['nanorl']:10.3f}{s['trl']:8.3f}{s['nanorl'] / s['trl']:8.2f}")
        weights = sum(p.numel() for p in make_gpt(size).parameters()) - size.vocab * size.width
        # Decoding once (2 FLOP a weight and token), scoring forward and backward (6) on prompt and response.
        flops = 2 * weights * size.rows * size.new + 6 * weights * size.rows * (size.prompt + size.new)
        floor = flops / matmul_rate(size.rows, size.width, size.ffn, torch.float32)
        print(f"floor in float32: the matrix products alone, {floor:.3f} s")
        if args.memory:
            peak = {
                side: in_fresh_process(side, name, "float32", args.accumulate)["peak_mb"] for side in ("nanorl", "trl")
            }
            print(
                f"peak memory: nanorl {peak['nanorl']:.0f} MB, TRL {peak['trl']:.0f} MB, "
                f"ratio {peak['nanorl'] / peak['trl']:.2f}"
            )


if __name__ == "__main__":
    main()
