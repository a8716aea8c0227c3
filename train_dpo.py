"""DPO: from preference pairs straight to a policy, without a reward model and without sampling.

    python train_dpo.py                       film reviews, about a minute on one core
    python train_dpo.py --pairs FILE.jsonl    your own pairs: prompt, chosen, rejected on each line
    python train_dpo.py --help                every option

The best policy under a KL penalty is known in closed form, given the reward; turned around, each policy is the best one
for some reward, beta log(pi / pi_ref), and that one is fitted to the pairs (Rafailov et al. 2023). What it simplifies:
one device, and the people who made the pairs are a formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nanorl import preferences
from nanorl.batch_metrics import Means
from nanorl.errors import RunError
from nanorl.evaluation import evaluate_preferred
from nanorl.losses import dpo_loss, ipo_loss
from nanorl.losses.aggregate import sequence_logprobs
from nanorl.model import GPT, frozen_copy
from nanorl.optimizers import Optimizers, schedule
from nanorl.options import (
    DTYPES,
    at_least,
    check_common,
    checking_options,
    choose,
    choose_device,
    command_line,
    cpu_threads,
    describe_machine,
    describe_memory,
    policy_shape,
    seed_generators,
)
from nanorl.preferences import Pair, batch_of, collect_pairs, describe_dropped, rows_of_step
from nanorl.report import conclude
from nanorl.rollout import Rollout
from nanorl.run import Run
from nanorl.scorer import score
from nanorl.sft import start_from_demonstrations
from nanorl.tasks import PREFERENCE_TASKS

SHOWN_SAMPLES = 4  # to a prompt, in samples.html
WARMUP = 0.1  # the share of the steps in which the learning rate rises: large early steps overshoot, and KL explodes
HELD_OUT_PAIRS = 1000  # asked for: about prompts never trained on
SCORED_AT_ONCE = 256  # pairs, where no gradient is needed


@dataclass
class Config:
    """Options of train_dpo.py."""

    name: ClassVar[str] = "dpo"  # of the folders in runs/

    out: str | None = None
    """Folder for everything the run writes. Default: runs/dpo-N, the next free N."""
    seed: int = 0
    """Of weights, prompts, samples, labels and the order of the pairs."""
    steps: int = 240
    """Updates. A resumed run may be given another number: the learning rate then follows that."""
    task: str = "reviews"
    """What to learn: a row of nanorl/tasks whose responses people compare."""
    pairs: str = "8000"
    """Pairs of responses to ask about, or a JSONL file with prompt, chosen, rejected on each line (a margin is not
    used)."""
    labeller: str = "gold"
    """Whom to ask: a labeller of the task. The reviews have gold, who knows what is good, and length, who also loves
    long ones."""
    batch: int = 64
    """Pairs a step."""
    micro_batch: int | None = None
    """Pairs scored at a time; it changes memory, not the result. Default: all."""
    loss: str = "dpo"
    """dpo (sigmoid), or ipo: pull the margin to 1 / (2 beta) and no further."""
    beta: float = 0.3
    """Weight of KL(policy || reference) in what DPO solves; small: far from the reference."""
    label_smoothing: float = 0.0
    """Share of the labels thought to be wrong (cDPO)."""
    robust: bool = False
    """With label smoothing: correct for these without bias (robust DPO) instead of trusting all a little less."""
    length_normalized: bool = False
    """Compare log-probs a token instead of those of whole responses."""
    max_new_tokens: int | None = None
    """Longest response that is sampled, its stop token included. Default: the task's."""
    learning_rate: float = 1e-3
    """Linearly up over a tenth of the steps, then linearly to 0."""
    size: tuple[int, int, int] = (96, 2, 4)
    """Width, layers and heads of the transformer."""
    warm_start_steps: int | None = None
    """Supervised steps on demonstrations; kept beside the run for the next one. Default: the task's."""
    eval_every: int = 20
    """Steps between evaluations on held-out prompts."""
    eval_problems: int = 512
    """Responses in an evaluation."""
    save_every: int = 20
    """Steps between checkpoints."""
    resume: bool = False
    """Continue the run in --out (default: the newest in runs/) from its last checkpoint."""
    device: str = "auto"
    """cpu, cuda, or auto: the GPU if there is one."""
    dtype: str = "float32"
    """Of weights and arithmetic: float32, float64 or bfloat16 (with float32 master weights and log-probs)."""


