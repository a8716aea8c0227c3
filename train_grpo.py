"""GRPO and its relatives on a task with verifiable rewards, from a warm start to a model that has learned to reason.

    python train_grpo.py                      chain arithmetic, about a minute on one core
    python train_grpo.py --help               every option

Sample a group of responses to each prompt, reward them, call a response's z-score in its group its advantage, and make
better ones likelier. What it simplifies: everything runs on one device, sampling and training take turns, and the
task is small enough to need no data. The optimizer is Muon with AdamW (nanorl/optimizers.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from nanorl import viewer
from nanorl.advantages import group_advantages, importance_weights
from nanorl.algorithms import ALGORITHMS
from nanorl.batch_metrics import TokenMeans, rollout_metrics, token_metrics
from nanorl.evaluation import describe_evaluation, evaluate, grade, sample_lines
from nanorl.losses.aggregate import token_count
from nanorl.model import GPT, GPTConfig, frozen_copy
from nanorl.optimizers import Optimizers, schedule
from nanorl.options import (
    DTYPES,
    MAX_SEED,
    at_least,
    at_most,
    checking_options,
    choose,
    choose_device,
    command_line,
    describe_machine,
    seed_generators,
)
from nanorl.own_loss import with_own_loss
from nanorl.plots import draw_curves
from nanorl.run import Run
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.sft import cached_warm_start
from nanorl.tasks import TASKS

DECAY = 0.8  # the share of the steps in which the learning rate falls to zero
FINAL_SAMPLES = 4  # a problem, in the evaluations before and after, for pass@k


@dataclass
class Config:
    """Options of train_grpo.py."""

    name: ClassVar[str] = "grpo"  # of the folders in runs/

    out: str | None = None
    """Folder for everything the run writes. Default: runs/grpo-N, the next free N."""
    seed: int = 0
    """Of weights, problems and samples."""
    steps: int = 80
    """Updates of the policy. A resumed run may be given another number: the learning rate then follows that."""
    algo: str = "grpo"
    """Algorithm: a row of nanorl/algorithms.py."""
    loss: str | None = None
    """Your own loss instead of the algorithm's, FILE.py:FUNCTION (nanorl/own_loss.py says what it must look like).
    Advantages and denominator stay the algorithm's, unless the file has a line `advantage_scale = ...` or
    `mean_over = ...`."""
    loss_args: list[str] = field(default_factory=list)
    """Keywords of the loss that have no option of their own: k=v k=v ..."""
    task: str = "chain"
    """What to learn: a row of nanorl/tasks."""
    prompts: int = 16
    """Problems a step."""
    group_size: int = 8
    """Responses to each problem."""
    epochs: int = 1
    """Updates on each batch of rollouts. From the second on they come from an older policy; the ratio corrects that."""
    micro_batch: int | None = None
    """Responses scored at a time; it changes memory, not the result. Default: all."""
    temperature: float = 1.0
    """Of sampling and of every log-prob."""
    max_new_tokens: int | None = None
    """Longest response, its stop token included. Default: the task's."""
    learning_rate: float = 1e-3
    """Constant, then linearly to 0 over the last 80 % of the steps."""
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low; it acts from the second epoch on. Default: the algorithm's."""
    clip_high: float | None = None
    """The ratio is clipped above 1 + clip_high; it acts from the second epoch on. Default: the algorithm's."""
    importance_cap: float | None = None
    """Correct for the mismatch of sampler and scorer: advantages are multiplied by pi_old / pi_sampler, at most this.
    Default: no correction."""
    beta: float = 0.0
    """Weight of KL(policy || warm start) in the loss; above 0 a frozen reference is kept."""
    width: int = 96
    """Of the transformer's residual stream."""
    layers: int = 2
    """Of the transformer."""
    heads: int = 4
    """Of the transformer's attention."""
    warm_start_steps: int = 300
    """Supervised steps on demonstrations before the first update; kept beside the run for the next one."""
    eval_every: int = 20
    """Steps between evaluations on held-out problems."""
    eval_problems: int = 512
    """Held-out problems."""
    save_every: int = 20
    """Steps between checkpoints."""
    resume: bool = False
    """Continue the run in --out (default: the newest in runs/) from its last checkpoint."""
    device: str = "auto"
    """cpu, cuda, or auto: the GPU if there is one."""
    threads: int = 1
    """Of the CPU. At the default size a second one gains a quarter, and loses tenfold while anything else runs."""
    dtype: str = "float32"
    """Of weights and arithmetic: float32, float64 or bfloat16 (with float32 master weights and log-probs)."""


