"""Seconds of a PPO step against TRL's PPOTrainer: `python -m bench.ppo_step [S] [T]`, one core.

TRL 1.12 is the last release with that trainer (trl.experimental.ppo). It stands in a folder of its own, to be found
before a newer one:

    pip install --no-deps --target DIR trl==1.12.0
    PYTHONPATH=DIR:. python -m bench.ppo_step

A step on both sides: each prompt gets one response of exactly `new` tokens; log-probs under policy and reference, the
reward model's score, the critic's values, advantages; one AdamW update of policy and critic on the whole batch. The
two take turns inside TRL's own training loop. TRL takes a response that is cut off for a finished one, so here it is.

First both learn for a few steps from the responses that TRL sampled, one epoch each and then two, and their losses
must agree. TRL does not clip this trainer's gradients; for that comparison we do not either.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from unittest import mock

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch

from bench.sizes import SIZES, Size, make_gpt, make_llama, make_prompts, make_reference, make_reward_model
from bench.timing import machine, one_core
from bench.trainers import CPU_TIME, DTYPES, WARMUP, copy_weights, in_turns, make_tokenizer, precisions
from nanorl.advantages import gae, place_rewards, whiten
from nanorl.kl import kl_estimate
from nanorl.losses import ppo_loss, value_loss
from nanorl.losses.aggregate import masked, token_count
from nanorl.optimizers import Optimizers
from nanorl.reward_model import critic_from
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import score

LEARNING_RATE = 1e-4
BETA, GAMMA, LAM = 0.05, 1.0, 0.95
CHECKED_STEPS = 2
TOLERANCE = 1e-4
COMPARED = {  # ours -> in TRL's log
    "score": "objective/scores",
    "kl": "objective/kl",
    "policy_loss": "loss/policy_avg",
    "value_loss": "loss/value_avg",
}


def nanorl_step(size: Size, dtype: torch.dtype, steps: int, epochs: int = 1) -> Callable[..., dict[str, float]]:
    """One step of train_ppo.py's loop at this size, as a function of its number and perhaps of given responses. A
    single epoch is one update, which uses the forward passes of the advantages as the script does."""
    at_once = epochs == 1
    policy, reward_model = make_gpt(size), make_reward_model(size)
    reference = make_reference(policy).to(dtype)
    policy, critic = policy.to(dtype), critic_from(reward_model).to(dtype)
    reward_model.to(dtype).requires_grad_(False)
    optimizers = [Optimizers(model, LEARNING_RATE, muon=False) for model in (policy, critic)]
    sampler = Sampler(policy)
    prompts = make_prompts(size, size.rows * steps)

    def run(step: int, rollout: Rollout | None = None) -> dict[str, float]:
        if rollout is None:
            chosen = prompts[step * size.rows : (step + 1) * size.rows]
            rollout = sampler.generate(chosen, max_new_tokens=size.new, stop_ids=[], seed=step)
        mask = rollout.mask
        with torch.set_grad_enabled(at_once):
            logprobs, _ = score(policy, rollout)  # (B, T)
            values = critic.values(rollout)  # (B, T)
        with torch.no_grad():
            rollout.old_logprobs, rollout.values = logprobs.detach(), values.detach()
            scores = reward_model.outcomes(rollout)  # (B,)
            rollout.ref_logprobs, _ = score(reference, rollout)  # (B, T)
            kl = kl_estimate(rollout.old_logprobs, rollout.ref_logprobs, "k1")  # (B, T)
            rewards = place_rewards(scores, mask) - BETA * masked(kl, mask)  # (B, T)
            rollout.advantages, rollout.returns = gae(rewards, rollout.values, mask, gamma=GAMMA, lam=LAM)
            rollout.advantages = whiten(rollout.advantages, mask)
        losses = torch.zeros(2)
        for _ in range(epochs):
            denominator, total = token_count(mask), torch.zeros(2)
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in [rollout] if at_once else rollout.split(size.micro_batch):
                if not at_once:
                    logprobs, _ = score(policy, part)  # (b, T)
                    values = critic.values(part)  # (b, T)
                policy_loss, _ = ppo_loss(
                    logprobs, part.old_logprobs, part.advantages, part.mask, denominator=denominator
                )
                critic_loss, _ = value_loss(values, part.values, part.returns, part.mask, denominator=denominator)
                (policy_loss + critic_loss).backward()
                total += torch.stack([policy_loss, critic_loss]).detach()
            for optimizer, loss in zip(optimizers, total, strict=True):
                optimizer.update(loss)
            losses += total / epochs
        return {
            "score": scores.mean().item(),
            "kl": masked(kl, mask).sum(1).mean().item(),
            "policy_loss": losses[0].item(),
            "value_loss": losses[1].item(),
        }

    return run


def trl_trainer(
    size: Size, bf16: bool, steps: int, epochs: int, logs: list[dict], sampled: list[torch.Tensor], callback
):
    """TRL's trainer around the same weights; it adds each step's log to `logs` and its ids (B, P + T) to `sampled`."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    tokenizer = make_tokenizer(size)
    # Everything that the models can say is a real token: padding gets an id behind the vocabulary, and none stops.
    tokenizer.add_special_tokens({"pad_token": "<behind>"})
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=bf16,
        gradient_checkpointing=False,
        per_device_train_batch_size=size.rows,
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=size.rows,
        num_mini_batches=1,
        num_ppo_epochs=epochs,
        total_episodes=size.rows * steps,
        response_length=size.new,
        stop_token=None,
        temperature=1.0,
        kl_coef=BETA,
        gamma=GAMMA,
        lam=LAM,
        vf_coef=1.0,  # ours
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,  # ours
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
    )
    policy, reward_model = make_gpt(size), make_reward_model(size)
    models = {
        "model": copy_weights(policy, make_llama(size)),
        "ref_model": copy_weights(make_reference(policy), make_llama(size)),
        "reward_model": copy_weights(reward_model, make_llama(size, score=True)),
        "value_model": copy_weights(reward_model, make_llama(size, score=True)),
    }
    for model in models.values():
        model.get_input_embeddings().padding_idx = None  # id 0 is a token like others, and learns
    prompts = make_prompts(size, size.rows * steps)
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        eval_dataset=Dataset.from_dict({"input_ids": prompts[:1]}),
        callbacks=[callback],
        **models,
    )
    generate = inspect.unwrap(ppo_trainer.batch_generation)  # without what noted the ids for another trainer

    @wraps(generate)
    def noting_the_ids(*args, **kwargs):
        ids, logits = generate(*args, **kwargs)
        sampled.append(ids)
        return ids, logits

    ppo_trainer.batch_generation = noting_the_ids
    trainer.log = logs.append
    return trainer


