"""The Triton kernels over rows of logits, in Triton's interpreter: against float64, and under everything that hurts."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_matrix import FULL, assert_agree, cases, gradients, make, truth

from kernels import linear_kl, linear_logprob, reference, rows

pytestmark = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is not written is NaN, and a small vocabulary too has several blocks."""
    torch.use_deterministic_algorithms(True)  # fills new, empty tensors
    monkeypatch.setattr(rows, "BLOCK", 256)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", cases(), ids=lambda case: "|".join(map(str, case)))
def test_values_and_gradients_agree_with_float64(case, monkeypatch):
    if case.V > 1000:
        monkeypatch.setattr(rows, "BLOCK", 4096)
    N = case.N if FULL or case.V <= 1000 else min(case.N, 1)  # a row of 50,257 words takes a second
    logits, ref_logits, targets, upstream = make(case.logits, N, case.V)
    options = {"temperature": case.temperature, "softcap": case.softcap}
    before = logits.clone()
    results = rows.rows_forward(logits, targets, ref_logits, **options)
    assert torch.equal(logits, before)
    grad = rows.rows_backward(logits, targets, results, *gradients(upstream, case), ref_logits, **options)
    assert grad is logits  # written over
    space = logits._base  # (N, V + 5)
    assert space[:, 0].isnan().all() and space[:, case.V + 1 :].isnan().all()  # and over nothing else
    assert_agree(results, grad, *truth(before, ref_logits, targets, upstream, case))


def test_without_a_reference_the_other_results_are_the_same_bits():
    logits, ref_logits, targets, upstream = make("plain", 3, 600)
    results = rows.rows_forward(logits, targets)
    assert torch.equal(results, rows.rows_forward(logits, targets, ref_logits)[:4])
    grad = rows.rows_backward(logits.clone(), targets, results, *upstream[:2])
    of_one = [
        rows.rows_backward(logits.clone(), targets, results, *g) for g in ((upstream[0], None), (None, upstream[1]))
    ]
    torch.testing.assert_close(sum(of_one), grad, rtol=0, atol=1e-6)


def test_a_row_has_the_same_bits_whatever_stands_beside_it():
    logits, ref_logits, targets, upstream = make("plain", 4, 600)

    def run(*chosen):
        chosen = list(chosen)
        x, y, t = logits[chosen], ref_logits[chosen], targets[chosen]
        results = rows.rows_forward(x, t, y)
        return results, rows.rows_backward(x, t, results, *upstream[:, chosen], y)

    (alone, grad), (beside, grads) = run(2), run(3, 1, 2)
    assert torch.equal(alone[:, 0], beside[:, 2]) and torch.equal(grad[0], grads[2])


def test_a_nan_is_reported_in_its_row_alone():
    logits, _, targets, upstream = make("plain", 3, 600)
    logits[1, 300] = math.nan
    results = rows.rows_forward(logits, targets)
    assert results[:2].isnan().all(0).tolist() == [False, True, False]
    grad = rows.rows_backward(logits, targets, results, *upstream[:2])
    assert grad.isnan().all(1).tolist() == grad.isnan().any(1).tolist() == [False, True, False]


def test_a_target_of_probability_0_has_log_prob_minus_infinity_and_a_finite_gradient():
    logits, _, targets, upstream = make("plain", 2, 600)
    logits[0, 7], targets[0] = -math.inf, 7
    results = rows.rows_forward(logits, targets)
    assert results[0, 0] == -math.inf and results[0, 1].isfinite() and results[1].isfinite().all()
    grad = rows.rows_backward(logits, targets, results, *upstream[:2])
    assert grad.isfinite().all() and grad[0, 7] == upstream[0, 0]


def test_a_reference_that_excludes_a_possible_word_is_infinitely_far():
    logits, ref_logits, targets, _ = make("plain", 2, 600)
    ref_logits[1, 300] = -math.inf
    kl = rows.rows_forward(logits, targets, ref_logits)[4]
    assert kl[0].isfinite() and kl[1] == math.inf


def test_digits_survive_a_shift_of_1e4():
    logits, _, targets, _ = make("plain", 2, 600)
    logits = torch.round(logits * 64) / 64  # exact in float32 after the shift too
    for temperature in (1.0, 0.7):
        plain, shifted = (rows.rows_forward(x, targets, temperature=temperature) for x in (logits, logits + 1e4))
        torch.testing.assert_close(shifted[:2], plain[:2], rtol=0, atol=1e-6)


