"""Every group-policy loss and PPO's: TRL's values, published traps, and what no padding, partition or rank may change.

One loss against the other, by hand: test_losses_by_hand.py. Over two ranks: test_losses_over_ranks.py.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanorl.kl import exact_kl, k3
from nanorl.losses import cispo_loss, dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss, ppo_loss, reinforce_loss
from nanorl.losses.aggregate import sequence_count, token_count

ORACLE = json.loads((Path(__file__).parent / "data" / "group_policy_losses.json").read_text())
CASES = {case["name"]: case for case in ORACLE["cases"]}
INPUTS = {name: torch.tensor(values, dtype=torch.float64) for name, values in ORACLE["inputs"].items()}

MAX_LENGTH = 7
LOSSES = {
    "grpo": grpo_loss,
    "dr_grpo": functools.partial(dr_grpo_loss, max_length=MAX_LENGTH),
    "dapo": dapo_loss,
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "gspo_token": functools.partial(gspo_loss, token_level=True),
    "reinforce": reinforce_loss,
    "cispo": cispo_loss,
}
COUNTS = dict.fromkeys(LOSSES, sequence_count) | dict.fromkeys(("dapo", "ppo", "reinforce", "cispo"), token_count)
METRIC_COUNTS = dict.fromkeys(LOSSES, token_count) | dict.fromkeys(("gspo", "gspo_token"), sequence_count)
CLIPPED = ("grpo", "dr_grpo", "dapo", "ppo", "gspo", "gspo_token")
every_loss = pytest.mark.parametrize("name", LOSSES)
every_clipped_loss = pytest.mark.parametrize("name", CLIPPED)


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_gradient_metrics(loss, logprobs: Tensor, *arguments, **options) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """`loss`: a name, or a function."""
    logprobs = logprobs.detach().clone().requires_grad_()
    value, metrics = LOSSES.get(loss, loss)(logprobs, *arguments, **options)
    value.backward()
    return value.detach(), logprobs.grad, metrics


def one_token(
    loss: str, ratio: float, advantage: float, dtype: torch.dtype = torch.float64, **options
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, d loss / d logprob and metrics of a single token with this ratio and log-prob -1."""
    logprobs, mask = torch.full((1, 1), -1.0, dtype=dtype), torch.ones(1, 1)
    if loss == "dr_grpo":
        options = {"max_length": 1} | options
    advantages = torch.tensor([advantage], dtype=dtype)
    value, gradient, metrics = loss_gradient_metrics(
        loss, logprobs, logprobs - math.log(ratio), advantages, mask, **options
    )
    return value.item(), gradient.item(), metrics


def named(loss: str, **options) -> dict:
    """Of `options` those that the loss has."""
    return {key: value for key, value in options.items() if key in inspect.signature(LOSSES[loss]).parameters}


# ---- independent values: computed by TRL 1.16.0, see data/README.md

LEFT_OUT = {  # case -> why
    "bnpo/token": "the mean over the tokens of a micro-batch: another number for another micro-batch",
    "sapo/token": "a loss that nanorl does not have",
    "accumulation/bnpo": "the mean over the tokens of a micro-batch: another number for another micro-batch",
}
TRL_LOSSES = {
    ("grpo", "token"): "grpo",
    ("grpo", "sequence"): "gspo",
    ("dr_grpo", "token"): "dr_grpo",
    ("dapo", "token"): "dapo",
    ("cispo", "token"): "cispo",
}


def from_trl(config: dict) -> tuple[str, tuple[Tensor, ...], dict]:
    """TRL's settings -> name of the loss, its arguments, its options."""
    config = ORACLE["defaults"] | config
    name = TRL_LOSSES[config["loss_type"], config["importance_sampling_level"]]
    mask = f64(config["completion_mask"]) if "completion_mask" in config else INPUTS["mask"]
    if "tool_mask" in config:
        mask = mask * f64(config["tool_mask"])
    old = INPUTS["logps"] if config["on_policy"] else INPUTS["old_logps"]
    high = config.get("epsilon_high", config["epsilon"])
    if name == "cispo":
        options = {"clip_high": high - 1}  # TRL's number is the cap itself
    else:
        options = {"clip_low": config["epsilon"], "clip_high": high}
    accumulated = config["gradient_accumulation_steps"]
    if name in ("dapo", "cispo"):  # tokens of the generation batch, of which an update gets its share
        tokens = config.get("num_items_in_batch", token_count(mask))
        options["denominator"] = tokens * accumulated / config["steps_per_generation"]
    else:
        options["denominator"] = len(mask) * accumulated  # TRL counts empty rows too
    if name == "dr_grpo":
        options["max_length"] = config["max_completion_length"]
    if config["beta"]:
        assert not config["use_bias_correction_kl"], "our KL term is not multiplied by the ratio"
        options |= {"beta": config["beta"], "ref_logprobs": INPUTS["ref_logps"]}
    return name, (INPUTS["logps"], old, INPUTS["advantages"], mask), options


TRL_CASES = [name for name in CASES if name not in LEFT_OUT]


