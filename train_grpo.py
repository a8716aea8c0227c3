"""GRPO and its relatives on a task with verifiable rewards, from a warm start to a model that has learned to reason.

    python train_grpo.py                      chain arithmetic, about a minute on one core
    python train_grpo.py --help               every option

Sample a group of responses to each prompt, reward them, call a response's z-score in its group its advantage, and make
better ones likelier. What it simplifies: everything runs on one device, sampling and training take turns, and the
task is small enough to need no data. The optimizer is Muon with AdamW (nanorl/optimizers.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from nanorl import reward_model as rewarding
from nanorl.advantages import group_advantages, importance_weights, teaching_groups
from nanorl.algorithms import ALGORITHMS, choose_extras
from nanorl.batch_metrics import Means, rollout_metrics, token_metrics
from nanorl.errors import RunError
from nanorl.evaluation import evaluate, evaluate_preferred, grade, sample_lines
from nanorl.losses.aggregate import token_count
from nanorl.model import GPT, GPTConfig, frozen_copy
from nanorl.optimizers import Optimizers, schedule
from nanorl.options import (
    DTYPES,
    MIN_CLIP,
    at_least,
    at_most,
    check_common,
    checking_options,
    choose,
    choose_device,
    command_line,
    cpu_threads,
    describe_machine,
    policy_shape,
    seed_generators,
)
from nanorl.own_loss import with_own_loss
from nanorl.report import conclude, warn_if_over_optimized
from nanorl.reward_model import RewardModel
from nanorl.rewards.overlong import overlong_penalty
from nanorl.rollout import Rollout
from nanorl.run import Run
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.sft import start_from_demonstrations
from nanorl.tasks import PREFERENCE_TASKS, TASKS
from nanorl.tasks.task import Problem

# A second thread gains a quarter at the default size, and loses tenfold while anything else runs.
DECAY = 0.8  # the share of the steps in which the learning rate falls to zero
FINAL_SAMPLES = 4  # a problem, in the evaluations before and after, for pass@k
MAX_ROUNDS = 5  # of dynamic sampling a step: then it trains on the groups it has


@dataclass
class Config:
    """Options of train_grpo.py."""

    name: ClassVar[str] = "grpo"  # of the folders in runs/

    out: str | None = None
    """Folder for everything the run writes. Default: runs/grpo-N, the next free N."""
    seed: int = 0
    """Of weights, problems and samples."""
    steps: int = 80
    """Batches of rollouts. A resumed run may be given another number: the learning rate then follows that."""
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
    reward: str | None = None
    """rm:DIR, a reward model that train_ppo.py has trained (its folder, or that of its run): for tasks without a
    verifier. Default: the task's verifier."""
    prompts: int = 16
    """Problems a step."""
    group_size: int = 8
    """Responses to each problem."""
    updates_per_rollout: int | None = None
    """Disjoint parts of each batch of rollouts, with an update on each. From the second on they come from an older
    policy; the ratio corrects that. Default: the algorithm's."""
    epochs: int | None = None
    """Times each batch of rollouts is used. Default: the algorithm's."""
    extras: list[str] | None = None
    """Parts of DAPO around the loss, any of dynamic_sampling, overlong_penalty, overlong_filtering, or none. Default:
    the algorithm's."""
    micro_batch: int | None = None
    """Responses scored at a time; it changes memory, not the result. Default: all."""
    temperature: float = 1.0
    """Of sampling and of every log-prob."""
    max_new_tokens: int | None = None
    """Longest response, its stop token included. Default: the task's."""
    learning_rate: float = 1e-3
    """Constant, then linearly to 0 over the last 80 % of the steps."""
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low; it acts from the second update on. Default: the algorithm's."""
    clip_high: float | None = None
    """The ratio is clipped above 1 + clip_high; it acts from the second update on. Default: the algorithm's."""
    importance_cap: float | None = None
    """Correct for the mismatch of sampler and scorer: advantages are multiplied by pi_old / pi_sampler, at most this.
    Default: no correction."""
    beta: float = 0.0
    """Weight of KL(policy || warm start) in the loss; above 0 a frozen reference is kept."""
    size: tuple[int, int, int] = (96, 2, 4)
    """Width, layers and heads of the transformer."""
    warm_start_steps: int | None = None
    """Supervised steps on demonstrations before the first update; kept beside the run for the next one. Default: the
    task's."""
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
    dtype: str = "float32"
    """Of weights and arithmetic: float32, float64 or bfloat16 (with float32 master weights and log-probs)."""


