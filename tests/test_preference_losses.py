"""DPO, IPO and Bradley-Terry: TRL's values, the published traps, and what no partition may change."""

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

from nanorl.losses import bradley_terry_loss, dpo_loss, ipo_loss
from nanorl.losses.aggregate import sequence_logprobs

DATA = Path(__file__).parent / "data"
ORACLE = json.loads((DATA / "preference_losses.json").read_text())
CASES = {case["name"]: case for case in ORACLE["cases"]}
SCORES = json.loads((DATA / "reward_model.json").read_text())
SCORE_CASES = {case["name"]: case for case in SCORES["cases"]}
LN2 = math.log(2)
properties = settings(derandomize=True, deadline=None, max_examples=40)


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- independent values: computed by TRL 1.16.0, see data/README.md

LEFT_OUT = {  # kind of loss -> why
    "hinge": "a loss that nanorl does not have",
    "apo_zero": "a loss that nanorl does not have",
    "sft": "supervised training on the chosen responses, which is nanorl.sft",
}
PER_TOKEN = ("ipo", "sigmoid_norm")  # TRL takes the means of tokens there, elsewhere the sums


def from_trl(config: dict) -> tuple[functools.partial, bool]:
    """TRL's settings -> the loss, and whether log-probs are means."""
    (kind,) = config["loss_type"]
    options = {"beta": config.get("beta", 0.1)}
    if kind == "robust":  # TRL's sigmoid ignores label_smoothing
        options |= {"label_smoothing": config["label_smoothing"], "robust": True}
    return functools.partial(ipo_loss if kind == "ipo" else dpo_loss, **options), kind in PER_TOKEN


TRL_CASES = [name for name, case in CASES.items() if case["config"]["loss_type"][0] not in LEFT_OUT]


@pytest.mark.parametrize("name", TRL_CASES)
def test_loss_and_gradient_agree_with_trl(name):
    case, inputs = CASES[name], {key: f64(values) for key, values in ORACLE["inputs"].items()}
    loss_function, mean = from_trl(case["config"])
    mask = inputs["completion_mask"][:, 1:]  # logps[i, t] belongs to token t + 1
    logprobs = inputs["logps"].requires_grad_()
    # Rows 0 to 3 are the chosen ones.
    pairs = [*sequence_logprobs(logprobs, mask, mean=mean).chunk(2)]
    pairs += [*sequence_logprobs(inputs["ref_logps"], mask, mean=mean).chunk(2)]
    loss, metrics = loss_function(*pairs)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-10)
    expected = torch.where(mask.bool(), f64(case["grad_logps"]), 0.0)  # TRL's is that before its mask
    torch.testing.assert_close(logprobs.grad, expected, rtol=0, atol=1e-10)
    if not mean:  # TRL's metrics are those of sums
        assert {key: metrics[ours].item() for key, ours in METRICS.items()} == pytest.approx(
            {key: case["metrics"][key] for key in METRICS}, abs=1e-10
        )


METRICS = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "logps/chosen": "chosen_logprob",
    "logps/rejected": "rejected_logprob",
}


def test_sums_and_means_of_log_probs_are_those_trl_stored():
    inputs = {key: f64(values) for key, values in ORACLE["inputs"].items()}
    mask = inputs["completion_mask"][:, 1:]
    sums, means = (sequence_logprobs(inputs["logps"], mask, mean=mean).chunk(2) for mean in (False, True))
    for side, which in enumerate(("chosen", "rejected")):
        torch.testing.assert_close(sums[side], inputs[f"{which}_logps"], rtol=0, atol=1e-10)
        lengths = inputs[f"{which}_len"]
        torch.testing.assert_close(means[side], inputs[f"{which}_logps"] / lengths, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", SCORE_CASES.values(), ids=SCORE_CASES.keys())
def test_the_reward_models_loss_and_gradient_agree_with_trl(case):
    assert case["center_rewards_coefficient"] is None, "a term that nanorl does not have"
    inputs = {key: f64(values) for key, values in SCORES["inputs"].items()}
    scores = torch.cat([inputs["chosen"], inputs["rejected"]]).requires_grad_()
    loss, metrics = bradley_terry_loss(*scores.chunk(2), margin=inputs["margin"] if case["margin"] else None)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-10)
    torch.testing.assert_close(scores.grad, f64(case["grad_logits"])[:, 0], rtol=0, atol=1e-10)
    assert metrics["accuracy"].item() == pytest.approx(case["metrics"]["accuracy"], abs=1e-7)  # TRL's is float32
    assert metrics["margin"].item() == pytest.approx(case["metrics"]["margin"], abs=1e-10)