def given(ids: torch.Tensor, size: Size) -> Rollout:
    """The responses in (B, P + T) ids."""
    return Rollout.from_responses(ids[:, : size.prompt].tolist(), ids[:, size.prompt :].tolist())


def check(size: Size, epochs: int) -> dict[str, float]:
    """How far the two differ when they learn from the same responses: the largest distance of each number compared."""
    step = nanorl_step(size, torch.float32, CHECKED_STEPS, epochs)
    ours, theirs, sampled = [], [], []
    make_trainer = partial(trl_trainer, size, False, CHECKED_STEPS, epochs, theirs, sampled)
    with mock.patch("nanorl.optimizers.MAX_GRAD_NORM", math.inf):
        in_turns(make_trainer, lambda i: ours.append(step(i, given(sampled[i], size))))
    return {
        name: max(abs(a[name] - b[their_name]) for a, b in zip(ours, theirs, strict=True))
        for name, their_name in COMPARED.items()
    }


def turns(size: Size, dtype: str, trl_bf16: bool, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds a step of each side."""
    steps, sampled = WARMUP + size.steps, []
    make_trainer = partial(trl_trainer, size, trl_bf16, steps, 1, [], sampled)
    seconds = in_turns(make_trainer, nanorl_step(size, DTYPES[dtype], steps), clock)
    if any(ids.shape != (size.rows, size.prompt + size.new) for ids in sampled):
        raise SystemExit("TRL's responses have another length")
    return {side: statistics.median(values[WARMUP:]) for side, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=["S"], help="S, T")
    parser.add_argument("--steps", type=int, help="timed ones; default: the size's")
    parser.add_argument("--cpu-time", action="store_true", help=CPU_TIME)
    parser.add_argument("--check", action="store_true", help="compare the losses only")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    one_core()
    print(machine())
    for name in args.sizes:
        size = replace(SIZES[name], steps=args.steps or SIZES[name].steps)
        print(f"\n{name}: {size.rows} prompts, {size}")
        for epochs in (1, 2):
            distances = check(size, epochs)
            described = ", ".join(f"{key} {distance:.1g}" for key, distance in distances.items())
            print(f"{epochs} epochs: differ by {described}", flush=True)
            if max(distances.values()) > TOLERANCE:
                raise SystemExit("the losses are not equal: the times do not compare")
        if args.check:
            continue
        print(f"{'nanorl':>10}{'TRL':>10}{'seconds':>10}{'TRL':>8}{'ratio':>8}")
        for dtype, trl_bf16 in precisions():
            s = turns(size, dtype, trl_bf16, clock)
            other = "bfloat16" if trl_bf16 else "float32"
            print(f"{dtype:>10}{other:>10}{s['nanorl']:10.3f}{s['trl']:8.3f}{s['nanorl'] / s['trl']:8.2f}", flush=True)


if __name__ == "__main__":
    main()