def main(config: Config) -> dict:
    algorithm = with_own_loss(
        choose("algo", config.algo, ALGORITHMS),
        config.loss,
        config.loss_args,
        weighted=config.importance_cap is not None,
    )
    task = choose("task", config.task, TASKS)()
    dtype = choose("dtype", config.dtype, DTYPES)
    device = choose_device(config.device)
    check_common(config)
    at_least(config, prompts=1, group_size=2, epochs=1, updates_per_rollout=1)
    at_least(
        config, beta=0, eval_problems=1, clip_low=MIN_CLIP, clip_high=MIN_CLIP, importance_cap=0.1, temperature=1e-3
    )
    updates, epochs = config.updates_per_rollout or algorithm.updates_per_rollout, config.epochs or algorithm.epochs
    at_most(config, clip_low=1, updates_per_rollout=config.prompts)
    updates = min(updates, config.prompts)  # the algorithm's default too: a part holds at least one group
    extras = choose_extras(config.extras, algorithm)
    # Whose log-probs are the old ones: the sampler's, unless the policy is scored more than once, or in bfloat16, where
    # the two may differ by more than GSPO's clip range, or to correct for just that difference.
    rescored = updates * epochs > 1 or dtype == torch.bfloat16 or config.importance_cap is not None
    max_new_tokens = config.max_new_tokens or task.max_new_tokens
    torch.set_num_threads(cpu_threads())
    seed_generators(config.seed)
    shape = policy_shape(task, config.size, max_new_tokens)
    with checking_options():
        options = {"beta": config.beta or None, "clip_low": config.clip_low, "clip_high": config.clip_high}
        options["max_length"] = max_new_tokens  # a keyword of dr_grpo alone
        algorithm.chosen(**options)  # an option that the loss does not have is an error
    policy = GPT(shape).to(device, dtype)  # before anything else draws a random number: a seed has one warm start
    given = choose_reward(config, shape)

    with Run(config) as run:
        start_from_demonstrations(run, policy, task, config.warm_start_steps)
        reward_model = rewarding.keep(run, lambda: given)[0].to(device, dtype) if given else None
        # Where nothing can be verified, how far the policy has gone is part of every evaluation.
        reference = frozen_copy(policy) if config.beta > 0 or reward_model else None
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

        def examine(step: int) -> dict:
            if reward_model is not None:
                found = evaluate_preferred(policy, reference, reward_model.outcomes, task, held_out, max_new_tokens)
                warn_if_over_optimized(run, step, found)
                return found
            samples = FINAL_SAMPLES if step in (0, config.steps) else 1
            return evaluate(policy, task, held_out, max_new_tokens, samples=samples)

        def sample(step: int, number: int) -> tuple[list[Problem], Rollout, dict[str, list[float]]]:
            """Problems, responses with their rewards, and what the task says of them: round `number` of a step."""
            first = (step * (MAX_ROUNDS if "dynamic_sampling" in extras else 1) + number) * rows
            with run.phase("sample"):
                again = f" {number}" if number else ""
                problems = task.training_problems(config.prompts, f"grpo {config.seed} {step}{again}")
                rollout = sampler.generate(
                    [task.tokenizer.encode_prompt(problem.prompt) for problem in problems],
                    **sampling,
                    seed=config.seed,
                    sample_ids=range(first, first + rows),  # new random numbers in every round
                )
            with run.phase("reward"):
                rewards, described = grade(task, problems, rollout)
                rollout.rewards = torch.tensor(rewards, dtype=rollout.behavior_logprobs.dtype, device=device)  # (B,)
                if reward_model is not None:  # then the task's own score is to be looked at, not to be trained on
                    described["gold"], rollout.rewards = rewards, reward_model.outcomes(rollout)
                broken = (~rollout.rewards.isfinite()).nonzero().flatten().tolist()
                if broken:
                    raise RunError(
                        f"the reward of response {broken[0]} in step {step} is {rollout.rewards[broken[0]].item()}: "
                        "mend the reward"
                    )
            return problems, rollout, described

        def collect(step: int) -> tuple[list[Problem], Rollout, dict[str, list[float]], Rollout, int]:
            """All that was sampled, as in `sample`; what of it is trained on; and the number of rounds."""
            problems, rollout, described = sample(step, 0)
            if "dynamic_sampling" not in extras:
                return problems, rollout, described, rollout, 1
            rounds = 1
            while len(teaching_groups(rollout.rewards, rollout.groups)) < config.prompts and rounds < MAX_ROUNDS:
                more_problems, more, more_described = sample(step, rounds)
                problems, rollout, rounds = problems + more_problems, rollout.join(more), rounds + 1
                described = {name: values + more_described[name] for name, values in described.items()}
            teaching = teaching_groups(rollout.rewards, rollout.groups)
            # Where none teaches: as many others then, which the penalty and the KL term alone can move.
            chosen = teaching if len(teaching) else rollout.groups.unique()
            batch = rollout.select_groups(chosen[: config.prompts])
            return problems, rollout, described, batch, rounds

        def look(part: Rollout, logprobs: Tensor, entropy: Tensor, means: Means) -> None:
            """What is fixed before the first update on a micro-batch, from its scores (b, T) under the policy now."""
            means.add(token_metrics(logprobs, entropy, part), token_count(part.mask))
            part.old_logprobs = logprobs.detach() if rescored else part.behavior_logprobs
            if config.importance_cap is not None:
                weights = importance_weights(
                    part.old_logprobs,
                    part.behavior_logprobs,
                    part.mask,
                    cap=config.importance_cap,
                    level=algorithm.level,
                )  # (b, T), or (b,) for the ratio of a sequence
                part.advantages = (part.advantages if weights.dim() == 1 else part.advantages[:, None]) * weights
            if reference is not None:
                with torch.no_grad():
                    part.ref_logprobs, _ = score(reference, part)

        for step in run.steps():
            evaluated = run.evaluate(step, examine)

            problems, rollout, described, batch, rounds = collect(step)

            with run.phase("update"):
                rewards = batch.rewards  # (B,) the task's, by which groups are chosen and runs are compared
                if "overlong_penalty" in extras:
                    rewards = rewards + overlong_penalty(batch.lengths, max_new_tokens)
                batch.advantages = group_advantages(
                    rewards, batch.groups, scale=algorithm.advantage_scale, valid=batch.mask.any(1)
                )
                if "overlong_filtering" in extras:
                    ended = torch.tensor([finish == "stop" for finish in batch.finish], device=device)
                    batch = replace(batch, mask=batch.mask & ended[:, None])
                rate = schedule(step, config.steps, decay=DECAY)
                before, means, losses, norms = Means(), Means(), [], []
                plan = []  # of each update its denominator, whatever the micro-batches, and the micro-batches
                for update in batch.split_groups(updates):
                    plan.append((algorithm.denominator(update.mask), list(update.split(config.micro_batch))))
                if len(plan) > 1:  # the later ones are scored before the first one moves the policy
                    for part in [part for _, parts in plan for part in parts]:
                        with torch.no_grad():
                            look(part, *score(policy, part), before)
                for epoch in range(epochs):
                    for denominator, parts in plan:
                        loss = torch.zeros((), device=device, dtype=batch.rewards.dtype)
                        optimizers.zero_grad()
                        for part in parts:
                            logprobs, entropy = score(policy, part)  # (b, T), (b, T)
                            if epoch == 0 and len(plan) == 1:
                                look(part, logprobs, entropy, before)
                            part_loss, metrics = algorithm.loss(
                                logprobs,
                                part.old_logprobs,
                                part.advantages,
                                part.mask,
                                **algorithm.chosen(**options, ref_logprobs=part.ref_logprobs, denominator=denominator),
                            )
                            part_loss.backward()
                            loss += part_loss.detach()
                            means.add(metrics, algorithm.weight(part.mask))
                        norms.append(optimizers.update(loss, rate).item())
                        losses.append(loss.item())

            run.log(
                step,
                {
                    **rollout_metrics(rollout, described),
                    **before.result(),
                    **means.result(),
                    "loss": sum(losses) / len(losses),
                    "grad_norm": sum(norms) / len(norms),
                    "learning_rate": rate * config.learning_rate,
                    "sampling_rounds": rounds,
                    "tokens_per_second": int(rollout.lengths.sum()) / run.step_seconds["sample"],
                    **evaluated,
                },
            )
            if evaluated:
                run.samples(step, sample_lines(task, problems, rollout, rollout.rewards, described.get("gold")))

        how = {"max_new_tokens": max_new_tokens, "samples": FINAL_SAMPLES, "scale": algorithm.advantage_scale}
        how |= {"proxy": reward_model.outcomes} if reward_model else {}
        return conclude(run, policy, task, held_out, examine, **how)


def choose_reward(config: Config, shape: GPTConfig) -> tuple[RewardModel, dict] | None:
    """The learned reward and what was found out about it, for a task that has no verifier."""
    learned = config.task in PREFERENCE_TASKS
    if learned and config.reward is None:
        raise RunError(
            f"--task {config.task} has no verifier: give --reward rm:DIR, the folder of a run of train_ppo.py"
        )
    if config.reward is not None and not learned:
        raise RunError(f"--task {config.task} has a verifier: leave --reward away")
    return rewarding.given_to(config, shape) if learned else None


if __name__ == "__main__":
    command_line(Config, __doc__, main)
