"""KL estimators: sign, value and gradient, against numbers worked out by hand and exact expectations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanorl.kl import exact_kl, kl_estimate

KINDS = ("k1", "k2", "k3")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimate_and_gradient(logprob: float, ref: float, kind: str, dtype=torch.float64) -> tuple[float, float]:
    logprobs = torch.tensor([[logprob]], dtype=dtype, requires_grad=True)
    value = kl_estimate(logprobs, torch.tensor([[ref]], dtype=dtype), kind)
    value.sum().backward()
    return value.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    "logprob,ref,kind,value,gradient",
    [
        (-1.0, -1.5, "k1", 0.5, 1.0),
        (-1.0, -1.5, "k2", 0.125, 0.5),
        (-1.0, -1.5, "k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),  # 0.106531, 0.393469
        (-1.5, -1.0, "k1", -0.5, 1.0),
        (-1.5, -1.0, "k2", 0.125, -0.5),
        (-1.5, -1.0, "k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5)),  # 0.148721, -0.648721
    ],
)
def test_trap_a4_sign_value_and_gradient_of_each_estimator(logprob, ref, kind, value, gradient):
    assert estimate_and_gradient(logprob, ref, kind) == pytest.approx((value, gradient), abs=1e-14)


def test_trap_a4_the_published_digits():
    assert estimate_and_gradient(-1.0, -1.5, "k3") == pytest.approx((0.106531, 0.393469), abs=5e-7)
    assert estimate_and_gradient(-1.5, -1.0, "k3") == pytest.approx((0.148721, -0.648721), abs=5e-7)


# Exact expectations over three tokens: policy logits, reference probabilities.
POLICY_LOGITS = f64(0.2, -0.1, 0.4)
REFERENCE_PROBS = f64(0.5, 0.3, 0.2)
TRUE_KL = 0.120209  # KL(policy || reference)
EXPECTED_GRADIENTS = {  # by the logits, of E[k] with the sampled tokens held fixed
    "k1": f64(0, 0, 0),
    "k2": f64(-0.17318, -0.07557, 0.24875),
    "k3": f64(-0.16242, -0.04991, 0.21233),
}


def expected_estimate(kind: str) -> tuple[float, Tensor]:
    """E over the policy of one estimator, and its pathwise gradient: each token's probability is held fixed."""
    logits = POLICY_LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)[None]  # (1, 3): one row whose "sampled tokens" are all three
    probs = logprobs.detach().exp()
    expectation = (probs * kl_estimate(logprobs, REFERENCE_PROBS.log()[None], kind)).sum()
    expectation.backward()
    return expectation.item(), logits.grad