def main(config: Config) -> dict:
    algorithm = with_own_loss(choose("algo", config.algo, ALGORITHMS), config.loss, config.loss_args)
    task = choose("task", config.task, TASKS)()
    dtype = choose("dtype", config.dtype, DTYPES)
    device = choose_device(config.device)
    at_least(config, seed=0, steps=1, prompts=1, group_size=2, epochs=1, micro_batch=1, temperature=1e-3)
    at_least(config, learning_rate=0, clip_low=0, clip_high=0, beta=0, width=1, layers=1, heads=1, warm_start_steps=0)
    at_least(config, max_new_tokens=1, eval_every=1, eval_problems=1, save_every=1, threads=1, importance_cap=0.1)
    at_most(config, seed=MAX_SEED, clip_low=1)
    # Whose log-probs are the old ones: the sampler's, unless the policy is scored more than once, or in bfloat16, where
    # the two differ by 0.007 a token, or to correct for just that difference.
    rescored = config.epochs > 1 or dtype == torch.bfloat16 or config.importance_cap is not None
    max_new_tokens = config.max_new_tokens or task.max_new_tokens
    torch.set_num_threads(config.threads)
    seed_generators(config.seed)
    with checking_options():
        shape = GPTConfig(
            vocab_size=task.tokenizer.vocab_size,
            width=config.width,
            layers=config.layers,
            heads=config.heads,
            max_context=task.max_prompt_tokens + max(max_new_tokens, task.max_new_tokens),
        )
        options = {"beta": config.beta or None, "clip_low": config.clip_low, "clip_high": config.clip_high}
        options["max_length"] = max_new_tokens  # a keyword of dr_grpo alone
        algorithm.chosen(**options)  # an option that the loss does not have is an error
    policy = GPT(shape).to(device, dtype)

    with Run(config) as run:
        if not run.has_checkpoint:
            with run.phase("warm_start"):
                run.results["warm_start_cached"] = cached_warm_start(
                    policy,
                    task,
                    run.out.parent / "warm_starts",
                    steps=config.warm_start_steps,
                    seed=config.seed,
                    report=run.reporter("warm start", config.warm_start_steps),
                )
        reference = frozen_copy(policy) if config.beta > 0 else None
        optimizers = Optimizers(policy, config.learning_rate)
        run.track(optimizers, policy=policy, **({"reference": reference} if reference else {}))
        run.say(describe_machine(policy))
        sampler = Sampler(policy)
        held_out = task.held_out_problems(config.eval_problems)
        rows = config.prompts * config.group_size  # B, responses a step
        sampling = {
            "samples_per_prompt": config.group_size,
            "max_new_tokens": max_new_tokens,
            "stop_ids": [task.tokenizer.eos_id],
            "temperature": config.temperature,
        }
        run.results["sampling"] = sampling  # as it was, defaults filled in

        for step in run.steps():
            evaluated = {}
            if step % config.eval_every == 0:
                with run.phase("eval"):
                    samples = FINAL_SAMPLES if step == 0 else 1
                    evaluated = {"eval": evaluate(policy, task, held_out, max_new_tokens, samples=samples)}
                run.results.setdefault("eval_before", evaluated["eval"])

            with run.phase("sample"):
                problems = task.training_problems(config.prompts, f"grpo {config.seed} {step}")
                rollout = sampler.generate(
                    [task.tokenizer.encode_prompt(problem.prompt) for problem in problems],
                    **sampling,
                    seed=config.seed,
                    sample_ids=range(step * rows, (step + 1) * rows),  # new random numbers in every step
                )

            with run.phase("reward"):
                rewards, described = grade(task, problems, rollout)
                rollout.rewards = torch.tensor(rewards, dtype=rollout.behavior_logprobs.dtype, device=device)  # (B,)
                rollout.advantages = group_advantages(
                    rollout.rewards, rollout.groups, scale=algorithm.advantage_scale, valid=rollout.mask.any(1)
                )
                rollout.old_logprobs = rollout.behavior_logprobs

            with run.phase("update"):
                denominator = algorithm.denominator(rollout.mask)  # of the whole batch, whatever the micro-batches
                rate = schedule(step, config.steps, decay=DECAY)
                before, means = TokenMeans(), TokenMeans()
                parts = list(rollout.split(config.micro_batch))
                for epoch in range(config.epochs):
                    loss = torch.zeros((), device=device, dtype=rollout.rewards.dtype)
                    optimizers.zero_grad()
                    for part in parts:
                        logprobs, entropy = score(policy, part)  # (b, T), (b, T)
                        if epoch == 0:
                            before.add(token_metrics(logprobs, entropy, part), token_count(part.mask))
                            if rescored:
                                part.old_logprobs = logprobs.detach()
                            if config.importance_cap is not None:
                                weights = importance_weights(
                                    part.old_logprobs, part.behavior_logprobs, part.mask, cap=config.importance_cap
                                )
                                part.advantages = part.advantages[:, None] * weights  # (b, T)
                            if reference is not None:
                                with torch.no_grad():
                                    part.ref_logprobs, _ = score(reference, part)
                        part_loss, metrics = algorithm.loss(
                            logprobs,
                            part.old_logprobs,
                            part.advantages,
                            part.mask,
                            **algorithm.chosen(**options, ref_logprobs=part.ref_logprobs, denominator=denominator),
                        )
                        part_loss.backward()
                        loss += part_loss.detach()
                        means.add(metrics, token_count(part.mask))
                    grad_norm = optimizers.update(loss, rate)

            run.log(
                step,
                {
                    **rollout_metrics(rollout, described),
                    **before.result(),
                    **means.result(),
                    "loss": loss.item(),
                    "grad_norm": grad_norm.item(),
                    "learning_rate": rate * config.learning_rate,
                    "tokens_per_second": token_count(rollout.mask) / run.step_seconds["sample"],
                    **evaluated,
                },
            )
            if evaluated:
                run.samples(step, sample_lines(task, problems, rollout))

        run.stop_if_interrupted(f"saved at step {config.steps} of {config.steps}")
        with run.phase("eval"):
            eval_after = evaluate(policy, task, held_out, max_new_tokens, samples=FINAL_SAMPLES)
        summary = run.finish(eval_after=eval_after)
        draw_curves(run.out)
        before, after = summary["eval_before"], summary["eval_after"]
        page = viewer.write_run(
            run.out,
            policy,
            task,
            held_out,
            f"accuracy {before['accuracy']:.3f} → {after['accuracy']:.3f} on {len(held_out)} held-out problems",
            samples=FINAL_SAMPLES,
            max_new_tokens=max_new_tokens,
            scale=algorithm.advantage_scale,
        )
        run.say(describe_evaluation(before, after))
        run.say(f"curves, samples, weights: {run.out}\nwhat changed, token by token: {page}")
    return summary


if __name__ == "__main__":
    command_line(Config, __doc__, main)