@pytest.mark.parametrize("case", TRL_CASES)
def test_loss_and_gradient_agree_with_trl(case):
    name, arguments, options = from_trl(CASES[case]["config"])
    loss, gradient, _ = loss_gradient_metrics(name, *arguments, **options)
    assert loss.item() == pytest.approx(CASES[case]["loss"], abs=1e-10)
    torch.testing.assert_close(gradient, f64(CASES[case]["grad_logps"]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["grpo/sequence", "grpo/sequence/eps_high=0.28"])
def test_the_token_variant_of_gspo_agrees_with_trls_sequence_ratio(case):
    _, arguments, options = from_trl(CASES[case]["config"])
    loss, gradient, _ = loss_gradient_metrics("gspo_token", *arguments, **options)
    assert loss.item() == pytest.approx(CASES[case]["loss"], abs=1e-10)
    torch.testing.assert_close(gradient, f64(CASES[case]["grad_logps"]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", TRL_CASES)
def test_clip_fractions_and_kl_agree_with_trl(case):
    name, arguments, options = from_trl(CASES[case]["config"])
    _, _, metrics = loss_gradient_metrics(name, *arguments, **options)
    expected = CASES[case]["metrics"]
    float32 = 1e-7  # TRL's clip fractions are that exact
    low, high = (
        (0.0, expected["cispo_clip_ratio"])
        if name == "cispo"
        else (expected["clip_ratio/low_mean"], expected["clip_ratio/high_mean"])
    )
    assert metrics["clip_fraction_low"].item() == pytest.approx(low, abs=float32)
    assert metrics["clip_fraction_high"].item() == pytest.approx(high, abs=float32)
    if "kl" in expected:
        assert metrics["kl_ref"].item() == pytest.approx(expected["kl"], abs=1e-10)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_micro_losses_and_their_sum_agree_with_trl(loss_type):
    accumulation = next(entry for entry in ORACLE["accumulation"] if entry["loss_type"] == loss_type)
    name, (logprobs, old, advantages, mask), options = from_trl(CASES[f"{loss_type}/token"]["config"])
    logprobs = logprobs.clone().requires_grad_()
    micro_losses = []
    for rows in (slice(0, 4), slice(4, 8)):
        loss, _ = LOSSES[name](logprobs[rows], old[rows], advantages[rows], mask[rows], **options)
        loss.backward()
        micro_losses.append(loss.item())
    assert micro_losses == pytest.approx(accumulation["micro_losses"], abs=1e-10)
    assert sum(micro_losses) == pytest.approx(accumulation["summed"], abs=1e-10)
    torch.testing.assert_close(logprobs.grad, f64(CASES[f"{loss_type}/token"]["grad_logps"]), rtol=0, atol=1e-10)


def test_no_case_of_trl_is_left_out_but_those_named_with_their_reason():
    every = set(CASES) | {f"accumulation/{entry['loss_type']}" for entry in ORACLE["accumulation"]}
    kinds = {
        (case["config"]["loss_type"], case["config"].get("importance_sampling_level", "token"))
        for case in CASES.values()
    }
    assert LEFT_OUT.keys() <= every
    assert every - LEFT_OUT.keys() == {*TRL_CASES, "accumulation/grpo", "accumulation/dr_grpo"}
    assert kinds - TRL_LOSSES.keys() == {("bnpo", "token"), ("sapo", "token")}  # no other kind is missing
    assert all(LEFT_OUT.values())


def test_rows_without_trainable_tokens_are_in_no_denominator_unless_asked():
    case = CASES["grpo/truncated_rows_masked"]  # 2 of 8 rows are masked
    name, arguments, options = from_trl(case["config"])
    loss, _ = LOSSES[name](*arguments, **options | {"denominator": None})
    assert loss.item() == pytest.approx(case["loss"] * 8 / 6, abs=1e-10)


def test_an_update_divides_by_its_own_tokens_unless_told_trls_share_of_the_rollouts():
    case = CASES["dapo/N=100,G=2,spg=4"]  # 33 tokens here; TRL divides by half of the 100 of the generation batch
    name, arguments, options = from_trl(case["config"])
    assert options["denominator"] == 50
    loss, _ = LOSSES[name](*arguments, **options | {"denominator": None})
    assert loss.item() == pytest.approx(case["loss"] * 50 / 33, abs=1e-10)


# ---- trap A.1: lengths 2 and 6, advantages +1 and -1, every ratio 1


def ragged(lengths: list[int], width: int | None = None) -> Tensor:
    """(B, T) mask of responses of these lengths."""
    return torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]


A1 = {  # loss -> its value where log-probs are -1.3, d loss / d logprob of a token of the short and the long response
    "grpo": (0.0, -1 / 4, 1 / 12),
    "dr_grpo": (4 / (2 * MAX_LENGTH), -1 / (2 * MAX_LENGTH), 1 / (2 * MAX_LENGTH)),
    "dapo": (0.5, -0.125, 0.125),
    "ppo": (0.5, -0.125, 0.125),
    "gspo": (0.0, -1 / 4, 1 / 12),
    "gspo_token": (0.0, -1 / 4, 1 / 12),
    "reinforce": (-0.5 * 1.3, -0.125, 0.125),
    "cispo": (-0.5 * 1.3, -0.125, 0.125),
}


@every_loss
@pytest.mark.parametrize("copies,parts", [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4)])
def test_trap_a1_the_loss_is_the_same_for_any_micro_batch_and_accumulation(name, copies, parts):
    mask, advantages = ragged([2, 6]).repeat(copies, 1), f64([1.0, -1.0]).repeat(copies)
    logprobs = torch.full(mask.shape, -1.3, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for rows in torch.arange(len(mask)).chunk(parts):
        loss, _ = LOSSES[name](
            logprobs[rows], logprobs[rows].detach(), advantages[rows], mask[rows], denominator=COUNTS[name](mask)
        )
        loss.backward()  # gradients of the parts accumulate
        total += loss.item()
    value, short, long = A1[name]
    assert total == pytest.approx(value, abs=1e-12)
    by_hand = f64([[short] * 2 + [0.0] * 4, [long] * 6]) / copies
    torch.testing.assert_close(logprobs.grad, by_hand.repeat(copies, 1), rtol=0, atol=1e-12)


# ---- trap A.2: per-token losses [1, 1, 1, 1] and [3]

A2 = dict.fromkeys(("dapo", "ppo", "reinforce", "cispo"), 1.4) | dict.fromkeys(("grpo", "gspo", "gspo_token"), 2.0)
A2 |= {"dr_grpo": 0.875}  # with max_length 4


@every_loss
@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("pad", [0.0, -9.0, math.nan])
def test_trap_a2_each_loss_takes_its_own_mean_and_none_sees_the_padding(name, columns, pad):
    mask = ragged([4, 1], 4 + columns)
    logprobs = torch.where(mask, f64(-1.0), f64(pad))
    sign = 1 if name in ("reinforce", "cispo") else -1  # their value is -A log pi, the others' at ratio 1 is -A
    options = {"max_length": 4} if name == "dr_grpo" else {}
    loss, _ = LOSSES[name](logprobs, logprobs, sign * f64([1.0, 3.0]), mask, **options)
    assert loss.item() == pytest.approx(A2[name], abs=1e-12)


# ---- trap A.4: logp = -1, ref = -1.5 and the other way round


@every_loss
@pytest.mark.parametrize("ratio", [1.0, 0.7, 2.0])
@pytest.mark.parametrize(
    "logprob,ref,value,slope",
    [(-1.0, -1.5, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)), (-1.5, -1.0, math.exp(0.5) - 1.5, 1 - math.exp(0.5))],
)
def test_trap_a4_the_kl_term_is_k3_has_a_gradient_and_no_ratio_multiplies_it(name, ratio, logprob, ref, value, slope):
    logprobs, refs = f64([[logprob]]), f64([[ref]])
    options = {"max_length": 1} if name == "dr_grpo" else {}
    loss, gradient, metrics = loss_gradient_metrics(
        name, logprobs, logprobs - math.log(ratio), f64([0.0]), torch.ones(1, 1), ref_logprobs=refs, beta=0.3, **options
    )
    assert loss.item() == pytest.approx(0.3 * value, abs=1e-14)
    assert gradient.item() == pytest.approx(0.3 * slope, abs=1e-14)
    assert metrics["kl_ref"].item() == pytest.approx(value, abs=1e-14)


@every_loss
def test_trap_a4_a_beta_without_reference_is_an_error(name):
    with pytest.raises(ValueError, match=r"beta = 0\.1 needs ref_logprobs"):
        one_token(name, 1.0, 1.0, beta=0.1)


# ---- trap A.5


def a5(name: str, advantage: float, logprob: float, old: float, **options) -> tuple[float, float]:
    if name == "dr_grpo":
        options |= {"max_length": 1}
    loss, gradient, metrics = loss_gradient_metrics(
        name, torch.tensor([[logprob]]), torch.tensor([[old]]), torch.tensor([advantage]), torch.ones(1, 1), **options
    )
    assert all(value.isfinite() for value in metrics.values())
    return loss.item(), gradient.item()


@every_clipped_loss
def test_trap_a5_a_ratio_beyond_float32_is_clipped_without_a_nan_in_the_gradient(name):
    band = {"clip_low": 0.2, "clip_high": 0.2}
    assert a5(name, 1.0, -1.0, -201.0, **band) == (pytest.approx(-1.2, abs=1e-6), 0.0)
    assert a5(name, 0.0, -1.0, -201.0, **band) == (0.0, 0.0)
    assert a5(name, -1.0, -1.0, -201.0, **band) == (pytest.approx(math.exp(20), rel=1e-6), 0.0)
    assert a5(name, -1.0, -1.0, -201.0, **band, dual_clip=3.0) == (pytest.approx(3.0, abs=1e-6), 0.0)


@every_clipped_loss
def test_trap_a5_a_ratio_that_vanishes_has_a_finite_loss_and_no_gradient(name):
    band = {"clip_low": 0.2, "clip_high": 0.2}
    assert a5(name, 1.0, -201.0, -1.0, **band) == (pytest.approx(-math.exp(-20), rel=1e-5), 0.0)
    assert a5(name, -1.0, -201.0, -1.0, **band) == (pytest.approx(0.8, abs=1e-6), 0.0)


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_trap_a5_a_weight_beyond_float32_is_capped_and_the_gradient_stays(advantage):
    assert a5("cispo", advantage, -1.0, -201.0) == (5 * advantage, -5 * advantage)
    vanished = math.exp(-20)
    expected = pytest.approx(201 * vanished * advantage, rel=1e-5), pytest.approx(-vanished * advantage, rel=1e-5)
    assert a5("cispo", advantage, -201.0, -1.0) == expected


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_trap_a5_without_a_ratio_the_old_policy_cannot_break_the_loss(advantage):
    assert a5("reinforce", advantage, -1.0, -201.0) == (advantage, -advantage)


@every_loss
def test_trap_a5_kl_to_a_reference_far_away_is_finite(name):
    far = a5(name, 0.0, -200.0, -200.0, ref_logprobs=torch.tensor([[-1.0]]), beta=1.0)
    assert far == (pytest.approx(math.exp(20) - 21, rel=1e-6), 0.0)


WHERE = ("logprobs", "old_logprobs", "ref_logprobs", "advantages")


def two_trainable_tokens(name: str, advantage: float) -> dict[str, Tensor]:
    """In the first of two rows; gspo takes an advantage a row."""
    inputs = {where: torch.full((2, 3), -1.0) for where in WHERE[:3]}
    inputs["advantages"] = torch.full((2,) if name == "gspo" else (2, 3), advantage)
    return inputs | {"mask": torch.tensor([[1, 1, 0], [0, 0, 0]])}


@every_loss
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", WHERE)
def test_trap_a5_a_broken_number_in_a_masked_slot_changes_nothing(name, where, broken):
    inputs = two_trainable_tokens(name, 1.0)
    expected = loss_gradient_metrics(name, **inputs, beta=0.1)
    inputs[where][1] = broken
    if inputs[where].dim() == 2:
        inputs[where][0, 2] = broken
    loss, gradient, metrics = loss_gradient_metrics(name, **inputs, beta=0.1)
    assert loss == expected[0] and torch.equal(gradient, expected[1]) and metrics == expected[2]
    slope = -1 / MAX_LENGTH if name == "dr_grpo" else -0.5
    assert gradient.flatten().tolist() == pytest.approx([slope, slope, 0.0, 0.0, 0.0, 0.0], rel=1e-6)
    assert metrics["ratio"].item() == 1.0


@every_loss
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_trap_a5_a_nan_in_a_trainable_slot_is_reported(name, where, advantage, dual_clip):
    inputs = two_trainable_tokens(name, advantage)
    inputs[where].view(-1)[0] = math.nan
    loss, _, metrics = loss_gradient_metrics(name, **inputs, **named(name, beta=0.1, dual_clip=dual_clip))
    if (name, where) == ("reinforce", "old_logprobs"):  # not in the loss
        assert metrics["ratio"].isnan()
    else:
        assert loss.isnan()


# ---- trap A.6: clip_low 0.2, clip_high 0.28

A6 = [  # advantage, ratio, loss, d loss / d logprob
    (1.0, 1.5, -1.28, 0.0),
    (-1.0, 1.5, 1.5, 1.5),
    (-1.0, 0.5, 0.8, 0.0),
    (1.0, 0.5, -0.5, -0.5),
]


@every_clipped_loss
@pytest.mark.parametrize("advantage,ratio,expected,gradient", A6)
def test_trap_a6_clipping_takes_the_worse_of_the_two_for_either_sign(name, advantage, ratio, expected, gradient):
    result = one_token(name, ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert result[:2] == pytest.approx((expected, gradient), abs=1e-14)


def four_tokens(name: str, **options) -> dict[str, Tensor]:
    """Metrics of the four of A6, a response each."""
    advantages, ratios = f64([row[0] for row in A6]), f64([[row[1]] for row in A6])
    old = torch.full((4, 1), -1.0, dtype=torch.float64)
    return loss_gradient_metrics(name, old + ratios.log(), old, advantages, torch.ones(4, 1), **options)[2]


@every_clipped_loss
def test_trap_a6_the_clip_fraction_counts_only_where_clipping_changes_the_loss(name):
    metrics = four_tokens(name, clip_low=0.2, clip_high=0.28)
    assert metrics["clip_fraction_low"].item() == metrics["clip_fraction_high"].item() == 0.25
    assert metrics["ratio"].item() == pytest.approx(1.0, abs=1e-14)


def test_trap_a6_capped_weights_count_for_either_sign_and_without_clipping_nothing_counts():
    metrics = four_tokens("cispo", clip_high=0.28)
    assert (metrics["clip_fraction_low"].item(), metrics["clip_fraction_high"].item()) == (0.0, 0.5)
    assert four_tokens("cispo")["clip_fraction_high"].item() == 0.0  # no weight above 5
    for advantage, capped in ((1.0, 1.0), (0.0, 0.0)):  # without advantage a cap changes nothing
        assert one_token("cispo", 10.0, advantage)[2]["clip_fraction_high"].item() == capped
    metrics = four_tokens("reinforce")
    assert metrics["clip_fraction_low"].item() == metrics["clip_fraction_high"].item() == 0.0


@every_clipped_loss
def test_trap_a6_each_band_edge_clips_on_its_own_side(name):
    wide_above, wide_below = {"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.28, "clip_high": 0.2}
    assert one_token(name, 1.25, 1.0, **wide_above)[:2] == pytest.approx((-1.25, -1.25), abs=1e-14)
    assert one_token(name, 1.25, 1.0, **wide_below)[:2] == pytest.approx((-1.2, 0.0), abs=1e-14)
    assert one_token(name, 0.75, -1.0, **wide_below)[:2] == pytest.approx((0.75, 0.75), abs=1e-14)
    assert one_token(name, 0.75, -1.0, **wide_above)[:2] == pytest.approx((0.8, 0.0), abs=1e-14)


@every_clipped_loss
def test_trap_a6_dual_clip_bounds_only_negative_advantages_and_is_off_by_default(name):
    options = {"dual_clip": 3.0, "clip_low": 0.2, "clip_high": 0.2}
    assert one_token(name, 10.0, -1.0)[:2] == pytest.approx((10.0, 10.0), abs=1e-13)
    assert one_token(name, 10.0, -1.0, **options)[:2] == pytest.approx((3.0, 0.0), abs=1e-14)
    assert one_token(name, 2.0, -1.0, **options)[:2] == pytest.approx((2.0, 2.0), abs=1e-14)  # below the bound
    assert one_token(name, 0.5, 1.0, **options)[:2] == pytest.approx((-0.5, -0.5), abs=1e-14)
    assert one_token(name, 10.0, 0.0, **options)[:2] == (0.0, 0.0)


@every_clipped_loss
@pytest.mark.parametrize("wrong", [1.0, 0.5, 0.0, -3.0, math.nan])
def test_trap_a6_a_dual_clip_of_at_most_1_is_an_error_that_shows_it(name, wrong):
    with pytest.raises(ValueError, match=f"dual_clip must be greater than 1, not {wrong}"):
        one_token(name, 1.0, 1.0, dual_clip=wrong)


@every_clipped_loss
@pytest.mark.parametrize(
    "options", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -0.1}, {"clip_low": math.nan}]
)
def test_a_clip_range_that_is_none_is_an_error(name, options):
    with pytest.raises(ValueError, match="expected 0 <= clip_low <= 1 and clip_high >= 0"):
        one_token(name, 1.0, 1.0, **options)


@every_clipped_loss
@pytest.mark.parametrize("log_ratio", [20.5, 60.0, 1e5])
def test_log_ratios_beyond_20_count_as_20_and_have_no_gradient(name, log_ratio):
    def run(log_r: float, advantage: float) -> tuple[float, float]:
        logprobs = f64([[-1.0]])
        options = {"max_length": 1} if name == "dr_grpo" else {}
        result = loss_gradient_metrics(name, logprobs, logprobs - log_r, f64([advantage]), torch.ones(1, 1), **options)
        return result[0].item(), result[1].item()

    assert run(log_ratio, -1.0) == (pytest.approx(math.exp(20), rel=1e-12), 0.0)
    assert run(-log_ratio, 1.0) == (pytest.approx(-math.exp(-20), rel=1e-12), 0.0)
    within = 19.5
    assert run(within, -1.0) == (pytest.approx(math.exp(within), rel=1e-12),) * 2
    assert run(-within, 1.0) == (pytest.approx(-math.exp(-within), rel=1e-12),) * 2


@pytest.mark.parametrize("wrong", [-0.1, -1.0, math.nan])
def test_a_cap_below_the_weight_of_an_unchanged_policy_is_an_error(wrong):
    with pytest.raises(ValueError, match=f"clip_high must be at least 0, not {wrong}"):
        one_token("cispo", 1.0, 1.0, clip_high=wrong)


# ---- trap A.7: log-ratios [0.2, 0, -0.1, (pad) 5], advantage 2

A7_LOG_RATIOS, A7_MASK = f64([[0.2, 0.0, -0.1, 5.0]]), torch.tensor([[1, 1, 1, 0]])


def a7(name: str, advantages=(2.0,), **options) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    return loss_gradient_metrics(name, old + A7_LOG_RATIOS, old, f64(advantages), A7_MASK, **options)


WIDE = {"clip_low": 1.0, "clip_high": 10.0}


@pytest.mark.parametrize(
    "name,advantages", [("gspo", [2.0]), ("gspo_token", [2.0]), ("gspo_token", [[2.0] * 3 + [9.0]])]
)
def test_trap_a7_the_ratio_is_the_geometric_mean_over_trainable_tokens(name, advantages):
    loss, gradient, metrics = a7(name, advantages, **WIDE)
    s = math.exp(0.1 / 3)
    assert s == pytest.approx(1.033895, abs=5e-7)
    assert metrics["ratio"].item() == pytest.approx(s, abs=1e-14)
    assert loss.item() == pytest.approx(-2 * s, abs=1e-14) == pytest.approx(-2.067790, abs=5e-7)
    by_hand = f64([[-2 * s / 3] * 3 + [0.0]])  # -0.689263 each
    torch.testing.assert_close(gradient, by_hand, rtol=0, atol=1e-14)
    assert gradient[0, 0].item() == pytest.approx(-0.689263, abs=5e-7)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_trap_a7_a_clipped_response_has_no_gradient_on_any_token(name):
    loss, gradient, metrics = a7(name, clip_low=0.03, clip_high=0.03)
    assert loss.item() == pytest.approx(-2.06, abs=1e-14)
    assert (gradient == 0).all()
    assert metrics["clip_fraction_high"].item() == 1.0 and metrics["clip_fraction_low"].item() == 0.0


def test_trap_a7_length_does_not_weigh_a_response():
    """Two responses of one ratio and advantages 2 and -2 cancel, whatever their lengths."""
    old, mask = torch.full((2, 4), -1.0, dtype=torch.float64), ragged([4, 1])
    for name in ("gspo", "gspo_token"):
        loss, gradient, _ = loss_gradient_metrics(name, old + 0.1, old, f64([2.0, -2.0]), mask, **WIDE)
        s = math.exp(0.1)
        assert loss.item() == pytest.approx(0.0, abs=1e-14)
        torch.testing.assert_close(gradient, f64([[-s / 4] * 4, [s, 0, 0, 0]]), rtol=0, atol=1e-14)


def test_trap_a7_the_token_variant_gives_each_token_the_gradient_of_its_own_advantage():
    loss, gradient, _ = a7("gspo_token", [[3.0, -1.0, 0.5, 9.0]], **WIDE)
    s = math.exp(0.1 / 3)
    assert loss.item() == pytest.approx(-s * 2.5 / 3, abs=1e-14)
    torch.testing.assert_close(gradient, f64([[-3.0, 1.0, -0.5, 0.0]]) * s / 3, rtol=0, atol=1e-14)


def test_trap_a7_an_advantage_for_each_token_needs_the_token_variant():
    with pytest.raises(ValueError, match=r"expected advantages \(B,\), got \(1, 4\).*token_level=True"):
        a7("gspo", [[2.0] * 4])


def test_gspo_clamps_the_mean_of_a_sequence_and_not_its_tokens():
    old, mask = torch.full((1, 2), -1.0, dtype=torch.float64), torch.ones(1, 2)
    wide = {"clip_low": 1.0, "clip_high": math.inf}
    for name in ("gspo", "gspo_token"):
        loss, gradient, _ = loss_gradient_metrics(name, old + f64([[30.0, -20.0]]), old, f64([1.0]), mask, **wide)
        assert loss.item() == pytest.approx(-math.exp(5), rel=1e-12)
        torch.testing.assert_close(gradient, torch.full((1, 2), -math.exp(5) / 2).double(), rtol=1e-6, atol=0)
        loss, gradient, _ = loss_gradient_metrics(name, old + f64([[60.0, -10.0]]), old, f64([1.0]), mask, **wide)
        assert loss.item() == pytest.approx(-math.exp(20), rel=1e-12)
        assert (gradient == 0).all()


def test_metrics_of_gspo_are_means_over_sequences():
    """Responses of 1 and 3 tokens; the second is clipped. Per token it would count three times."""
    log_ratios, mask = f64([[0.0, 0.0, 0.0], [0.3, 0.0, 0.0]]), ragged([1, 3])
    old = torch.full((2, 3), -1.0, dtype=torch.float64)
    ref = old + f64([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]) + log_ratios
    for name in ("gspo", "gspo_token"):
        _, _, metrics = loss_gradient_metrics(
            name, old + log_ratios, old, f64([1.0, 1.0]), mask, ref_logprobs=ref, clip_low=0.05, clip_high=0.05
        )
        assert metrics["clip_fraction_high"].item() == 0.5
        assert metrics["ratio"].item() == pytest.approx((1 + math.exp(0.1)) / 2, abs=1e-14)
        assert metrics["kl_old"].item() == pytest.approx(k3(f64(0.3)).item() / 3 / 2, abs=1e-14)
        assert metrics["kl_ref"].item() == pytest.approx(k3(f64(0.5)).item() / 2, abs=1e-14)


# ---- trap F.2: what dynamic sampling may hand over


@every_loss
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
@pytest.mark.parametrize("broken", [0.0, math.nan])
def test_trap_f2_a_batch_without_trainable_tokens_has_loss_gradient_and_metrics_0(name, shape, broken):
    values = torch.full(shape, broken)
    loss, gradient, metrics = loss_gradient_metrics(
        name, values, values, torch.full(shape[:1], broken), torch.zeros(shape), ref_logprobs=values, beta=0.1
    )
    assert loss.item() == 0.0 and (gradient == 0).all()
    assert all(value.item() == 0.0 for value in metrics.values())


@every_loss
def test_trap_f2_with_5_of_8_groups_left_the_denominator_is_that_of_the_5(name):
    batch = random_batch(11, [3, 1, 4, 2, 5, 2, 6, 3] * 2)  # 8 groups of 2
    batch["advantages"] = batch["advantages"].repeat_interleave(2)[:16] * f64([1, -1] * 8)
    useful = torch.tensor([1, 0, 1, 1, 0, 1, 0, 1]).bool().repeat_interleave(2)
    kept = {key: values[useful] for key, values in batch.items()}
    loss, gradient, _ = loss_gradient_metrics(name, **kept)
    silent = batch | {"advantages": torch.where(useful, batch["advantages"], 0.0)}  # the other groups earn the same
    whole, whole_gradient, _ = loss_gradient_metrics(name, **silent, denominator=COUNTS[name](kept["mask"]))
    torch.testing.assert_close(whole, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole_gradient[useful], gradient, rtol=0, atol=1e-12)
    assert (whole_gradient[~useful] == 0).all()


# ---- properties


def random_batch(
    seed: int, lengths: list[int], per_token: bool = False, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """A batch far from the policy that sampled it, with holes in the mask, as environment tokens make them."""
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(*lengths, 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    logprobs = -1.5 + 0.5 * normal(B, T)
    mask = ragged(lengths, T)
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
properties = settings(derandomize=True, deadline=None, max_examples=30)


@every_loss
@properties
@given(**BATCHES, options=OPTIONS)
def test_loss_equals_the_definition_token_by_token(name, seed, lengths, per_token, options):
    batch = random_batch(seed, lengths, per_token and name != "gspo")
    loss, _, _ = loss_gradient_metrics(name, **batch, **named(name, **options))
    assert loss.item() == pytest.approx(by_definition(name, batch, **options), abs=1e-11)


def by_definition(name: str, batch: dict[str, Tensor], beta, clip_low, clip_high, dual_clip) -> float:
    """One token at a time in Python's own floats."""
    sequences = []
    for b, row in enumerate(batch["mask"].tolist()):
        where = [t for t, chosen in enumerate(row) if chosen]
        new, old, ref = (
            [batch[key][b, t].item() for t in where] for key in ("logprobs", "old_logprobs", "ref_logprobs")
        )
        advantages = batch["advantages"][b].expand(len(row))[where].tolist()
        log_ratios = [n - o for n, o in zip(new, old, strict=True)]
        if name.startswith("gspo") and where:
            log_ratios = [sum(log_ratios) / len(where)] * len(where)
        tokens = []
        for n, p, a, log_r in zip(new, ref, advantages, log_ratios, strict=True):
            r = math.exp(log_r)
            if name == "reinforce":
                objective = a * n
            elif name == "cispo":
                objective = min(r, 1 + clip_high) * a * n
            else:
                objective = min(r * a, min(max(r, 1 - clip_low), 1 + clip_high) * a)
                if dual_clip is not None and a < 0:
                    objective = max(objective, dual_clip * a)
            tokens.append(-objective + beta * (math.exp(p - n) - (p - n) - 1))
        if tokens:
            sequences.append(tokens)
    if not sequences:
        return 0.0
    if name in ("grpo", "gspo", "gspo_token"):
        return sum(sum(tokens) / len(tokens) for tokens in sequences) / len(sequences)
    total = sum(map(sum, sequences))
    return total / (len(sequences) * MAX_LENGTH) if name == "dr_grpo" else total / sum(map(len, sequences))


@every_loss
@properties
@given(**BATCHES, options=OPTIONS, columns=st.integers(0, 4), pads=st.randoms(use_true_random=False))
def test_padding_changes_neither_loss_nor_gradient_nor_metrics(name, seed, lengths, per_token, options, columns, pads):
    batch, options = random_batch(seed, lengths, per_token and name != "gspo"), named(name, **options)
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

    loss, gradient, metrics = loss_gradient_metrics(name, **batch, **options)
    wide = {key: padded(values) for key, values in batch.items() if key != "mask"}
    wide_loss, wide_gradient, wide_metrics = loss_gradient_metrics(name, **wide, mask=mask, **options)
    torch.testing.assert_close(wide_loss, loss, rtol=0, atol=1e-13)
    torch.testing.assert_close(wide_gradient[:, :T], gradient, rtol=0, atol=1e-13)
    assert (wide_gradient[~mask] == 0).all()
    assert wide_metrics.keys() == metrics.keys()
    for key, value in metrics.items():
        torch.testing.assert_close(wide_metrics[key], value, rtol=0, atol=1e-13)


@every_loss
@properties
@given(**BATCHES, options=OPTIONS)
def test_trap_a1_any_partition_of_rows_gives_the_same_loss_gradient_and_metrics(
    name, seed, lengths, per_token, options
):
    options, count = named(name, **options), METRIC_COUNTS[name]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        batch = random_batch(seed, lengths, per_token and name != "gspo", dtype)
        whole, gradient, metrics = loss_gradient_metrics(name, **batch, **options)
        scale = max(1.0, gradient.abs().max().item())  # float32 keeps digits, not decimals
        denominator = max(COUNTS[name](batch["mask"]), 1)
        for size in (1, 2, 4, len(lengths)):
            losses, gradients, sums = [], [], dict.fromkeys(metrics, 0.0)
            for start in range(0, len(lengths), size):
                part = {key: values[start : start + size] for key, values in batch.items()}
                loss, part_gradient, part_metrics = loss_gradient_metrics(
                    name, **part, **options, denominator=denominator
                )
                losses.append(loss)
                gradients.append(part_gradient)
                for key, value in part_metrics.items():  # micro-batches combine as weighted means
                    sums[key] += value.item() * count(part["mask"])
            torch.testing.assert_close(sum(losses), whole, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(torch.cat(gradients), gradient, rtol=0, atol=tolerance * scale)
            for key, value in metrics.items():
                combined = sums[key] / max(count(batch["mask"]), 1)
                assert combined == pytest.approx(value.item(), rel=10 * tolerance, abs=tolerance)


@every_loss
@properties
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_on_policy_every_ratio_is_1_every_kl_0_and_the_gradient_the_policy_gradient(name, seed, lengths, dtype):
    batch = random_batch(seed, lengths, dtype=dtype)
    batch["old_logprobs"] = batch["ref_logprobs"] = batch["logprobs"]
    loss, gradient, metrics = loss_gradient_metrics(name, **batch, beta=0.5)
    assert {key: value.item() for key, value in metrics.items() if key != "ratio"} == {
        "clip_fraction_low": 0.0,
        "clip_fraction_high": 0.0,
        "kl_old": 0.0,
        "kl_ref": 0.0,
    }
    mask = batch["mask"]
    if not mask.any():
        return
    assert metrics["ratio"].item() == 1.0
    # What a token weighs in the mean; the policy gradient is that times -A, and the KL adds nothing.
    weights = 1 / f64(COUNTS[name](mask)).expand(mask.shape)
    if name == "dr_grpo":
        weights = weights / MAX_LENGTH
    elif name in ("grpo", "gspo", "gspo_token"):
        weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
    by_hand = torch.where(mask, -batch["advantages"].double()[:, None] * weights, 0.0)
    torch.testing.assert_close(gradient.double(), by_hand, rtol=1e-6, atol=1e-9)
    value = (by_hand * batch["logprobs"]).sum() if name in ("reinforce", "cispo") else by_hand.sum()
    torch.testing.assert_close(loss.double(), value.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [1, 6, 3, 2]], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token"])
def test_trap_h3_on_policy_the_loss_of_a_balanced_group_is_0_while_its_gradient_is_not(name, lengths):
    """Under a mean over tokens it is 0 for equal lengths alone."""
    mask = ragged(lengths)
    logprobs = random_batch(0, lengths, dtype=torch.float32)["logprobs"]
    balanced = torch.tensor([1.5, -0.5, -0.5, -0.5])
    loss, gradient, _ = loss_gradient_metrics(name, logprobs, logprobs, balanced, mask)
    assert abs(loss.item()) <= 1e-6
    assert gradient.norm().item() > 0.1
    loss, _, _ = loss_gradient_metrics("dapo", logprobs, logprobs, balanced, mask)
    assert (abs(loss.item()) <= 1e-6) == (lengths == [5, 5, 5, 5])


@every_loss
def test_kl_old_is_the_kl_of_the_old_policy_to_the_policy_on_average(name):
    """Exactly: over three tokens, each as often as the old policy draws it."""
    old_logits, logits = f64([0.0, 0.0, math.log(2)]), f64([0.3, -0.9, 0.4])  # old probabilities 1/4, 1/4, 1/2
    drawn = [0, 1, 2, 2]
    logprobs, old = (some.log_softmax(-1)[drawn][None] for some in (logits, old_logits))
    _, _, metrics = loss_gradient_metrics(name, logprobs, old, f64([1.0]), torch.ones(1, 4))
    assert metrics["kl_old"].item() == pytest.approx(exact_kl(old_logits, logits).item(), abs=1e-14)
    geometric = (logprobs - old).mean().exp().item()
    assert metrics["ratio"].item() == pytest.approx(geometric if "gspo" in name else 1.0, abs=1e-14)


@every_loss
def test_kl_ref_is_the_kl_of_the_policy_to_the_reference_on_average(name):
    logits, ref_logits = f64([0.0, 0.0, math.log(2)]), f64([0.3, -0.9, 0.4])
    drawn = [0, 1, 2, 2]
    logprobs, ref = (some.log_softmax(-1)[drawn][None] for some in (logits, ref_logits))
    _, _, metrics = loss_gradient_metrics(name, logprobs, logprobs, f64([1.0]), torch.ones(1, 4), ref_logprobs=ref)
    assert metrics["kl_ref"].item() == pytest.approx(exact_kl(logits, ref_logits).item(), abs=1e-14)


# ---- the contract every group-policy loss keeps

CONTRACT = {  # function -> defaults of its keywords
    grpo_loss: {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    dr_grpo_loss: {"max_length": inspect.Parameter.empty, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    dapo_loss: {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    ppo_loss: {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    gspo_loss: {"token_level": False, "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
    reinforce_loss: {},
    cispo_loss: {"clip_high": 4.0},
}


@pytest.mark.parametrize("function", CONTRACT, ids=lambda function: function.__name__)
def test_the_signature_is_that_of_the_contract(function):
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert positional == ["logprobs", "old_logprobs", "advantages", "mask"]
    assert keywords == {"ref_logprobs": None, "beta": 0.0, "denominator": None} | CONTRACT[function]
    assert len(parameters) == len(positional) + len(keywords)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float64])
def test_the_loss_has_the_type_of_its_inputs_and_metrics_carry_no_gradient(name, dtype, mask_dtype):
    batch = random_batch(0, [3, 2], dtype=dtype)
    batch["mask"] = batch["mask"].to(mask_dtype)
    batch["logprobs"].requires_grad_()
    loss, metrics = LOSSES[name](**batch, beta=0.1, denominator=2, **named(name, dual_clip=2.0))
    assert loss.dtype == dtype and loss.shape == () and loss.requires_grad
    assert metrics.keys() == {"clip_fraction_low", "clip_fraction_high", "ratio", "kl_old", "kl_ref"}
    for key, value in metrics.items():
        assert value.shape == () and value.dtype == dtype and not value.requires_grad, key


@every_loss
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_any_type_of_mask_gives_the_same_loss_gradient_and_metrics(name, dtype):
    batch = random_batch(5, [4, 0, 6, 2])
    expected = loss_gradient_metrics(name, **batch, beta=0.1)
    loss, gradient, metrics = loss_gradient_metrics(name, **batch | {"mask": batch["mask"].to(dtype)}, beta=0.1)
    assert loss == expected[0]
    assert torch.equal(gradient, expected[1])
    assert metrics == expected[2]


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "gspo"])
def test_advantages_per_sequence_are_those_of_each_of_its_tokens(name):
    batch = random_batch(2, [4, 3, 6])
    spread = batch | {"advantages": batch["advantages"][:, None].expand(3, 6)}
    one, other = loss_gradient_metrics(name, **batch), loss_gradient_metrics(name, **spread)
    assert one[0] == other[0] and torch.equal(one[1], other[1]) and one[2] == other[2]


@every_loss
def test_a_gradient_reaches_the_log_probs_alone(name):
    batch = random_batch(4, [4, 3])
    inputs = {key: values.requires_grad_() for key, values in batch.items() if key != "mask"}
    loss, _ = LOSSES[name](**inputs, mask=batch["mask"], beta=0.1)
    loss.backward()
    assert (inputs.pop("logprobs").grad != 0).any()
    assert all(values.grad is None for values in inputs.values())


@every_loss
@pytest.mark.parametrize("wrong", [0, -1, math.nan])
def test_a_denominator_that_is_not_positive_is_an_error_that_shows_it(name, wrong):
    with pytest.raises(ValueError, match=f"denominator must be positive and finite, not {wrong}"):
        one_token(name, 1.0, 1.0, denominator=wrong)


SHAPES = [(3, 5), (2, 4), (1, 4), (3, 1), (4,), (3, 4, 1)]


@every_loss
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "mask", "ref_logprobs"])
def test_a_wrong_shape_is_an_error_that_says_what_was_expected(name, where):
    for shape in SHAPES:
        with pytest.raises(ValueError, match=r"expected .*\(B, T\)"):
            LOSSES[name](**random_batch(0, [4, 3, 2]) | {where: torch.zeros(shape)}, beta=0.1)


@every_loss
def test_advantages_of_a_wrong_shape_are_an_error_that_says_what_was_expected(name):
    for shape in [(4,), (1,), (), (3, 1), (1, 4), (3, 5)]:
        with pytest.raises(ValueError, match=r"expected advantages \(B,\)"):
            LOSSES[name](**random_batch(0, [4, 3, 2]) | {"advantages": torch.zeros(shape)})


@every_loss
@pytest.mark.parametrize("value", [-math.inf, math.inf])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "ref_logprobs"])
def test_an_infinite_log_prob_in_an_unmasked_slot_is_reported_and_in_a_masked_one_ignored(name, value, where):
    for masked, finite in ((False, name == "reinforce" and where == "old_logprobs"), (True, True)):
        inputs = {key: torch.full((1, 2), -1.0) for key in WHERE[:3]}
        inputs[where][0, 0] = value
        mask = torch.tensor([[not masked, True]])
        loss, _ = LOSSES[name](**inputs, advantages=torch.ones(1), mask=mask, beta=0.1)
        assert bool(loss.isfinite()) == finite


@every_loss
def test_without_a_reference_there_is_no_kl_to_it(name):
    batch = random_batch(0, [3, 2])
    with_reference = LOSSES[name](**batch)  # beta 0: logged, not in the loss
    del batch["ref_logprobs"]
    without = LOSSES[name](**batch)
    assert with_reference[0] == without[0]
    assert with_reference[1].keys() - without[1].keys() == {"kl_ref"}


@every_loss
def test_float16_is_refused_since_the_bound_on_ratios_overflows_it(name):
    half = torch.full((1, 2), -1.0, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"expected log-probs in float32, float64 or bfloat16, got torch.float16"):
        LOSSES[name](half, half, torch.ones(1), torch.ones(1, 2))