def test_no_kind_of_trls_cases_is_left_out_but_those_named_with_their_reason():
    kinds = {case["config"]["loss_type"][0] for case in CASES.values()}
    assert kinds == {*LEFT_OUT, "sigmoid", "ipo", "robust", "sigmoid_norm"}
    assert len(TRL_CASES) + len(LEFT_OUT) == len(CASES) and all(LEFT_OUT.values())


# ---- trap A.8: policy sums chosen -12 (4 tokens), rejected -10 (2 tokens); reference -14, -9

SUM = [f64([x]) for x in (-12.0, -10.0, -14.0, -9.0)]
MEAN = [f64([x]) for x in (-3.0, -5.0, -3.5, -4.5)]


@pytest.mark.parametrize(
    "loss,sums,means",
    [
        (dpo_loss, 0.554355, 0.644397),
        (functools.partial(dpo_loss, label_smoothing=0.1), 0.584355, 0.654397),
        (ipo_loss, 4.0, 16.0),
    ],
    ids=["sigmoid", "label smoothing", "ipo"],
)
def test_trap_a8_sums_and_means_a_token_are_two_losses_with_one_formula(loss, sums, means):
    for pair, margin, expected in ((SUM, 3.0, sums), (MEAN, 1.0, means)):
        value, metrics = loss(*pair, beta=0.1)
        assert value.item() == pytest.approx(expected, abs=5e-7)
        assert metrics["margin"].item() == pytest.approx(0.1 * margin, abs=1e-14)


def test_trap_a8_a_response_counts_the_same_tokens_in_its_sum_and_in_its_length():
    """Of 6 positions the prompt's first and the pad last are in neither; the stop token, of log-prob -4, in both."""
    logprobs, mask = f64([[-99, -1, -3, -4, -7, math.nan]]), torch.tensor([[0, 1, 1, 1, 0, 0]])
    assert sequence_logprobs(logprobs, mask).tolist() == [-8]
    assert sequence_logprobs(logprobs, mask, mean=True).tolist() == [pytest.approx(-8 / 3, abs=1e-15)]


def margin_of_2(**options) -> float:
    loss, _ = dpo_loss(f64([-10.0]), f64([-20.0]), f64([-20.0]), f64([-10.0]), beta=0.1, **options)
    return loss.item()


def test_trap_a8_label_smoothing_is_cdpo_and_only_the_robust_variant_divides():
    assert margin_of_2() == pytest.approx(0.126928, abs=5e-7)
    assert margin_of_2(label_smoothing=0.1) == pytest.approx(0.326928, abs=5e-7)
    # (0.9 x 0.126928 - 0.1 x 2.126928) / 0.8
    assert margin_of_2(label_smoothing=0.1, robust=True) == pytest.approx(-0.123072, abs=5e-7)
    assert margin_of_2(robust=True) == margin_of_2()


@pytest.mark.parametrize("wrong,robust", [(0.5, True), (0.7, True), (0.7, False), (-0.1, False), (math.nan, True)])
def test_trap_a8_labels_no_better_than_a_coin_are_an_error(wrong, robust):
    with pytest.raises(ValueError, match=rf"label_smoothing must be .* 0\.5, a coin's share, not {wrong}"):
        margin_of_2(label_smoothing=wrong, robust=robust)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "robust": True}])
def test_trap_a8_a_policy_equal_to_its_reference_has_loss_ln_2(options):
    pairs = [f64([-3.0, -8.0]), f64([-7.0, -1.0])]
    loss, metrics = dpo_loss(*pairs, *pairs, **options)
    assert loss.item() == pytest.approx(0.693147, abs=5e-7) == pytest.approx(LN2)
    assert all(metrics[name] == 0 for name in ("chosen_reward", "rejected_reward", "margin", "accuracy"))