def test_the_gradient_in_bfloat16_is_within_one_step_of_its_own_rounding():
    logits, _, targets, upstream = make("plain", 3, 600)
    results = rows.rows_forward(logits, targets)
    narrow = rows.empty_logits(3, 600, logits, torch.bfloat16)
    assert rows.rows_backward(logits, targets, results, *upstream[:2], out=narrow) is narrow
    exact = rows.rows_backward(logits, targets, results, *upstream[:2])
    # Half a step by rounding; the interpreter cuts instead, a whole one.
    torch.testing.assert_close(narrow.float(), exact, rtol=2**-7, atol=1e-37)


def test_an_upstream_gradient_shared_by_all_rows_is_read_as_such():
    logits, _, targets, _ = make("plain", 3, 257)
    results = rows.rows_forward(logits, targets)
    ones = torch.ones(()).expand(3)  # what the backward pass of a sum hands over: no steps between its elements
    grad = rows.rows_backward(logits.clone(), targets, results, ones, None)
    assert torch.equal(grad, rows.rows_backward(logits, targets, results, torch.ones(3), None))


def test_rows_that_do_not_lie_in_one_piece_are_an_error():
    with pytest.raises(ValueError, match="each row must lie in one piece"):
        rows.rows_forward(torch.zeros(5, 4).T, torch.zeros(4, dtype=torch.long))


# kernels/linear.py on top of them.


def inputs(N: int = 20, D: int = 5, V: int = 300):
    generator = torch.Generator().manual_seed(0)
    hidden, ref_hidden = torch.randn(2, N, D, generator=generator)
    weight, ref_weight = torch.randn(2, V, D, generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::4] = -100
    hidden[0] = math.nan  # in a row that is left out
    return hidden, weight, ref_hidden, ref_weight, targets, torch.randn(3, N, generator=generator)


@pytest.mark.parametrize("keep", [0, 2**30])
def test_log_prob_entropy_and_kl_of_hidden_states_agree_with_float64(keep):
    hidden, weight, ref_hidden, ref_weight, targets, upstream = inputs()
    shape = {"temperature": 0.7, "softcap": 5.0}

    def run(function, dtype, **options):
        h, w = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        values = function(h, w, ref_hidden.to(dtype), ref_weight.to(dtype), **options)
        torch.autograd.backward(values, list(upstream.to(dtype)), retain_graph=True)
        first = h.grad.clone()
        torch.autograd.backward(values, list(upstream.to(dtype)))  # the kept logits are gone by now
        torch.testing.assert_close(h.grad, 2 * first, rtol=1e-6, atol=1e-7)
        return [*(value.detach() for value in values), h.grad, w.grad]

    def chunked(h, w, rh, rw, **options):
        return linear_logprob(h, w, targets, reference=(rh, rw), chunk=16, keep_logits_bytes=keep, **options)

    def dense(h, w, rh, rw, **options):
        return reference.linear_logprob(h, w, targets, ref_hidden=rh, ref_weight=rw, **options)

    expected = run(dense, torch.float64, **shape)
    for value, exact in zip(run(chunked, torch.float32, **shape), expected, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_head_that_is_frozen_and_a_kl_alone():
    hidden, weight, ref_hidden, ref_weight, targets, upstream = inputs(6)
    hidden.requires_grad_()
    kl = linear_kl(hidden, weight, ref_hidden, ref_weight, targets)
    kl.backward(upstream[2])
    x = hidden.detach().double().requires_grad_()
    exact = reference.linear_logprob(
        x, weight.double(), targets, ref_hidden=ref_hidden.double(), ref_weight=ref_weight.double()
    )[2]
    exact.backward(upstream[2].double())
    torch.testing.assert_close(kl.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), x.grad, rtol=1e-5, atol=1e-5)
    assert weight.grad is None and hidden.grad[0].abs().max() == 0


def test_no_row_and_no_scored_row_start_no_kernel(monkeypatch):
    monkeypatch.setattr(rows, "rows_forward_kernel", None)
    monkeypatch.setattr(rows, "rows_backward_kernel", None)
    for N in (0, 3):
        hidden = torch.ones(N, 2, requires_grad=True)
        logprobs, _ = linear_logprob(hidden, torch.ones(4, 2), torch.full((N,), -100))
        logprobs.sum().backward()
        assert (hidden.grad == 0).all() and (logprobs == 0).all()


def test_the_kernels_are_what_serves_here(monkeypatch):
    monkeypatch.setattr(rows, "rows_forward_kernel", None)
    with pytest.raises(TypeError):
        linear_logprob(torch.ones(1, 2), torch.ones(4, 2), torch.zeros(1, dtype=torch.long))
    wide = torch.ones(1, 2, dtype=torch.float64)
    assert linear_logprob(wide, torch.ones(4, 2), torch.zeros(1, dtype=torch.long))[0].item() == pytest.approx(
        -math.log(4)
    )  # in torch: the kernels know no float64