def main(config: Config) -> dict:
    task = choose("task", config.task, PREFERENCE_TASKS)()
    choose("labeller", config.labeller, task.labellers)
    smoothing = {"label_smoothing": config.label_smoothing, "robust": config.robust}
    loss_function, keywords = choose("loss", config.loss, {"dpo": (dpo_loss, smoothing), "ipo": (ipo_loss, {})})
    if config.loss == "ipo" and (config.label_smoothing or config.robust):
        raise RunError("--loss ipo knows neither --label-smoothing nor --robust: leave them away")
    if config.robust and not config.label_smoothing:
        raise RunError("--robust corrects for a share of wrong labels: say which with --label-smoothing")
    dtype, device = choose("dtype", config.dtype, DTYPES), choose_device(config.device)
    check_common(config)
    at_least(config, batch=1, beta=1e-6, label_smoothing=0, eval_problems=2)
    max_new_tokens = config.max_new_tokens or task.max_new_tokens
    torch.set_num_threads(cpu_threads())
    seed_generators(config.seed)
    shape = policy_shape(task, config.size, max_new_tokens)
    with checking_options():
        nothing = torch.zeros(1)
        loss_function(nothing, nothing, nothing, nothing, beta=config.beta, **keywords)  # are they possible?
    given_pairs = preferences.given_to(config, task.tokenizer, shape.max_context)
    policy = GPT(shape).to(device, dtype)

    with Run(config) as run:
        start_from_demonstrations(run, policy, task, config.warm_start_steps)
        reference = frozen_copy(policy)
        optimizers = Optimizers(policy, config.learning_rate)
        run.track(optimizers, policy=policy, reference=reference)
        run.say(describe_machine(policy))
        run.say(describe_memory(policy=policy, reference=reference))
        held_out = task.held_out_problems(config.eval_problems)

        def log_probs(model: GPT, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
            """(B,) of the chosen responses and (B,) of the rejected ones."""
            rollout, _ = batch_of(pairs, device)
            logprobs, _ = score(model, rollout)  # (2 B, T)
            return sequence_logprobs(logprobs, rollout.mask, mean=config.length_normalized).chunk(2)

        @torch.no_grad()
        def all_log_probs(model: GPT, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
            parts = [log_probs(model, pairs[i : i + SCORED_AT_ONCE]) for i in range(0, len(pairs), SCORED_AT_ONCE)]
            return torch.cat([chosen for chosen, _ in parts]), torch.cat([rejected for _, rejected in parts])

        with run.phase("pairs"):
            asking = {"seed": config.seed, "labeller": config.labeller, "max_new_tokens": max_new_tokens}
            pairs, dropped = given_pairs or collect_pairs(reference, task, int(config.pairs), **asking)
            preferences.save(run.out / preferences.NAME, pairs, dropped)
            fresh, _ = collect_pairs(reference, task, HELD_OUT_PAIRS, **asking, held_out=True)
            run.say(f"{len(pairs)} pairs; dropped: {describe_dropped(dropped)}")
            run.results["pairs"] = {"trained_on": len(pairs), "dropped": dropped, "held_out": len(fresh)}
            if any(pair.margin for pair in pairs):
                run.say("the pairs' margins are not used: DPO has none")
            ref_chosen, ref_rejected = all_log_probs(reference, pairs)  # (pairs,): the reference never changes
            ref_fresh = all_log_probs(reference, fresh)
        batch = min(config.batch, len(pairs))
        if batch < config.batch:
            run.say(f"fewer pairs than --batch {config.batch}: each step takes all of them")

        def implied_reward(rollout: Rollout) -> Tensor:
            """(B,): beta log(pi / pi_ref), the reward for which this policy would be the best one."""
            log_ratio = score(policy, rollout)[0] - score(reference, rollout)[0]  # (B, T)
            return config.beta * sequence_logprobs(log_ratio, rollout.mask, mean=config.length_normalized)

        def examine(step: int) -> dict:
            chosen, rejected = all_log_probs(policy, fresh)
            _, metrics = dpo_loss(chosen, rejected, *ref_fresh, beta=config.beta)
            found = evaluate_preferred(policy, reference, implied_reward, task, held_out, max_new_tokens)
            return found | {"pair_accuracy": metrics["accuracy"].item()}

        for step in run.steps():
            evaluated = run.evaluate(step, examine)

            with run.phase("update"):
                rows = rows_of_step(step, len(pairs), batch, config.seed)
                rate = schedule(step, config.steps, decay=1.0, warmup=int(WARMUP * config.steps))
                means, total = Means(), torch.zeros((), device=device, dtype=ref_chosen.dtype)
                optimizers.zero_grad()
                size = config.micro_batch or batch
                for part in (rows[i : i + size] for i in range(0, len(rows), size)):
                    chosen, rejected = log_probs(policy, [pairs[row] for row in part])  # (b,), (b,)
                    loss, metrics = loss_function(
                        chosen,
                        rejected,
                        ref_chosen[part],
                        ref_rejected[part],
                        beta=config.beta,
                        denominator=len(rows),
                        **keywords,
                    )
                    loss.backward()
                    total += loss.detach()
                    means.add(metrics, len(part))
                norm = optimizers.update(total, rate).item()

            run.log(
                step,
                {
                    "loss": total.item(),
                    **means.result(),
                    "grad_norm": norm,
                    "learning_rate": rate * config.learning_rate,
                    **evaluated,
                },
            )

        return conclude(run, policy, task, held_out, examine, max_new_tokens=max_new_tokens, samples=SHOWN_SAMPLES)


if __name__ == "__main__":
    command_line(Config, __doc__, main)
