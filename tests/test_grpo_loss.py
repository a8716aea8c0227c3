"""GRPO's loss against TRL's values, numbers worked out by hand, the definition token by token, and its contract."""

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

from nanorl.kl import exact_kl
from nanorl.losses import grpo_loss
from nanorl.losses.aggregate import sequence_count, token_count

ORACLE = json.loads((Path(__file__).parent / "data" / "group_policy_losses.json").read_text())
CASES = {case["name"]: case for case in ORACLE["cases"]}
INPUTS = {name: torch.tensor(values, dtype=torch.float64) for name, values in ORACLE["inputs"].items()}


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_gradient_metrics(logprobs: Tensor, *arguments, **options) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, metrics = grpo_loss(logprobs, *arguments, **options)
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


def one_token(
    ratio: float, advantage: float, dtype: torch.dtype = torch.float64, **options
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, d loss / d logprob and metrics of a single token with this ratio."""
    old = torch.full((1, 1), -1.0, dtype=dtype)
    advantages, mask = torch.tensor([advantage], dtype=dtype), torch.ones(1, 1)
    loss, gradient, metrics = loss_gradient_metrics(old + math.log(ratio), old, advantages, mask, **options)
    return loss.item(), gradient.item(), metrics


# Independent values: computed by TRL 1.16.0, see data/README.md.


def trl_arguments(case: dict) -> tuple[tuple[Tensor, ...], dict]:
    config = case["config"]
    mask = f64(config["completion_mask"]) if "completion_mask" in config else INPUTS["mask"]
    if "tool_mask" in config:
        mask = mask * f64(config["tool_mask"])
    old = INPUTS["logps"] if config.get("on_policy") else INPUTS["old_logps"]
    epsilon = config.get("epsilon", ORACLE["defaults"]["epsilon"])
    options = {"clip_low": epsilon, "clip_high": epsilon, "denominator": len(mask)}  # TRL counts empty rows too
    if "beta" in config:
        options |= {"beta": config["beta"], "ref_logprobs": INPUTS["ref_logps"]}
    return (INPUTS["logps"], old, INPUTS["advantages"], mask), options


TRL_CASES = [
    "grpo/token",
    "grpo/token/eps=0.1",
    "grpo/beta=0.04/kl_is=False",
    "grpo/on_policy",
    "grpo/tool_mask",
    "grpo/truncated_rows_masked",
]


@pytest.mark.parametrize("name", TRL_CASES)
def test_loss_and_gradient_agree_with_trl(name):
    arguments, options = trl_arguments(CASES[name])
    loss, gradient, _ = loss_gradient_metrics(*arguments, **options)
    assert loss.item() == pytest.approx(CASES[name]["loss"], abs=1e-10)
    torch.testing.assert_close(gradient, f64(CASES[name]["grad_logps"]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", TRL_CASES)
def test_clip_fractions_and_kl_agree_with_trl(name):
    arguments, options = trl_arguments(CASES[name])
    _, _, metrics = loss_gradient_metrics(*arguments, **options)
    expected = CASES[name]["metrics"]
    float32 = 1e-7  # TRL's clip fractions are that exact
    assert metrics["clip_fraction_low"].item() == pytest.approx(expected["clip_ratio/low_mean"], abs=float32)
    assert metrics["clip_fraction_high"].item() == pytest.approx(expected["clip_ratio/high_mean"], abs=float32)
    if "kl" in expected:
        assert metrics["kl_ref"].item() == pytest.approx(expected["kl"], abs=1e-10)


def test_micro_losses_and_their_sum_agree_with_trl():
    accumulation = next(entry for entry in ORACLE["accumulation"] if entry["loss_type"] == "grpo")
    (logprobs, old, advantages, mask), options = trl_arguments(CASES["grpo/token"])
    logprobs = logprobs.clone().requires_grad_()
    micro_losses = []
    for rows in (slice(0, 4), slice(4, 8)):
        loss, _ = grpo_loss(logprobs[rows], old[rows], advantages[rows], mask[rows], **options)
        loss.backward()
        micro_losses.append(loss.item())
    assert micro_losses == pytest.approx(accumulation["micro_losses"], abs=1e-10)
    assert sum(micro_losses) == pytest.approx(accumulation["summed"], abs=1e-10)
    torch.testing.assert_close(logprobs.grad, f64(CASES["grpo/token"]["grad_logps"]), rtol=0, atol=1e-10)


def test_rows_without_trainable_tokens_are_in_no_denominator_unless_asked():
    case = CASES["grpo/truncated_rows_masked"]  # 2 of 8 rows are masked
    arguments, options = trl_arguments(case)
    loss, _ = grpo_loss(*arguments, **options | {"denominator": None})
    assert loss.item() == pytest.approx(case["loss"] * 8 / 6, abs=1e-10)


# Trap A.5


def a5(advantage: float, **options) -> tuple[float, float]:
    """logp = -1, old = -201: a ratio of e^200, infinite in float32."""
    loss, gradient, metrics = loss_gradient_metrics(
        torch.tensor([[-1.0]]), torch.tensor([[-201.0]]), torch.tensor([advantage]), torch.ones(1, 1), **options
    )
    assert all(value.isfinite() for value in metrics.values())
    return loss.item(), gradient.item()


def test_trap_a5_a_ratio_beyond_float32_is_clipped_without_a_nan_in_the_gradient():
    assert a5(1.0) == (pytest.approx(-1.2, abs=1e-6), 0.0)


def test_trap_a5_a_ratio_beyond_float32_times_an_advantage_of_0_is_0():
    assert a5(0.0) == (0.0, 0.0)


@pytest.mark.parametrize("dual_clip,bound", [(None, math.exp(20)), (3.0, 3.0)])
def test_trap_a5_a_ratio_beyond_float32_with_a_negative_advantage_has_a_bounded_loss_and_no_gradient(dual_clip, bound):
    assert a5(-1.0, dual_clip=dual_clip) == (pytest.approx(bound, rel=1e-6), 0.0)


def test_trap_a5_kl_to_a_reference_far_away_is_finite():
    loss, gradient, metrics = loss_gradient_metrics(
        torch.tensor([[-200.0]]),
        torch.tensor([[-200.0]]),
        torch.tensor([0.0]),
        torch.ones(1, 1),
        ref_logprobs=torch.tensor([[-1.0]]),
        beta=1.0,
    )
    assert loss.item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert gradient.item() == 0.0
    assert metrics["kl_ref"].isfinite()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "ref_logprobs", "advantages"])
def test_trap_a5_a_broken_number_in_a_masked_slot_changes_nothing(where, broken):
    inputs = {
        "logprobs": torch.tensor([[-1.0, -1.0, -1.0]]),
        "old_logprobs": torch.tensor([[-1.0, -1.0, -1.0]]),
        "ref_logprobs": torch.tensor([[-1.0, -1.0, -1.0]]),
        "advantages": torch.tensor([[1.0, 1.0, 1.0]]),
    }
    inputs[where][0, 2] = broken
    loss, gradient, metrics = loss_gradient_metrics(**inputs, mask=torch.tensor([[1, 1, 0]]), beta=0.1)
    assert loss.item() == -1.0
    assert gradient.tolist() == [[-0.5, -0.5, 0.0]]
    assert metrics["ratio"].item() == 1.0
    assert metrics["kl_old"].item() == metrics["kl_ref"].item() == 0.0


@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "ref_logprobs", "advantages"])
@pytest.mark.parametrize("options", [{}, {"dual_clip": 3.0}])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_trap_a5_a_nan_in_a_trainable_slot_is_reported(where, options, advantage):
    inputs = {name: torch.full((1, 3), -1.0) for name in ("logprobs", "old_logprobs", "ref_logprobs")}
    inputs["advantages"] = torch.full((1, 3), advantage)
    inputs[where][0, 1] = math.nan
    loss, _, _ = loss_gradient_metrics(**inputs, mask=torch.tensor([[1, 1, 0]]), beta=0.1, **options)
    assert loss.isnan()


# Trap A.6: clip_low 0.2, clip_high 0.28.
A6 = [  # advantage, ratio, loss, d loss / d logprob
    (1.0, 1.5, -1.28, 0.0),
    (-1.0, 1.5, 1.5, 1.5),
    (-1.0, 0.5, 0.8, 0.0),
    (1.0, 0.5, -0.5, -0.5),
]


@pytest.mark.parametrize("advantage,ratio,expected,gradient", A6)
def test_trap_a6_clipping_takes_the_worse_of_the_two_for_either_sign(advantage, ratio, expected, gradient):
    result = one_token(ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert result[:2] == pytest.approx((expected, gradient), abs=1e-14)


def test_trap_a6_the_clip_fraction_counts_only_where_clipping_changes_the_loss():
    advantages, ratios = f64([[row[0] for row in A6]]), f64([[row[1] for row in A6]])
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    mask = torch.ones(1, 4)
    _, _, metrics = loss_gradient_metrics(old + ratios.log(), old, advantages, mask, clip_low=0.2, clip_high=0.28)
    assert metrics["clip_fraction_low"].item() == 0.25
    assert metrics["clip_fraction_high"].item() == 0.25
    assert metrics["ratio"].item() == pytest.approx(1.0, abs=1e-14)


def test_trap_a6_each_band_edge_clips_on_its_own_side():
    assert one_token(1.25, 1.0, clip_low=0.2, clip_high=0.28)[:2] == pytest.approx((-1.25, -1.25), abs=1e-14)
    assert one_token(1.25, 1.0, clip_low=0.28, clip_high=0.2)[:2] == pytest.approx((-1.2, 0.0), abs=1e-14)
    assert one_token(0.75, -1.0, clip_low=0.28, clip_high=0.2)[:2] == pytest.approx((0.75, 0.75), abs=1e-14)
    assert one_token(0.75, -1.0, clip_low=0.2, clip_high=0.28)[:2] == pytest.approx((0.8, 0.0), abs=1e-14)


def test_trap_a6_dual_clip_bounds_only_negative_advantages():
    assert one_token(10.0, -1.0, dual_clip=3.0)[:2] == pytest.approx((3.0, 0.0), abs=1e-14)
    assert one_token(2.0, -1.0, dual_clip=3.0)[:2] == pytest.approx((2.0, 2.0), abs=1e-14)  # below the bound
    assert one_token(0.5, 1.0, dual_clip=3.0)[:2] == pytest.approx((-0.5, -0.5), abs=1e-14)
    assert one_token(10.0, 0.0, dual_clip=3.0)[:2] == (0.0, 0.0)


@pytest.mark.parametrize("wrong", [1.0, 0.5, 0.0, -3.0, math.nan])
def test_trap_a6_a_dual_clip_of_at_most_1_is_an_error_that_shows_it(wrong):
    with pytest.raises(ValueError, match=f"dual_clip must be greater than 1, not {wrong}"):
        one_token(1.0, 1.0, dual_clip=wrong)


@pytest.mark.parametrize(
    "options", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -0.1}, {"clip_low": math.nan}]
)
def test_a_clip_range_that_is_none_is_an_error(options):
    with pytest.raises(ValueError, match="expected 0 <= clip_low <= 1 and clip_high >= 0"):
        one_token(1.0, 1.0, **options)


# The definition, one token at a time in Python's own floats.


def by_definition(batch: dict[str, Tensor], beta: float, clip_low: float, clip_high: float, dual_clip: float | None):
    B, T = batch["mask"].shape
    sequences = []
    for b in range(B):
        tokens = []
        for t in range(T):
            if not batch["mask"][b, t]:
                continue
            advantages = batch["advantages"]
            a = (advantages[b] if advantages.dim() == 1 else advantages[b, t]).item()
            logprob, ref = batch["logprobs"][b, t].item(), batch["ref_logprobs"][b, t].item()
            r = math.exp(logprob - batch["old_logprobs"][b, t].item())
            objective = min(r * a, min(max(r, 1 - clip_low), 1 + clip_high) * a)
            if dual_clip is not None and a < 0:
                objective = max(objective, dual_clip * a)
            tokens.append(-objective + beta * (math.exp(ref - logprob) - (ref - logprob) - 1))
        if tokens:
            sequences.append(sum(tokens) / len(tokens))
    return sum(sequences) / max(len(sequences), 1)


def random_batch(
    seed: int, lengths: list[int], per_token: bool = False, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """A batch far from the policy that sampled it, with holes in the mask, as environment tokens make them."""
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(*lengths, 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    logprobs = -1.5 + 0.5 * normal(B, T)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.5 * normal(B, T),
        "ref_logprobs": logprobs + 0.5 * normal(B, T),
        "advantages": normal(B, T) if per_token else normal(B),
        "mask": mask & (torch.rand(B, T, generator=generator) < 0.8),
    }


BATCHES = {
    "seed": st.integers(0, 2**31),
    "lengths": st.lists(st.integers(0, 6), min_size=1, max_size=8),
    "per_token": st.booleans(),
}
OPTIONS = st.fixed_dictionaries(
    {
        "beta": st.sampled_from([0.0, 0.3]),
        "clip_low": st.sampled_from([0.0, 0.2, 1.0]),
        "clip_high": st.sampled_from([0.0, 0.28]),
        "dual_clip": st.sampled_from([None, 1.5]),
    }
)
properties = settings(derandomize=True, deadline=None, max_examples=60)


@properties
@given(**BATCHES, options=OPTIONS)
def test_loss_equals_the_definition_token_by_token(seed, lengths, per_token, options):
    batch = random_batch(seed, lengths, per_token)
    loss, _, _ = loss_gradient_metrics(**batch, **options)
    assert loss.item() == pytest.approx(by_definition(batch, **options), abs=1e-12)


@properties
@given(**BATCHES, options=OPTIONS, columns=st.integers(0, 4), pads=st.randoms(use_true_random=False))
def test_padding_changes_neither_loss_nor_gradient_nor_metrics(seed, lengths, per_token, options, columns, pads):
    batch = random_batch(seed, lengths, per_token)
    B, T = batch["mask"].shape
    mask = torch.cat([batch["mask"], torch.zeros(B, columns, dtype=torch.bool)], 1)

    def padded(values: Tensor) -> Tensor:
        if values.dim() == 1:
            return values
        garbage = [
            pads.choice([0.0, -1.0, 3.0, -1e30, 1e30, math.inf, -math.inf, math.nan]) for _ in range(mask.numel())
        ]
        wide = torch.cat([values, torch.zeros(B, columns, dtype=values.dtype)], 1)
        return torch.where(mask, wide, f64(garbage).view(mask.shape))

    loss, gradient, metrics = loss_gradient_metrics(**batch, **options)
    wide = {name: padded(values) for name, values in batch.items() if name != "mask"}
    wide_loss, wide_gradient, wide_metrics = loss_gradient_metrics(**wide, mask=mask, **options)
    torch.testing.assert_close(wide_loss, loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(wide_gradient[:, :T], gradient, rtol=0, atol=1e-14)
    assert (wide_gradient[~mask] == 0).all()
    assert wide_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(wide_metrics[name], value, rtol=0, atol=1e-13)


@properties
@given(**BATCHES, options=OPTIONS)
def test_trap_a1_any_partition_of_rows_gives_the_same_loss_gradient_and_metrics(seed, lengths, per_token, options):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        batch = random_batch(seed, lengths, per_token, dtype)
        whole, gradient, metrics = loss_gradient_metrics(**batch, **options)
        scale = max(1.0, gradient.abs().max().item())  # float32 keeps digits, not decimals
        denominator = max(sequence_count(batch["mask"]), 1)
        for size in (1, 2, 4, len(lengths)):
            losses, gradients, sums = [], [], dict.fromkeys(metrics, 0.0)
            for start in range(0, len(lengths), size):
                part = {name: values[start : start + size] for name, values in batch.items()}
                loss, part_gradient, part_metrics = loss_gradient_metrics(**part, **options, denominator=denominator)
                losses.append(loss)
                gradients.append(part_gradient)
                for name, value in part_metrics.items():  # micro-batches combine as means weighted by tokens
                    sums[name] += value.item() * token_count(part["mask"])
            torch.testing.assert_close(sum(losses), whole, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(torch.cat(gradients), gradient, rtol=0, atol=tolerance * scale)
            for name, value in metrics.items():
                combined = sums[name] / max(token_count(batch["mask"]), 1)
                assert combined == pytest.approx(value.item(), rel=10 * tolerance, abs=tolerance)


@properties
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_on_policy_every_ratio_is_1_and_every_kl_0(seed, lengths, dtype):
    batch = random_batch(seed, lengths, dtype=dtype)
    batch["old_logprobs"] = batch["ref_logprobs"] = batch["logprobs"]
    loss, gradient, metrics = loss_gradient_metrics(**batch, beta=0.5)
    assert {name: value.item() for name, value in metrics.items() if name != "ratio"} == {
        "clip_fraction_low": 0.0,
        "clip_fraction_high": 0.0,
        "kl_old": 0.0,
        "kl_ref": 0.0,
    }
    mask = batch["mask"]
    tokens = mask.sum(1, keepdim=True).clamp(min=1)
    if mask.any():
        assert metrics["ratio"].item() == 1.0
        by_hand = torch.where(mask, -batch["advantages"][:, None] / tokens / sequence_count(mask), 0.0)
        torch.testing.assert_close(gradient, by_hand, rtol=1e-6, atol=0)  # the policy gradient, KL adding nothing
        torch.testing.assert_close(loss, by_hand.sum(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [1, 6, 3, 2]], ids=["equal", "ragged"])
def test_trap_h3_on_policy_the_loss_of_a_balanced_group_is_0_while_its_gradient_is_not(lengths):
    logprobs = random_batch(0, lengths, dtype=torch.float32)["logprobs"]
    mask = torch.arange(logprobs.shape[1]) < torch.tensor(lengths)[:, None]
    loss, gradient, _ = loss_gradient_metrics(logprobs, logprobs, torch.tensor([1.5, -0.5, -0.5, -0.5]), mask)
    assert abs(loss.item()) <= 1e-6
    assert gradient.norm().item() > 0.1


def test_kl_old_is_the_kl_of_the_old_policy_to_the_policy_on_average():
    """Exactly: over three tokens, each as often as the old policy draws it."""
    old_logits, logits = f64([0.0, 0.0, math.log(2)]), f64([0.3, -0.9, 0.4])  # old probabilities 1/4, 1/4, 1/2
    drawn = [0, 1, 2, 2]
    logprobs = logits.log_softmax(-1)[drawn][None]
    _, _, metrics = loss_gradient_metrics(
        logprobs, old_logits.log_softmax(-1)[drawn][None], f64([1.0]), torch.ones(1, 4)
    )
    assert metrics["kl_old"].item() == pytest.approx(exact_kl(old_logits, logits).item(), abs=1e-14)
    assert metrics["ratio"].item() == pytest.approx(1.0, abs=1e-14)


def test_kl_ref_is_the_kl_of_the_policy_to_the_reference_on_average():
    logits, ref_logits = f64([0.0, 0.0, math.log(2)]), f64([0.3, -0.9, 0.4])
    drawn = [0, 1, 2, 2]
    logprobs, ref = logits.log_softmax(-1)[drawn][None], ref_logits.log_softmax(-1)[drawn][None]
    _, _, metrics = loss_gradient_metrics(logprobs, logprobs, f64([1.0]), torch.ones(1, 4), ref_logprobs=ref)
    assert metrics["kl_ref"].item() == pytest.approx(exact_kl(logits, ref_logits).item(), abs=1e-14)


# The contract every group-policy loss keeps.


def test_the_signature_is_that_of_the_contract():
    parameters = inspect.signature(grpo_loss).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert positional == ["logprobs", "old_logprobs", "advantages", "mask"]
    assert keywords == {
        "ref_logprobs": None,
        "beta": 0.0,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "denominator": None,
    }
    assert len(parameters) == len(positional) + len(keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float64])
def test_the_loss_has_the_type_of_its_inputs_and_metrics_carry_no_gradient(dtype, mask_dtype):
    batch = random_batch(0, [3, 2], dtype=dtype)
    batch["mask"] = batch["mask"].to(mask_dtype)
    batch["logprobs"].requires_grad_()
    loss, metrics = grpo_loss(**batch, beta=0.1, dual_clip=2.0, denominator=2)
    assert loss.dtype == dtype and loss.shape == () and loss.requires_grad
    for name, value in metrics.items():
        assert value.shape == () and value.dtype == dtype and not value.requires_grad, name


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_any_type_of_mask_gives_the_same_loss_gradient_and_metrics(dtype):
    batch = random_batch(5, [4, 0, 6, 2])
    expected = loss_gradient_metrics(**batch, beta=0.1)
    loss, gradient, metrics = loss_gradient_metrics(**batch | {"mask": batch["mask"].to(dtype)}, beta=0.1)
    assert loss == expected[0]
    assert torch.equal(gradient, expected[1])
    assert metrics == expected[2]


def test_advantages_per_sequence_are_those_of_each_of_its_tokens():
    batch = random_batch(2, [4, 3, 6])
    spread = batch | {"advantages": batch["advantages"][:, None].expand(3, 6)}
    for one, other in zip(loss_gradient_metrics(**batch)[:2], loss_gradient_metrics(**spread)[:2], strict=True):
        assert torch.equal(one, other)


def test_a_gradient_reaches_the_log_probs_alone():
    batch = random_batch(4, [4, 3])
    inputs = {name: values.requires_grad_() for name, values in batch.items() if name != "mask"}
    loss, _ = grpo_loss(**inputs, mask=batch["mask"], beta=0.1)
    loss.backward()
    assert (inputs.pop("logprobs").grad != 0).any()
    assert {name: values.grad for name, values in inputs.items()} == dict.fromkeys(inputs)


@pytest.mark.parametrize("log_ratio", [20.5, 60.0, 1e5])
def test_log_ratios_beyond_20_count_as_20_and_have_no_gradient(log_ratio):
    def run(log_r: float, advantage: float) -> tuple[float, float]:
        logprobs, old = f64([[-1.0]]), f64([[-1.0 - log_r]])
        return tuple(x.item() for x in loss_gradient_metrics(logprobs, old, f64([advantage]), torch.ones(1, 1))[:2])

    assert run(log_ratio, -1.0) == (pytest.approx(math.exp(20), rel=1e-12), 0.0)
    assert run(-log_ratio, 1.0) == (pytest.approx(-math.exp(-20), rel=1e-12), 0.0)
    within = 19.5
    assert run(within, -1.0) == (pytest.approx(math.exp(within), rel=1e-12),) * 2
    assert run(-within, 1.0) == (pytest.approx(-math.exp(-within), rel=1e-12),) * 2


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("broken", [0.0, math.nan])
def test_a_batch_without_trainable_tokens_has_loss_gradient_and_metrics_0(shape, broken):
    values = torch.full(shape, broken)
    loss, gradient, metrics = loss_gradient_metrics(
        values, values, torch.full(shape[:1], broken), torch.zeros(shape), ref_logprobs=values, beta=0.1
    )
    assert loss.item() == 0.0
    assert (gradient == 0).all()
    assert all(value.item() == 0.0 for value in metrics.values())


def test_without_a_reference_there_is_no_kl_to_it():
    batch = random_batch(0, [3, 2])
    with_reference = grpo_loss(**batch)  # beta 0: logged, not in the loss
    del batch["ref_logprobs"]
    without = grpo_loss(**batch)
    assert with_reference[0] == without[0]
    assert with_reference[1].keys() - without[1].keys() == {"kl_ref"}


def test_beta_without_a_reference_is_an_error_that_says_what_is_missing():
    batch = random_batch(0, [3, 2])
    del batch["ref_logprobs"]
    with pytest.raises(ValueError, match=r"beta = 0.1 needs ref_logprobs"):
        grpo_loss(**batch, beta=0.1)


@pytest.mark.parametrize("wrong", [0, -2, math.nan])
def test_a_denominator_that_is_not_positive_is_an_error_that_shows_it(wrong):
    with pytest.raises(ValueError, match=f"denominator must be positive and finite, not {wrong}"):
        grpo_loss(**random_batch(0, [3, 2]), denominator=wrong)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "mask", "ref_logprobs"])
@pytest.mark.parametrize("shape", [(3, 5), (2, 4), (1, 4), (3, 1), (4,), (3, 4, 1)], ids=str)
def test_a_wrong_shape_is_an_error_that_says_what_was_expected(name, shape):
    batch = random_batch(0, [4, 3, 2]) | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=r"expected .*\(B, T\)"):
        grpo_loss(**batch, beta=0.1)


@pytest.mark.parametrize("shape", [(4,), (1,), (), (3, 1), (1, 4), (3, 5)], ids=str)
def test_advantages_of_a_wrong_shape_are_an_error_that_says_what_was_expected(shape):
    batch = random_batch(0, [4, 3, 2]) | {"advantages": torch.zeros(shape)}
    with pytest.raises(ValueError, match=r"expected advantages \(B,\) or \(B, T\) beside logprobs \(3, 4\), got"):
        grpo_loss(**batch)


@pytest.mark.parametrize("value", [-math.inf, math.inf])
@pytest.mark.parametrize("which", ["logprobs", "old_logprobs", "ref_logprobs"])
def test_an_infinite_log_prob_in_an_unmasked_slot_is_reported_and_in_a_masked_one_ignored(value, which):
    for masked, finite in ((False, False), (True, True)):
        tensors = {name: torch.full((1, 2), -1.0) for name in ("logprobs", "old_logprobs", "ref_logprobs")}
        tensors[which][0, 0] = value
        loss, _ = grpo_loss(**tensors, advantages=torch.ones(1), mask=torch.tensor([[not masked, True]]), beta=0.1)
        assert bool(loss.isfinite()) == finite


def test_float16_is_refused_since_the_bound_on_ratios_overflows_it():
    half = torch.full((1, 2), -1.0, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"expected log-probs in float32 or float64, got torch.float16"):
        grpo_loss(half, half, torch.ones(1), torch.ones(1, 2))
