"""RLHF whole: imitate, learn what people prefer, then PPO against what was learned.

    python train_ppo.py                       film reviews, three to four minutes on one core
    python train_ppo.py --beta 0              nothing holds the policy back: it learns to fool the reward model
    python train_ppo.py --help                every option

    1  supervised fine-tuning on demonstrations                                       -> the first policy
    2  pairs of its responses, and which of the two people like better
    3  a reward model that tells the better one (Bradley-Terry, InstructGPT 2022)
    4  PPO (Schulman et al. 2017): respond, score, and make what went better than the critic expected likelier

Four models: the policy and its critic (a reward model read before each token) learn, the reference (the first policy)
and the reward model are frozen. What it simplifies: all of them stand on one device and take turns, one response to
each prompt that is drawn, and the people are a formula. It leaves out an entropy bonus, an adaptive beta (Ziegler et
al. 2019) and the gradients on other texts of InstructGPT's PPO-ptx; policy and critic share no weight, so there is no
weight of the critic's loss.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import torch

from nanorl import preferences
from nanorl import reward_model as rewarding
from nanorl.advantages import gae, place_rewards, whiten
from nanorl.batch_metrics import Means, explained_variance, token_metrics
from nanorl.errors import RunError
from nanorl.evaluation import evaluate_preferred, grade, sample_lines
from nanorl.kl import kl_estimate
from nanorl.losses import ppo_loss, value_loss
from nanorl.losses.aggregate import masked, token_count
from nanorl.model import GPT, frozen_copy
from nanorl.optimizers import Optimizers, schedule
from nanorl.options import (
    DTYPES,
    MAX_WEIGHT,
    MIN_CLIP,
    at_least,
    at_most,
    check_common,
    choose,
    choose_device,
    command_line,
    cpu_threads,
    describe_machine,
    describe_memory,
    excludes,
    policy_shape,
    seed_generators,
)
from nanorl.preferences import collect_pairs, describe_dropped
from nanorl.report import conclude, warn_if_over_optimized
from nanorl.reward_model import RewardModel
from nanorl.run import Run
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.sft import start_from_demonstrations
from nanorl.tasks import PREFERENCE_TASKS

SHOWN_SAMPLES = 4  # to a prompt, in samples.html
WARMUP, DECAY = 0.1, 0.5  # the shares of the steps in which the learning rate rises, and falls to zero
FRESH_PAIRS = 1000  # asked for, to examine the reward model: never trained on, about prompts never trained on


@dataclass
class Config:
    """Options of train_ppo.py."""

    name: ClassVar[str] = "ppo"  # of the folders in runs/

    out: str | None = None
    """Folder for everything the run writes. Default: runs/ppo-N, the next free N."""
    seed: int = 0
    """Of weights, prompts, samples and labels."""
    steps: int = 160
    """Batches of rollouts. A resumed run may be given another number: the learning rate then follows that."""
    task: str = "reviews"
    """What to learn: a row of nanorl/tasks whose responses people compare."""
    pairs: str = "8000"
    """Pairs of responses to ask about, or a JSONL file: prompt, chosen, rejected and perhaps margin on each line."""
    labeller: str = "gold"
    """Whom to ask: a labeller of the task. The reviews have gold, who knows what is good, and length, who also loves
    long ones."""
    reward: str | None = None
    """rm:DIR, a reward model trained before (its folder, or that of its run), instead of a new one; it is copied into
    the run."""
    reward_model_steps: int = 500
    """Of the reward model, 64 pairs each; nanorl/reward_model.py has its learning rate."""
    prompts: int = 128
    """Drawn for each step, one response to each."""
    epochs: int = 1
    """Times each batch of rollouts is used."""
    mini_batches: int = 4
    """Updates in each of these."""
    micro_batch: int | None = None
    """Responses an update scores at a time; it changes memory and time, not the result. Default: a mini-batch."""
    beta: float = 0.1
    """Weight of KL(policy || reference) a nat, in units of reward; with --kl-in loss, of whitened advantages."""
    kl_in: str = "reward"
    """Where the KL is paid for: `reward` takes beta (log pi - log pi_ref) from the reward of each token, as InstructGPT
    does; `loss` adds beta times the k3 estimate to the loss, as GRPO does."""
    gamma: float = 1.0
    """Discount a token."""
    lam: float = 0.95
    """Of GAE: 0 trusts the critic, 1 only what was received."""
    clip: float = 0.2
    """The ratio is clipped to 1 +- this, which matters from the second update on a batch on."""
    value_clip: float = 0.2
    """How far the critic may move from its value at the rollout, in units of reward, in the updates after a batch's
    first. 0: as far as it likes."""
    target_kl: float = 0.05
    """No further update on a batch once KL(old || policy) is above this, in nats a token."""
    missing_eos_penalty: float = 1.0
    """Taken from the score of a response that was cut off."""
    max_new_tokens: int | None = None
    """Longest response, its stop token included. Default: the task's."""
    learning_rate: float = 5e-4
    """Of policy and critic: linearly up over a tenth of the steps, constant, linearly to 0 over the last half."""
    size: tuple[int, int, int] = (96, 2, 4)
    """Width, layers and heads of each transformer. With --reward the critic has those of the model that was given."""
    warm_start_steps: int | None = None
    """Supervised steps on demonstrations; kept beside the run for the next one. Default: the task's."""
    eval_every: int = 10
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
    betas = {"reward": (config.beta, 0.0), "loss": (0.0, config.beta)}
    beta_in_reward, beta_in_loss = choose("kl-in", config.kl_in, betas)
    dtype, device = choose("dtype", config.dtype, DTYPES), choose_device(config.device)
    check_common(config)
    at_least(config, prompts=1, epochs=1, mini_batches=1, reward_model_steps=1, eval_problems=2)
    at_least(config, beta=0, gamma=0, lam=0, clip=MIN_CLIP, value_clip=0, target_kl=0, missing_eos_penalty=0)
    at_most(config, gamma=1, lam=1, clip=1, mini_batches=config.prompts, missing_eos_penalty=MAX_WEIGHT)
    if config.reward:
        excludes(config, "reward", "pairs", "labeller", "reward_model_steps")
    max_new_tokens = config.max_new_tokens or task.max_new_tokens
    torch.set_num_threads(cpu_threads())
    seed_generators(config.seed)
    shape = policy_shape(task, config.size, max_new_tokens)
    policy = GPT(shape).to(device, dtype)  # before anything else draws a random number: a seed has one warm start
    given = rewarding.given_to(config, shape)
    given_pairs = None if given else preferences.given_to(config, task.tokenizer, shape.max_context)

    with Run(config) as run:
        # 1 -------- the first policy
        start_from_demonstrations(run, policy, task, config.warm_start_steps)

        # 2, 3 ----- what people prefer, and a model of it
        def learn_reward() -> tuple[RewardModel, dict]:
            asking = {"seed": config.seed, "labeller": config.labeller, "max_new_tokens": max_new_tokens}
            pairs, dropped = given_pairs or collect_pairs(policy, task, int(config.pairs), **asking)
            preferences.save(run.out / preferences.NAME, pairs, dropped)
            fresh, _ = collect_pairs(policy, task, FRESH_PAIRS, **asking, held_out=True)
            run.say(f"{len(pairs)} pairs; dropped: {describe_dropped(dropped)}")
            model = RewardModel.from_policy(policy)
            report = run.reporter("reward model", config.reward_model_steps)
            rewarding.train_reward_model(model, pairs, steps=config.reward_model_steps, seed=config.seed, report=report)
            model.normalize_on(fresh)
            return model, rewarding.examine(model, fresh) | {"trained_on": len(pairs), "dropped": dropped}

        with run.phase("reward_model"):
            reward_model, found = rewarding.keep(run, (lambda: given) if given else learn_reward)
        reward_model.to(device, dtype)
        run.results["reward_model"] = found
        run.say(rewarding.describe(found))

        # 4 -------- PPO
        reference, critic = frozen_copy(policy), rewarding.critic_from(reward_model)
        # With one update a step nothing has moved when it comes: the forward passes that the advantages need are also
        # its own. That takes the memory of a whole batch, which a micro-batch is there to save.
        at_once = config.epochs * config.mini_batches == 1 and config.micro_batch is None
        optimizers = Optimizers(policy, config.learning_rate), Optimizers(critic, config.learning_rate)
        run.track(*optimizers, policy=policy, reference=reference, critic=critic)
        run.say(describe_machine(policy))
        run.say(describe_memory(policy=policy, critic=critic, reference=reference, reward_model=reward_model))
        sampler = Sampler(policy)
        held_out = task.held_out_problems(config.eval_problems)

        def examine(step: int) -> dict:
            found = evaluate_preferred(policy, reference, reward_model.outcomes, task, held_out, max_new_tokens)
            warn_if_over_optimized(run, step, found)
            return found

        for step in run.steps():
            evaluated = run.evaluate(step, examine)

            with run.phase("sample"):
                problems = task.training_problems(config.prompts, f"ppo {config.seed} {step}")
                rollout = sampler.generate(
                    [task.tokenizer.encode_prompt(problem.prompt) for problem in problems],
                    max_new_tokens=max_new_tokens,
                    stop_ids=[task.tokenizer.eos_id],
                    seed=config.seed,
                    sample_ids=range(step * config.prompts, (step + 1) * config.prompts),
                )

            with run.phase("reward"), torch.no_grad():
                mask = rollout.mask
                with torch.set_grad_enabled(at_once):
                    logprobs, entropy = score(policy, rollout)  # (B, T)
                    values = critic.values(rollout)  # (B, T)
                rollout.old_logprobs, rollout.values = logprobs.detach(), values.detach()
                scores = reward_model.outcomes(rollout)  # (B,)
                if not scores.isfinite().all():
                    raise RunError(f"a score in step {step} is not a finite number: the reward model is broken")
                cut_off = torch.tensor(
                    [f == "length" for f in rollout.finish], device=device, dtype=scores.dtype
                )  # (B,)
                rollout.rewards = scores - config.missing_eos_penalty * cut_off
                rollout.ref_logprobs, _ = score(reference, rollout)  # (B, T)
                kl = kl_estimate(rollout.old_logprobs, rollout.ref_logprobs, "k1")  # (B, T)
                rewards = place_rewards(rollout.rewards, mask)  # (B, T)
                rewards = rewards - beta_in_reward * masked(kl, mask)
                # A cut response was scored as it stands, so nothing is to come behind it either: with a bootstrap its
                # score would count twice, and not to stop would pay.
                rollout.advantages, rollout.returns = gae(
                    rewards, rollout.values, mask, gamma=config.gamma, lam=config.lam
                )
                rollout.advantages = whiten(rollout.advantages, mask)
                gold, _ = grade(task, problems, rollout)  # to look at

            with run.phase("update"):
                rate = schedule(step, config.steps, decay=DECAY, warmup=int(WARMUP * config.steps))
                means, updates = Means(), 0
                norms = torch.zeros(2, device=device)  # of the gradients of policy and critic
                batches = [
                    rows
                    for epoch in range(config.epochs)
                    for rows in shuffled(len(rollout), config.mini_batches, f"{config.seed} {step} {epoch}")
                ]
                for rows in batches:
                    batch = rollout if at_once else rollout.select(rows)
                    denominator, moved = token_count(batch.mask), 0.0  # moved: KL(old || policy), nats a token
                    total = torch.zeros(2, device=device, dtype=rollout.rewards.dtype)
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    for part in [batch] if at_once else batch.split(config.micro_batch):
                        if not at_once:
                            logprobs, _ = score(policy, part)  # (b, T)
                            values = critic.values(part)  # (b, T)
                        policy_loss, metrics = ppo_loss(
                            logprobs,
                            part.old_logprobs,
                            part.advantages,
                            part.mask,
                            clip_low=config.clip,
                            clip_high=config.clip,
                            ref_logprobs=part.ref_logprobs,
                            beta=beta_in_loss,
                            denominator=denominator,
                        )
                        critic_loss, value_metrics = value_loss(
                            values,
                            part.values,
                            part.returns,
                            part.mask,
                            clip=config.value_clip or None,
                            denominator=denominator,
                        )
                        (policy_loss + critic_loss).backward()
                        total += torch.stack([policy_loss, critic_loss]).detach()
                        means.add(metrics | value_metrics, token_count(part.mask))
                        moved += float(metrics["kl_old"]) * token_count(part.mask) / denominator
                    if updates and moved > config.target_kl:  # before the first, moved is rounding alone
                        break
                    norms += torch.stack([o.update(loss, rate) for o, loss in zip(optimizers, total, strict=True)])
                    updates += 1

            run.log(
                step,
                {
                    "proxy": scores.mean().item(),
                    "gold": sum(gold) / len(gold),
                    "kl": masked(kl, mask).sum(1).mean().item(),
                    "length": rollout.lengths.double().mean().item(),
                    "truncated_share": cut_off.double().mean().item(),
                    **{
                        name: mean.item()
                        for name, mean in token_metrics(rollout.old_logprobs, entropy, rollout).items()
                    },
                    "explained_variance": explained_variance(rollout.values, rollout.returns, mask),
                    **means.result(),
                    "policy_loss": total[0].item(),
                    "value_loss": total[1].item(),
                    "grad_norm": norms[0].item() / max(1, updates),
                    "critic_grad_norm": norms[1].item() / max(1, updates),
                    "updates": updates,
                    "learning_rate": rate * config.learning_rate,
                    **evaluated,
                },
            )
            if evaluated:
                run.samples(step, sample_lines(task, problems, rollout, scores, gold))

        how = {"max_new_tokens": max_new_tokens, "samples": SHOWN_SAMPLES, "proxy": reward_model.outcomes}
        return conclude(run, policy, task, held_out, examine, **how)


def shuffled(n: int, parts: int, key: str) -> list[list[int]]:
    """0 ... n - 1 in an order that is a function of `key`, dealt out into parts of the same size or one less."""
    rows = random.Random(key).sample(range(n), n)
    return [rows[part::parts] for part in range(parts)]


if __name__ == "__main__":
    command_line(Config, __doc__, main)