@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
def test_trap_a8_equal_responses_give_the_parameters_a_gradient_of_exactly_0(loss):
    weights = torch.linspace(-1, 1, 5).requires_grad_()
    logprobs = (torch.arange(15.0).view(3, 5).sin() * weights).log_softmax(-1)  # (3, 5)
    same = sequence_logprobs(logprobs, torch.ones(3, 5))
    value, _ = loss(same, same, same.detach() - 0.3, same.detach() - 0.3)
    value.backward()
    assert value.item() == pytest.approx(LN2 if loss is dpo_loss else 25.0, rel=1e-6)
    assert (weights.grad == 0).all()


# ---- what the losses mean


def h_of(margin: float, loss, **options) -> tuple[float, float]:
    """Value, and derivative by the margin h."""
    chosen, zero = f64([margin]).requires_grad_(), f64([0.0])
    value, _ = loss(chosen, zero, zero, zero, **options)
    value.backward()
    return value.item(), chosen.grad.item()


def test_dpo_is_bradley_terry_on_the_implied_rewards():
    batch = random_pairs(3, 5)
    chosen, rejected, ref_chosen, ref_rejected = batch
    loss, metrics = dpo_loss(*batch, beta=0.3)
    scored, others = bradley_terry_loss(0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected))
    torch.testing.assert_close(loss, scored, rtol=0, atol=1e-14)
    assert {name: metrics[name].item() for name in others} == pytest.approx(
        {name: value.item() for name, value in others.items()}, abs=1e-14
    )


def test_cdpo_stops_where_the_implied_probability_is_1_minus_the_smoothing_and_robust_dpo_never_does():
    stop = math.log(0.9 / 0.1) / 0.5
    assert h_of(stop, dpo_loss, beta=0.5, label_smoothing=0.1)[1] == pytest.approx(0.0, abs=1e-15)
    assert h_of(2 * stop, dpo_loss, beta=0.5, label_smoothing=0.1)[1] > 0.01
    assert h_of(2 * stop, dpo_loss, beta=0.5, label_smoothing=0.1, robust=True)[1] < -0.01


def test_ipo_stops_where_the_margin_is_1_over_2_beta():
    assert h_of(1.25, ipo_loss, beta=0.4) == (0.0, 0.0)
    assert h_of(2.25, ipo_loss, beta=0.4) == pytest.approx((1.0, 2.0))


@properties
@given(margin=st.floats(-8, 8), flipped=st.sampled_from([0.0, 0.1, 0.3, 0.49]))
def test_robust_dpo_averaged_over_flipped_labels_is_dpo_on_true_ones(margin, flipped):
    options = {"label_smoothing": flipped, "robust": True}
    right, _ = h_of(margin, dpo_loss, **options)
    wrong, _ = h_of(-margin, dpo_loss, **options)
    assert (1 - flipped) * right + flipped * wrong == pytest.approx(h_of(margin, dpo_loss)[0], abs=1e-10)


def test_a_margin_asks_for_scores_that_differ_by_it():
    chosen, rejected = f64([1.0, 3.0]), f64([0.0, 5.0])
    loss, metrics = bradley_terry_loss(chosen, rejected, margin=f64([1.0, 0.0]))
    assert loss.item() == pytest.approx((LN2 + math.log(1 + math.exp(2))) / 2, abs=1e-14)
    assert (metrics["accuracy"].item(), metrics["margin"].item()) == (0.5, -0.5)  # of the scores themselves


def test_a_constant_added_to_all_scores_changes_nothing():
    chosen, rejected, _, _ = random_pairs(1, 4)
    torch.testing.assert_close(bradley_terry_loss(chosen + 7, rejected + 7), bradley_terry_loss(chosen, rejected))


# ---- trap A.5, for pairs


@pytest.mark.parametrize("far", [1e4, 3e38])
def test_trap_a5_a_margin_far_out_has_a_finite_loss_and_gradient_in_single_precision(far):
    for sign in (1, -1):
        chosen = torch.tensor([sign * far]).requires_grad_()
        for loss, slope in ((dpo_loss, 0.1), (bradley_terry_loss, 1.0)):
            others = [torch.zeros(1)] * (3 if loss is dpo_loss else 1)
            value, _ = loss(chosen, *others)
            (gradient,) = torch.autograd.grad(value, chosen)
            assert value.item() == pytest.approx(0.0 if sign > 0 else slope * far, rel=1e-6)
            assert gradient.item() == pytest.approx(0.0 if sign > 0 else -slope, rel=1e-6)