def gradient_of_exact_kl(reversed_order: bool) -> Tensor:
    logits = POLICY_LOGITS.clone().requires_grad_()
    pair = (logits, REFERENCE_PROBS.log())
    exact_kl(*(pair[::-1] if reversed_order else pair)).backward()
    return logits.grad


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_trap_a4_k1_and_k3_are_the_true_kl_on_average(kind):
    assert expected_estimate(kind)[0] == pytest.approx(TRUE_KL, abs=5e-7)
    probs = POLICY_LOGITS.softmax(-1)
    by_hand = sum(p * math.log(p / q) for p, q in zip(probs.tolist(), REFERENCE_PROBS.tolist(), strict=True))
    assert expected_estimate(kind)[0] == pytest.approx(by_hand, abs=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_trap_a4_expected_gradient_of_each_estimator(kind):
    torch.testing.assert_close(expected_estimate(kind)[1], EXPECTED_GRADIENTS[kind], rtol=0, atol=5e-6)


def test_trap_a4_k1_has_no_gradient_on_average():
    assert expected_estimate("k1")[1].abs().max() < 1e-15


def test_trap_a4_gradient_of_k2_is_that_of_kl_policy_reference():
    torch.testing.assert_close(expected_estimate("k2")[1], gradient_of_exact_kl(False), rtol=0, atol=1e-14)


def test_trap_a4_gradient_of_k3_is_that_of_kl_reference_policy():
    torch.testing.assert_close(expected_estimate("k3")[1], gradient_of_exact_kl(True), rtol=0, atol=1e-14)


def test_trap_a4_exact_kl_has_the_published_value():
    assert exact_kl(POLICY_LOGITS, REFERENCE_PROBS.log()).item() == pytest.approx(TRUE_KL, abs=5e-7)


def test_trap_a5_k3_of_a_huge_ratio_has_a_finite_value_and_gradient():
    value, gradient = estimate_and_gradient(-200.0, -1.0, "k3", torch.float32)  # exp(199) overflows float32
    assert value == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert gradient == 0.0


@pytest.mark.parametrize("d", [20.0, 20.5, 199.0, 1e6])
def test_k3_uses_the_clamped_log_ratio_in_every_term(d):
    at_bound = float(d == 20.0)  # the gradient is zero beyond the bound, not on it
    assert estimate_and_gradient(-d, 0.0, "k3") == pytest.approx(
        (math.exp(20) - 21, at_bound * (1 - math.exp(20))), rel=1e-12
    )
    assert estimate_and_gradient(0.0, -d, "k3") == pytest.approx(
        (math.exp(-20) + 19, at_bound * (1 - math.exp(-20))), rel=1e-12
    )


def test_k1_and_k2_are_not_clamped():
    assert estimate_and_gradient(0.0, -150.0, "k1") == (150.0, 1.0)
    assert estimate_and_gradient(0.0, -150.0, "k2") == (11250.0, 150.0)


def test_k3_keeps_its_digits_for_nearly_equal_policies():
    d = 1e-3  # exp(d) - d - 1 in float32 would be off by 6e-8, a tenth of the value
    value, gradient = estimate_and_gradient(-1e-3, 0.0, "k3", torch.float32)
    assert value == pytest.approx(d**2 / 2 + d**3 / 6, rel=2e-4)
    assert gradient == pytest.approx(-d - d**2 / 2, rel=1e-4)


@settings(derandomize=True, deadline=None)
@given(logprob=st.floats(-60, 0), ref=st.floats(-60, 0))
def test_k3_is_never_negative(logprob, ref):
    assert estimate_and_gradient(logprob, ref, "k3")[0] >= 0
    assert estimate_and_gradient(logprob, ref, "k3", torch.float32)[0] >= -1e-7 * min(abs(ref - logprob), 1)  # rounding


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kl_of_a_policy_with_itself_is_0_and_keeps_shape_and_type(kind, dtype):
    logprobs = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    value = kl_estimate(logprobs, logprobs, kind)
    assert value.dtype == dtype and value.shape == (3, 5)
    assert (value == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_reaches_the_reference(kind):
    logprobs, ref = torch.full((1, 2), -1.0, requires_grad=True), torch.full((1, 2), -2.0, requires_grad=True)
    kl_estimate(logprobs, ref, kind).sum().backward()
    assert (logprobs.grad != 0).all()
    assert ref.grad is None


def test_k3_is_the_default():
    logprobs, ref = f64(-1.0, -2.0)[None], f64(-1.5, -0.1)[None]
    assert torch.equal(kl_estimate(logprobs, ref), kl_estimate(logprobs, ref, "k3"))


def test_an_unknown_estimate_is_an_error_that_lists_the_choices():
    with pytest.raises(ValueError, match=r"unknown KL estimate 'k4': choose one of k1, k2, k3"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


@pytest.mark.parametrize("function", [kl_estimate, exact_kl])
@pytest.mark.parametrize("shape", [(2, 1), (3,), (1, 3)])
def test_shapes_that_would_broadcast_are_an_error_that_shows_them(function, shape):
    with pytest.raises(ValueError, match=r"expected equal shapes, got \(2, 3\) and"):
        function(torch.zeros(2, 3), torch.zeros(shape))


def test_exact_kl_takes_any_leading_shape_and_equals_the_sum_by_hand():
    generator = torch.Generator().manual_seed(0)
    p_logits = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    q_logits = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    values = exact_kl(p_logits, q_logits)
    assert values.shape == (2, 3)
    for b in range(2):
        for t in range(3):
            p = [math.exp(x) for x in p_logits[b, t].tolist()]
            q = [math.exp(x) for x in q_logits[b, t].tolist()]
            by_hand = sum(x / sum(p) * math.log(x / sum(p) / (y / sum(q))) for x, y in zip(p, q, strict=True))
            assert values[b, t].item() == pytest.approx(by_hand, abs=1e-13)
    assert (exact_kl(p_logits, p_logits) == 0).all()


def test_a_token_the_policy_cannot_choose_adds_nothing_to_the_exact_kl():
    logits = f64(0.0, 0.0, -math.inf).requires_grad_()
    value = exact_kl(logits, f64(0.0, 0.0, 0.0))
    assert value.item() == pytest.approx(math.log(1.5), abs=1e-14)  # two equal tokens against three
    value.backward()
    assert logits.grad.isfinite().all()
    both = f64(1.0, -math.inf, 0.0)
    assert exact_kl(both, both).item() == 0.0


def test_a_token_only_the_policy_can_choose_makes_the_exact_kl_infinite():
    assert exact_kl(f64(0.0, 0.0), f64(0.0, -math.inf)).item() == math.inf


def test_exact_kl_keeps_its_digits_for_shifted_logits():
    policy, ref = torch.tensor([0.5, -1.0, 2.0, 0.25]), torch.tensor([1.5, 0.5, -0.75, 0.0])
    truth = exact_kl(policy.double(), ref.double()).item()
    assert exact_kl(policy + 1e4, ref - 1e4).item() == pytest.approx(truth, abs=1e-6)  # float32: both exact there
