"""A GPT that says a number instead of the next token: outcome reward model, process reward model, critic.

It starts from the policy that was fine-tuned on demonstrations, its head replaced by a scalar one (Ouyang et al. 2022,
arXiv:2203.02155). The number is read from the hidden state behind a token:

    outcome   behind the last token of the response          what is the whole response worth?
    process   behind the last token of each step             is it right so far?
    critic    before each token                              what is still to come?
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from nanorl import checkpoint
from nanorl.advantages import EQUAL
from nanorl.errors import RunError
from nanorl.losses import bradley_terry_loss
from nanorl.model import GPT, GPTConfig
from nanorl.optimizers import Optimizers, schedule
from nanorl.preferences import Pair, batch_of, rows_of_step
from nanorl.rollout import Rollout
from nanorl.run import Run
from nanorl.scorer import hidden_states

NAME = "reward_model"
BATCH = 64  # pairs a step
LEARNING_RATE = 3e-3
WARMUP = 10  # steps in which the learning rate rises; it then falls to zero with the last step
BINS = 5  # of the calibration


class RewardModel(GPT):
    """`scores` are `gain` times what the head says, plus `bias`: see `normalize`."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        if not config.tied:
            del self.head_weight
        # Zeros: at first all responses are worth the same, and the loss is log 2.
        self.score_weight = nn.Parameter(torch.zeros(1, config.width))
        self.register_buffer("gain", torch.ones(()))
        self.register_buffer("bias", torch.zeros(()))

    @classmethod
    def from_policy(cls, policy: GPT) -> RewardModel:
        """The policy's weights, in storage of their own, under a scalar head."""
        model = cls(policy.config).to(policy.head.device, policy.head.dtype)
        trunk = {name: weight for name, weight in policy.state_dict().items() if name != "head_weight"}
        model.load_state_dict(trunk, strict=False)
        return model

    @property
    def head(self) -> Tensor:
        """(1, D)"""
        return self.score_weight

    def scores(self, rollout: Rollout, *, raw: bool = False) -> Tensor:
        """(B, T + 1): what the head says when it has read the prompt and the first t tokens of the response, t = 0 ...
        T. Behind a row's end they mean nothing. `raw`: without gain and bias."""
        hidden = hidden_states(self, rollout, read=rollout.tokens.shape[1])  # (B, T + 1, D)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        scores = (hidden.to(dtype) @ self.head.to(dtype).T).squeeze(-1)
        return scores if raw else self.gain * scores + self.bias

    def outcomes(self, rollout: Rollout, *, raw: bool = False) -> Tensor:
        """(B,): the score of each response, read behind its last token, whatever stands behind that. An empty response
        is an error: it would be the prompt that is scored."""
        if not rollout.mask.any(1).all():
            row = (~rollout.mask.any(1)).nonzero()[0].item()
            raise ValueError(f"response {row} has no token that could be scored: leave it out")
        return self.scores(rollout, raw=raw).gather(1, rollout.lengths[:, None]).squeeze(1)

    def steps(self, rollout: Rollout, ends: Tensor) -> Tensor:
        """(B, T): the score behind each token where `ends` (B, T) is True, the last one of a step; 0 elsewhere."""
        return self.scores(rollout)[:, 1:].masked_fill(~ends, 0.0)

    def values(self, rollout: Rollout) -> Tensor:
        """As a critic: (B, T) what is still to come before each token, 0 outside the mask."""
        return self.scores(rollout)[:, :-1].masked_fill(~rollout.mask, 0.0)

    @torch.no_grad()
    def normalize_on(self, pairs: Sequence[Pair]) -> None:
        """Normalize on all responses of these pairs, best of the policy that PPO starts from."""
        self.normalize(self.outcomes(batch_of(pairs, self.head.device)[0], raw=True))

    @torch.no_grad()
    def normalize(self, raw: Tensor) -> None:
        """Choose gain and bias so that these raw scores (N,) get mean 0 and standard deviation 1 (ddof 0). A score has
        no zero and no unit of its own; this gives `beta` one. Kept with the weights; done again it changes nothing."""
        raw = raw.double()
        spread = raw.std(correction=0)
        self.gain.copy_(1 / spread if spread > EQUAL * raw.abs().max() else 1.0)
        self.bias.copy_(-raw.mean() * self.gain)