PAIR_LOSSES = {
    "dpo": dpo_loss,
    "cdpo": functools.partial(dpo_loss, label_smoothing=0.2),
    "robust": functools.partial(dpo_loss, label_smoothing=0.2, robust=True),
    "ipo": ipo_loss,
    "bradley_terry": lambda *four, **options: bradley_terry_loss(*four[:2], margin=four[2], **options),
}
every_loss = pytest.mark.parametrize("name", PAIR_LOSSES)


@every_loss
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_trap_a5_a_broken_number_of_a_pair_is_reported(name, which, broken):
    """Also where it would look like a pair won by far: infinity has loss 0."""
    if name == "bradley_terry" and which == 2 and broken == -math.inf:
        return  # a margin of -infinity asks for nothing
    batch = random_pairs(0, 3)
    batch[which] = batch[which].clone()
    batch[which][1] = broken
    assert not PAIR_LOSSES[name](*batch)[0].isfinite()


# ---- properties


def random_pairs(seed: int, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list((3 * torch.randn(4, count, generator=generator, dtype=torch.float64)).to(dtype).unbind())


def loss_gradients_metrics(name: str, batch: list[Tensor], **options) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Gradients by chosen and rejected, (2, B)."""
    leaves = [values.clone().requires_grad_() for values in batch]
    loss, metrics = PAIR_LOSSES[name](*leaves, **options)
    loss.backward()
    assert all(leaf.grad is None for leaf in leaves[2:])  # neither reference nor margin
    return loss.detach(), torch.stack([leaf.grad for leaf in leaves[:2]]), metrics


@every_loss
@properties
@given(seed=st.integers(0, 2**31), count=st.integers(1, 9))
def test_trap_a1_any_partition_of_pairs_gives_the_same_loss_gradient_and_metrics(name, seed, count):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        batch = random_pairs(seed, count, dtype)
        whole, gradient, metrics = loss_gradients_metrics(name, batch)
        scale = max(1.0, gradient.abs().max().item())
        for size in (1, 2, 4, count):
            parts = [[x[start : start + size] for x in batch] for start in range(0, count, size)]
            found = [loss_gradients_metrics(name, part, denominator=count) for part in parts]
            torch.testing.assert_close(sum(loss for loss, _, _ in found), whole, rtol=tolerance, atol=tolerance)
            gradients = torch.cat([g for _, g, _ in found], 1)
            torch.testing.assert_close(gradients, gradient, rtol=0, atol=tolerance * scale)
            for key, value in metrics.items():  # micro-batches combine as weighted means
                weighed = sum(m[key].item() * len(part[0]) for (_, _, m), part in zip(found, parts, strict=True))
                assert weighed / count == pytest.approx(value.item(), rel=10 * tolerance, abs=10 * tolerance)


@every_loss
@properties
@given(seed=st.integers(0, 2**31), count=st.integers(1, 6))
def test_the_loss_equals_its_definition_pair_by_pair(name, seed, count):
    batch = random_pairs(seed, count)
    total = 0.0
    for c, r, ref_c, ref_r in zip(*(values.tolist() for values in batch), strict=True):
        h = (c - ref_c) - (r - ref_r)
        right, flipped = math.log1p(math.exp(-0.1 * h)), math.log1p(math.exp(0.1 * h))
        total += {
            "dpo": right,
            "cdpo": 0.8 * right + 0.2 * flipped,
            "robust": (0.8 * right - 0.2 * flipped) / 0.6,
            "ipo": (h - 5) ** 2,
            "bradley_terry": math.log1p(math.exp(-(c - r - ref_c))),
        }[name]
    assert PAIR_LOSSES[name](*batch)[0].item() == pytest.approx(total / count, abs=1e-12)


@properties
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    columns=st.integers(0, 4),
    pad=st.sampled_from([0.0, -7.0, math.inf, math.nan]),
    mean=st.booleans(),
)
def test_padding_changes_no_log_prob_of_a_response(seed, lengths, columns, pad, mean):
    generator, T = torch.Generator().manual_seed(seed), max(*lengths, 1)
    logprobs = -torch.rand(len(lengths), T + columns, generator=generator, dtype=torch.float64)
    mask = torch.arange(T + columns) < torch.tensor(lengths)[:, None]
    padded = torch.where(mask, logprobs, pad).requires_grad_()
    found = sequence_logprobs(padded, mask, mean=mean)
    for b, length in enumerate(lengths):
        by_hand = sum(logprobs[b, :length].tolist()) / (max(length, 1) if mean else 1)
        assert found[b].item() == pytest.approx(by_hand, abs=1e-13)
    found.sum().backward()
    assert (padded.grad[~mask] == 0).all()


# ---- the contract


def test_scores_of_shape_b_1_never_broadcast_to_b_b():
    column, row = torch.zeros(3, 1), torch.zeros(3)
    for arguments in ((column, row), (row, column), (column, column), (row, row, column)):
        chosen, rejected, *margin = arguments
        with pytest.raises(ValueError, match=r"of one shape \(B,\), got .*\(3, 1\)"):
            bradley_terry_loss(chosen, rejected, margin=margin[0] if margin else None)
    for loss in (dpo_loss, ipo_loss):
        for which in range(4):
            with pytest.raises(ValueError, match=r"of one shape \(B,\), got .*\(3, 1\)"):
                loss(*(column if i == which else row for i in range(4)))


@pytest.mark.parametrize("shape", [(), (2,), (1,), (3, 3)])
def test_any_other_shape_is_an_error_that_says_what_was_expected(shape):
    for which in range(2):
        with pytest.raises(ValueError, match=r"expected one number a pair, chosen, rejected of one shape \(B,\)"):
            bradley_terry_loss(*(torch.zeros(shape if i == which else 3) for i in range(2)))
    with pytest.raises(ValueError, match=r"chosen, rejected, ref_chosen, ref_rejected of one shape \(B,\)"):
        dpo_loss(torch.zeros(3), torch.zeros(3), torch.zeros(shape), torch.zeros(3))


def test_the_signatures_are_those_of_the_contract():
    def keywords(loss) -> dict:
        parameters = inspect.signature(loss).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    assert keywords(dpo_loss) == {"beta": 0.1, "label_smoothing": 0.0, "robust": False, "denominator": None}
    assert keywords(ipo_loss) == {"beta": 0.1, "denominator": None}
    assert keywords(bradley_terry_loss) == {"margin": None, "denominator": None}
    for loss in (dpo_loss, ipo_loss):
        assert list(inspect.signature(loss).parameters)[:4] == ["chosen", "rejected", "ref_chosen", "ref_rejected"]


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_has_the_type_of_its_inputs_and_metrics_carry_no_gradient(name, dtype):
    chosen, *others = random_pairs(0, 3, dtype)
    loss, metrics = PAIR_LOSSES[name](chosen.requires_grad_(), *others)
    assert loss.dtype == dtype and loss.shape == () and loss.requires_grad
    dpo_metrics = {"chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob"}
    assert metrics.keys() == {"accuracy", "margin"} | (set() if name == "bradley_terry" else dpo_metrics)
    for value in metrics.values():
        assert value.dtype == dtype and value.shape == () and not value.requires_grad


@every_loss
def test_a_batch_without_pairs_has_loss_and_metrics_0(name):
    loss, metrics = PAIR_LOSSES[name](*[torch.zeros(0)] * 4)
    assert loss == 0 and all(value == 0 for value in metrics.values())


@every_loss
@pytest.mark.parametrize("wrong", [0, -1, math.nan])
def test_a_denominator_that_is_not_positive_is_an_error_that_shows_it(name, wrong):
    with pytest.raises(ValueError, match=f"denominator must be positive and finite, not {wrong}"):
        PAIR_LOSSES[name](*random_pairs(0, 3), denominator=wrong)


@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
@pytest.mark.parametrize("wrong", [0.0, -0.1, math.nan, math.inf])
def test_a_beta_that_is_not_positive_and_finite_is_an_error(loss, wrong):
    with pytest.raises(ValueError, match=f"beta must be positive and finite, not {wrong}"):
        loss(*random_pairs(0, 3), beta=wrong)


def test_whole_numbers_are_an_error_that_says_so():
    whole = torch.ones(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"expected numbers in floating point, got .*chosen.*int64"):
        bradley_terry_loss(whole, whole)
