"""PPO's two losses with GAE against TRL's values, and the critic's loss alone. What its policy loss shares with the
others is tested with them: test_group_policy_losses.py."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanorl.advantages import gae, place_rewards, whiten
from nanorl.batch_metrics import explained_variance
from nanorl.kl import kl_estimate
from nanorl.losses import ppo_loss, value_loss
from nanorl.losses.aggregate import token_count

ORACLE = json.loads((Path(__file__).parent / "data" / "ppo_gae.json").read_text())
CASES = {case["name"]: case for case in ORACLE["cases"]}
properties = settings(derandomize=True, deadline=None, max_examples=40)
EXACT = {"rtol": 0, "atol": 1e-10}


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


INPUTS = {name: f64(values) for name, values in ORACLE["inputs"].items()}

# ---- independent values: computed by TRL 1.12.0, see data/README.md


def masks(case: dict) -> tuple[Tensor, Tensor]:
    """Of the policy, up to the last token, and of the critic: TRL's has one position more where there is room, which is
    where its score lands."""
    position, last = torch.arange(INPUTS["values"].shape[1]), torch.tensor(case["sequence_lengths"])[:, None]
    return position <= last, position <= last + 1


def rewards_of(case: dict) -> Tensor:
    config, (policy, critic) = case["config"], masks(case)
    kl = kl_estimate(INPUTS["logprobs"], INPUTS["ref_logprobs"], config["kl_estimator"])
    rewards = torch.where(policy, -config["kl_coef"] * kl, 0.0) + place_rewards(INPUTS["scores"], critic)
    if config["whiten_rewards"]:  # TRL keeps the mean
        rewards = torch.where(critic, whiten(rewards, critic) + rewards[critic].mean(), 0.0)
    return rewards


def advantages_of(case: dict) -> tuple[Tensor, Tensor]:
    """Before whitening, and returns."""
    critic = masks(case)[1]
    return gae(rewards_of(case), INPUTS["values"], critic, gamma=case["config"]["gamma"], lam=case["config"]["lam"])


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_case
def test_rewards_advantages_and_returns_agree_with_trl(case):
    policy, critic = masks(case)
    assert policy.tolist() == case["pg_mask"] and critic.tolist() == case["vf_mask"]
    advantages, returns = advantages_of(case)
    torch.testing.assert_close(rewards_of(case), f64(case["rewards"]), **EXACT)
    torch.testing.assert_close(advantages, f64(case["advantages_raw"]), **EXACT)
    torch.testing.assert_close(returns, f64(case["returns"]), **EXACT)
    torch.testing.assert_close(whiten(advantages, policy), f64(case["advantages"]), **EXACT)


@every_case
def test_both_losses_and_their_gradients_agree_with_trl(case):
    config, (policy, critic) = case["config"], masks(case)
    advantages, returns = advantages_of(case)
    logprobs, values = INPUTS["new_logprobs"].clone().requires_grad_(), INPUTS["vpred"].clone().requires_grad_()
    clip = {"clip_low": config["cliprange"], "clip_high": config["cliprange"]}
    loss, _ = ppo_loss(logprobs, INPUTS["logprobs"], whiten(advantages, policy), policy, **clip)
    critics, metrics = value_loss(values, INPUTS["values"], returns, critic, clip=config["cliprange_value"])
    total = loss + config["vf_coef"] * critics
    total.backward()
    found = {"pg_loss": loss.item(), "vf_loss": critics.item(), "loss": total.item()}
    assert found == pytest.approx({name: case[name] for name in found}, abs=1e-10)
    torch.testing.assert_close(logprobs.grad, f64(case["grad_new_logprobs"]), **EXACT)
    torch.testing.assert_close(values.grad, f64(case["grad_vpred"]), **EXACT)
    assert metrics["value_clip_fraction"].item() == pytest.approx(case["vf_clipfrac"], abs=1e-7)  # TRL's is float32


def test_our_score_lands_on_the_last_token_and_trls_behind_it_unless_the_row_is_full():
    policy, critic = masks(CASES["default"])
    full = policy.all(1)
    ours, trls = place_rewards(INPUTS["scores"], policy), place_rewards(INPUTS["scores"], critic)
    assert torch.equal(ours[full], trls[full]) and full.sum() == 1
    for b in (~full).nonzero().flatten().tolist():
        assert trls[b].nonzero().item() == ours[b].nonzero().item() + 1 == policy[b].sum()


# ---- trap B.3


def one_value(value: float, old: float, target: float, **options) -> tuple[float, float, float]:
    """Loss, d loss / d value, clip fraction."""
    values = f64([[value]]).requires_grad_()
    loss, metrics = value_loss(values, f64([[old]]), f64([[target]]), torch.ones(1, 1), **options)
    loss.backward()
    return loss.item(), values.grad.item(), metrics["value_clip_fraction"].item()


B3 = [  # value, old value, return, loss, d loss / d value, clipped
    (2.0, 1.0, 3.0, 1.62, 0.0, 1.0),
    (2.0, 1.0, 0.5, 1.125, 1.5, 0.0),
    (1.1, 1.0, 3.0, 1.805, -1.9, 0.0),
    (0.0, 1.0, -1.0, 1.62, 0.0, 1.0),  # the first, and the second, upside down
    (0.0, 1.0, 1.5, 1.125, -1.5, 0.0),
]


@pytest.mark.parametrize("value,old,target,loss,gradient,clipped", B3)
def test_trap_b3_the_larger_error_counts_and_the_clip_is_around_the_old_value(
    value, old, target, loss, gradient, clipped
):
    assert one_value(value, old, target) == pytest.approx((loss, gradient, clipped), abs=1e-14)
    error = value - target
    assert one_value(value, old, target, clip=None) == pytest.approx((error**2 / 2, error, 0.0), abs=1e-14)


def test_trap_b3_old_values_and_returns_get_no_gradient():
    inputs = [f64([[x]]).requires_grad_() for x in (2.0, 1.0, 0.5)]
    value_loss(*inputs, torch.ones(1, 1))[0].backward()
    assert inputs[0].grad.item() == 1.5 and inputs[1].grad is None and inputs[2].grad is None


def test_trap_b3_the_value_has_a_clip_range_of_its_own_of_0_2():
    parameters = inspect.signature(value_loss).parameters
    assert list(parameters) == ["values", "old_values", "returns", "mask", "clip", "denominator"]
    assert parameters["clip"].default == 0.2 and parameters["denominator"].default is None


# ---- properties of the critic's loss


def random_batch(seed: int, lengths: list[int], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(*lengths, 1)
    values, moves, errors = torch.randn(3, B, T, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    mask &= torch.rand(B, T, generator=generator) < 0.8
    return {"values": values, "old_values": values + 0.3 * moves, "returns": values + errors, "mask": mask}


def loss_gradient_fraction(values: Tensor, *arguments, **options) -> tuple[Tensor, Tensor, Tensor]:
    values = values.detach().clone().requires_grad_()
    loss, metrics = value_loss(values, *arguments, **options)
    loss.backward()
    return loss.detach(), values.grad, metrics["value_clip_fraction"]


BATCHES = {
    "seed": st.integers(0, 2**31),
    "lengths": st.lists(st.integers(0, 6), min_size=1, max_size=8),
    "clip": st.sampled_from([None, 0.0, 0.2]),
}


@properties
@given(**BATCHES)
def test_the_critics_loss_equals_its_definition_token_by_token(seed, lengths, clip):
    batch = random_batch(seed, lengths)
    mask = batch["mask"]
    losses, clipped = [], []
    for v, old, target in zip(
        *(batch[name][mask].tolist() for name in ("values", "old_values", "returns")), strict=True
    ):
        moved = v if clip is None else min(max(v, old - clip), old + clip)
        losses.append(max((v - target) ** 2, (moved - target) ** 2) / 2)
        clipped.append(abs(moved - target) > abs(v - target))
    loss, _, fraction = loss_gradient_fraction(**batch, clip=clip)
    count = max(len(losses), 1)
    assert loss.item() == pytest.approx(sum(losses) / count, abs=1e-12)
    assert fraction.item() == pytest.approx(sum(clipped) / count, abs=1e-12)


@properties
@given(**BATCHES, columns=st.integers(0, 3), pads=st.randoms(use_true_random=False))
def test_padding_changes_neither_the_critics_loss_nor_its_gradient(seed, lengths, clip, columns, pads):
    batch = random_batch(seed, lengths)
    B, T = batch["mask"].shape
    mask = torch.cat([batch["mask"], torch.zeros(B, columns, dtype=torch.bool)], 1)
    wide = {"mask": mask}
    for name in ("values", "old_values", "returns"):
        garbage = f64([pads.choice([0.0, 1e200, math.inf, math.nan]) for _ in range(mask.numel())]).view(mask.shape)
        wide[name] = torch.where(mask, torch.cat([batch[name], garbage[:, :columns]], 1), garbage)
    expected, found = loss_gradient_fraction(**batch, clip=clip), loss_gradient_fraction(**wide, clip=clip)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(found[1][:, :T], expected[1], rtol=0, atol=1e-13)
    assert (found[1][~mask] == 0).all() and found[2] == expected[2]


@properties
@given(**BATCHES)
def test_trap_a1_any_partition_of_rows_gives_the_critic_the_same_loss_and_gradient(seed, lengths, clip):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        batch = random_batch(seed, lengths, dtype)
        whole, gradient, fraction = loss_gradient_fraction(**batch, clip=clip)
        count = max(token_count(batch["mask"]), 1)
        for size in (1, 2, 4, len(lengths)):
            parts = [
                {name: values[start : start + size] for name, values in batch.items()}
                for start in range(0, len(lengths), size)
            ]
            found = [loss_gradient_fraction(**part, clip=clip, denominator=count) for part in parts]
            torch.testing.assert_close(sum(loss for loss, _, _ in found), whole, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(torch.cat([g for _, g, _ in found]), gradient, rtol=0, atol=tolerance)
            weighed = sum(f.item() * token_count(part["mask"]) for (_, _, f), part in zip(found, parts, strict=True))
            assert weighed / count == pytest.approx(fraction.item(), abs=10 * tolerance)


@properties
@given(seed=BATCHES["seed"], lengths=BATCHES["lengths"])
def test_before_the_first_update_no_value_is_clipped(seed, lengths):
    batch = random_batch(seed, lengths)
    batch["old_values"] = batch["values"]
    loss, gradient, fraction = loss_gradient_fraction(**batch)
    free = loss_gradient_fraction(**batch, clip=None)
    assert fraction == 0 and loss == free[0] and torch.equal(gradient, free[1])


@pytest.mark.parametrize("where", ["values", "old_values", "returns"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_number_on_a_trainable_token_is_reported(where, broken):
    batch = random_batch(0, [3, 3]) | {"mask": torch.ones(2, 3)}
    batch[where][0, 1] = broken
    assert not value_loss(**batch)[0].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_critics_loss_has_the_type_of_its_inputs_and_0_where_nothing_is_trained(dtype):
    batch = random_batch(0, [3, 2], dtype)
    loss, metrics = value_loss(**batch)
    assert loss.dtype == dtype and loss.shape == () and metrics["value_clip_fraction"].dtype == dtype
    loss, gradient, fraction = loss_gradient_fraction(**batch | {"mask": torch.zeros(2, 3)})
    assert loss == 0 and (gradient == 0).all() and fraction == 0


@pytest.mark.parametrize("where", ["values", "old_values", "returns", "mask"])
@pytest.mark.parametrize("shape", [(2, 4), (1, 3), (2,), (2, 3, 1)])
def test_a_wrong_shape_is_an_error_that_says_what_was_expected(where, shape):
    with pytest.raises(ValueError, match=r"of one shape \(B, T\)"):
        value_loss(**random_batch(0, [3, 3]) | {where: torch.ones(shape)})


@pytest.mark.parametrize("wrong", [-0.1, math.nan])
def test_a_clip_range_that_is_none_is_an_error(wrong):
    with pytest.raises(ValueError, match=f"clip must be None or at least 0, not {wrong}"):
        one_value(1.0, 1.0, 1.0, clip=wrong)


# ---- explained variance


def test_explained_variance_is_1_for_a_critic_that_knows_0_for_a_constant_and_less_for_a_worse_one():
    returns, mask = f64([[1, 2, 3, math.nan]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.full((1, 4), 2.0), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(1 - 4)
    assert explained_variance(f64([[1, 2, 2, 9]]), returns, mask) == pytest.approx(1 - 1 / 3)  # errors 0, 0, 1


def test_explained_variance_is_no_number_where_returns_do_not_vary():
    same = torch.full((1, 3), 0.1)
    assert math.isnan(explained_variance(f64([[1, 2, 3]]), same, torch.ones(1, 3)))
    assert math.isnan(explained_variance(same, f64([[1, 2, 3]]), torch.zeros(1, 3)))