def train_reward_model(
    model: RewardModel,
    pairs: Sequence[Pair],
    *,
    steps: int,
    seed: int,
    batch: int = BATCH,
    learning_rate: float = LEARNING_RATE,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train `model` in place: Bradley-Terry on raw outcome scores. `report(step, loss)` is called after each step."""
    optimizers = Optimizers(model, learning_rate)
    for step in range(steps):
        rows = rows_of_step(step, len(pairs), min(batch, len(pairs)), seed)
        rollout, margins = batch_of([pairs[row] for row in rows], model.head.device)
        chosen, rejected = model.outcomes(rollout, raw=True).chunk(2)
        margins = None if margins is None else margins.to(chosen.dtype)
        loss, _ = bradley_terry_loss(chosen, rejected, margin=margins)
        optimizers.zero_grad()
        loss.backward()
        optimizers.update(loss.detach(), schedule(step, steps, decay=1.0, warmup=WARMUP))
        report(step, loss.item())


@torch.no_grad()
def examine(model: RewardModel, pairs: Sequence[Pair]) -> dict:
    """How far the model can be trusted, on pairs it has not seen.

    accuracy             share of pairs whose chosen response it scores higher
    calibration          [[mean probability it gives its favourite, share of these that were chosen, pairs], ...]
    calibration_error    mean over pairs of the distance between the first two
    length_correlation   of score and length over all responses: far from that of gold and length it is a bias
    """
    rollout, _ = batch_of(pairs, model.head.device)
    scores = model.outcomes(rollout, raw=True).double()
    chosen, rejected = scores.chunk(2)
    loss, metrics = bradley_terry_loss(chosen, rejected)
    sure = (chosen - rejected).abs().sigmoid()  # (n,) of its favourite
    right = (chosen > rejected).double()
    bins = ((sure - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    calibration = [
        [sure[bins == b].mean().item(), right[bins == b].mean().item(), int((bins == b).sum())]
        for b in bins.unique().tolist()
    ]
    return {
        "accuracy": metrics["accuracy"].item(),
        "loss": loss.item(),
        "pairs": len(pairs),
        "calibration": calibration,
        "calibration_error": sum(abs(p - q) * n for p, q, n in calibration) / len(pairs),
        "length_correlation": correlation(scores, rollout.lengths.double()),
    }


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's, of two (N,); 0 where one of them is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = (x.norm() * y.norm()).item()
    return (x @ y).item() / scale if scale > 0 else 0.0


def describe(report: dict) -> str:
    """For the console, of what `examine` found."""
    if "accuracy" not in report:
        return "reward model: nobody has examined it"
    return (
        f"reward model: accuracy {report['accuracy']:.3f} on {report['pairs']} fresh pairs, off by "
        f"{report['calibration_error']:.3f} in its certainty, correlation of score and length "
        f"{report['length_correlation']:+.2f}"
    )


def save(folder: Path, model: RewardModel, report: dict) -> None:
    """`folder`/reward_model, all of it or nothing."""
    checkpoint.write(folder / NAME, {NAME: model}, {"report": report})


def load(folder: Path) -> tuple[RewardModel, dict]:
    """A frozen reward model and what was found out about it, from its folder or that of its run."""
    folder = folder / NAME if (folder / NAME).is_dir() else folder
    if not (folder / f"{NAME}.json").exists():
        raise RunError(f"{folder} holds no reward model: give the folder of a run of train_ppo.py")
    model = checkpoint.load_model(folder, NAME, RewardModel)
    saved = checkpoint.load(folder, {NAME: model})
    if not isinstance(saved, dict) or not isinstance(saved.get("report"), dict):
        raise RunError(f"{folder} is damaged (training.pt holds no report)")
    if not all(value.isfinite().all() for value in model.state_dict().values()):
        raise RunError(f"{folder} holds a reward model whose weights are not all finite numbers: train another")
    return model.requires_grad_(False), saved["report"]


def from_option(option: str, config: GPTConfig) -> tuple[RewardModel, dict]:
    """What `--reward rm:DIR` names, if it can read what a policy of this shape writes."""
    kind, _, folder = option.partition(":")
    if kind != "rm" or not folder:
        raise RunError(f"--reward {option} is unknown: write rm:DIR, the folder of a run of train_ppo.py")
    model, report = load(Path(folder))
    if model.config.vocab_size != config.vocab_size or model.config.max_context < config.max_context:
        raise RunError(
            f"the reward model in {folder} reads {model.config.max_context} tokens of a vocabulary of "
            f"{model.config.vocab_size}, the policy writes {config.max_context} of {config.vocab_size}: train another"
        )
    return model, report


def given_to(config, shape: GPTConfig) -> tuple[RewardModel, dict] | None:
    """What a run is to be rewarded by: the copy in its folder if it goes on, else what --reward names; None without."""
    if config.out and (Path(config.out) / NAME).exists():
        if not config.resume:
            raise RunError(
                f"{config.out} already holds a reward model: choose another --out, or give --reward rm:{config.out}"
            )
        return from_option(f"rm:{config.out}", shape)
    return from_option(config.reward, shape) if config.reward else None


def keep(run: Run, make: Callable[[], tuple[RewardModel, dict]]) -> tuple[RewardModel, dict]:
    """The frozen reward model in a run's folder, made (or copied there) once and for all, and what was found out about
    it: a run that goes on learns from the same one."""
    if not (run.out / NAME).exists():
        if run.has_checkpoint:
            raise RunError(f"{run.out / NAME} is gone, and the run learns from it: put it back, or start a new run")
        save(run.out, *make())
    return load(run.out)


def critic_from(reward_model: RewardModel) -> RewardModel:
    """To start with, what is to come is what the reward model already sees in the text so far."""
    return copy.deepcopy(reward_model).requires_grad_(True)
