"""Per-token log-probs and entropies from hidden states: against the dense definition, and never all logits at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import kernels.linear
import kernels.rows
import nanorl.scorer
from bench.allocations import Allocations
from kernels import backend, linear_kl, linear_logprob, reference
from nanorl.losses import grpo_loss
from nanorl.model import GPT, GPTConfig
from nanorl.rollout import Rollout

IGNORE = -100


def dense(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The definition, with all logits at once; rows without a target give 0."""
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)  # (N, V)
    kept = targets != IGNORE
    chosen = logprobs.gather(1, targets.where(kept, 0).long()[:, None]).squeeze(1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return torch.where(kept, chosen, 0.0), torch.where(kept, entropy, 0.0)


def inputs(N: int, D: int, V: int, dtype=torch.float64, ignored: float = 0.3, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = IGNORE
    upstream = torch.randn(2, N, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, targets, upstream


def values_and_gradients(function, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor, **options):
    """Log-probs, entropies, and the gradients of their sum weighted by `upstream` (2, N)."""
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    logprobs, entropy = function(hidden, weight, targets, **options)
    torch.autograd.backward([logprobs, entropy], list(upstream.to(logprobs.dtype)))
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def assert_all_close(results, expected, tolerance: float) -> None:
    for name, result, truth in zip(("log-prob", "entropy", "d hidden", "d weight"), results, expected, strict=True):
        torch.testing.assert_close(
            result.double(), truth.double(), rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


# Values and gradients.


@pytest.mark.parametrize("chunk", [1, 3, 16, 1000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("N,D,V", [(1, 1, 2), (7, 3, 5), (40, 8, 13), (17, 24, 257)])
def test_values_and_gradients_equal_the_dense_definition(N, D, V, temperature, chunk):
    arguments = inputs(N, D, V)
    result = values_and_gradients(linear_logprob, *arguments, temperature=temperature, chunk=chunk)
    assert_all_close(result, values_and_gradients(dense, *arguments, temperature=temperature), 1e-12)


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_trap_h1_chunked_equals_dense_to_1e_5_in_float32(temperature, chunk):
    arguments = inputs(40, 16, 300, torch.float32)
    result = values_and_gradients(linear_logprob, *arguments, temperature=temperature, chunk=chunk)
    truth = [x.double() if x.is_floating_point() else x for x in arguments]
    assert_all_close(result, values_and_gradients(dense, *truth, temperature=temperature), 1e-5)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)], ids=["log-prob", "entropy"])
def test_each_output_alone_has_its_own_gradient(weights):
    hidden, weight, targets, upstream = inputs(9, 4, 6)
    upstream = upstream * torch.tensor(weights, dtype=torch.float64)[:, None]
    expected = values_and_gradients(dense, hidden, weight, targets, upstream)
    assert_all_close(values_and_gradients(linear_logprob, hidden, weight, targets, upstream, chunk=4), expected, 1e-12)
    index = weights.index(1.0)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    linear_logprob(hidden, weight, targets, chunk=4)[index].backward(upstream[index])  # the other is not used at all
    torch.testing.assert_close(hidden.grad, expected[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight.grad, expected[3], rtol=1e-12, atol=1e-12)


def test_gradients_pass_the_check_by_finite_differences():
    hidden, weight, targets, _ = inputs(5, 3, 4)
    assert (targets == IGNORE).any()
    arguments = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w: linear_logprob(h, w, targets, temperature=0.7, chunk=2), arguments)


def test_values_worked_out_by_hand():
    hidden, weight = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [math.log(3.0)]])  # p = (1/4, 3/4), then equal
    logprobs, entropy = linear_logprob(hidden, weight, torch.tensor([0, 1]))
    assert logprobs.tolist() == pytest.approx([math.log(0.25), math.log(0.5)], abs=1e-6)
    by_hand = [0.25 * math.log(4) + 0.75 * math.log(4 / 3), math.log(2)]
    assert entropy.tolist() == pytest.approx(by_hand, abs=1e-6)


def test_the_temperature_divides_the_logits():
    logits = torch.tensor([[2.0, 0.0]])
    sharp, _ = linear_logprob(logits, torch.eye(2), torch.tensor([0]), temperature=0.5)
    plain, _ = linear_logprob(logits, torch.eye(2), torch.tensor([0]))
    assert (sharp.item(), plain.item()) == pytest.approx((-0.018150, -0.126928), abs=1e-6)


# Rows that are not scored.


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("chunk", [2, 512])
def test_ignored_rows_take_no_part_whatever_they_hold(garbage, chunk):
    hidden, weight, targets, upstream = inputs(12, 4, 6, torch.float32)
    ignored = targets == IGNORE
    assert 0 < ignored.sum() < 12
    clean = values_and_gradients(linear_logprob, hidden, weight, targets, upstream, chunk=chunk)
    hidden[ignored] = garbage
    dirty_upstream = upstream.masked_fill(ignored, math.nan)
    for dirty in (upstream, dirty_upstream):
        results = values_and_gradients(linear_logprob, hidden, weight, targets, dirty, chunk=chunk)
        for one, other in zip(results, clean, strict=True):
            assert torch.equal(one, other)
        for of_rows in results[:3]:
            assert (of_rows[ignored] == 0).all()


def test_a_nan_in_a_scored_row_is_reported_in_that_row_alone():
    hidden, weight, targets, _ = inputs(6, 4, 5, ignored=0.0)
    hidden[2, 1] = math.nan
    for values in linear_logprob(hidden, weight, targets, chunk=4):
        assert values.isnan().tolist() == [False, False, True, False, False, False]


def test_another_ignore_index_is_respected():
    hidden, weight, targets, _ = inputs(6, 4, 5, ignored=0.0)
    targets[:] = torch.tensor([0, 1, 2, 0, 3, 4])
    logprobs, _ = linear_logprob(hidden, weight, targets, ignore_index=0)
    assert (logprobs == 0).tolist() == [True, False, False, True, False, False]


@pytest.mark.parametrize("N", [0, 5])
def test_without_a_scored_row_values_and_gradients_are_0(N):
    hidden, weight, _, upstream = inputs(N, 4, 6)
    targets = torch.full((N,), IGNORE)
    logprobs, entropy, grad_hidden, grad_weight = values_and_gradients(
        linear_logprob, hidden, weight, targets, upstream, chunk=2
    )
    assert logprobs.tolist() == entropy.tolist() == [0.0] * N
    assert grad_hidden.shape == (N, 4) and (grad_hidden == 0).all()
    assert grad_weight.shape == (6, 4) and (grad_weight == 0).all()


def test_a_vocabulary_of_one_word_has_log_prob_entropy_and_gradient_0():
    results = values_and_gradients(linear_logprob, *inputs(5, 3, 1, ignored=0.0), chunk=2)
    assert all((result == 0).all() for result in results)


# Accuracy. Logits are made exact in float32 by an identity as the head: hidden states are the logits.


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_entropy_and_log_prob_keep_their_digits_when_logits_are_shifted(shift):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-256, 256, (8, 16), generator=generator) / 64.0  # exact in float32 after the shift as well
    targets = torch.arange(8)
    logprobs, entropy = linear_logprob(logits + shift, torch.eye(16), targets)
    true_logprobs, true_entropy = dense(logits.double(), torch.eye(16, dtype=torch.float64), targets)
    torch.testing.assert_close(logprobs.double(), true_logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy.double(), true_entropy, rtol=0, atol=1e-6)
    shifted = logits + shift
    usual_formula = shifted.logsumexp(-1) - (shifted.softmax(-1) * shifted).sum(-1)
    assert (usual_formula - true_entropy).abs().max() > 1e-4  # the difference of two big numbers


def test_gradients_keep_their_digits_when_logits_are_shifted():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-256, 256, (8, 16), generator=generator) / 64.0
    upstream, targets = torch.randn(2, 8, generator=generator), torch.arange(8)
    shifted = values_and_gradients(linear_logprob, logits + 1e4, torch.eye(16), targets, upstream)[2]
    truth = values_and_gradients(dense, logits.double(), torch.eye(16, dtype=torch.float64), targets, upstream)[2]
    torch.testing.assert_close(shifted.double(), truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_huge_logits_give_finite_values_and_gradients(size):
    """The other tokens' probabilities are exactly 0, and 0 times their log-prob must be 0."""
    logits = torch.tensor([[size, 0.0, -size], [size, size, -size]])
    upstream = torch.ones(2, 2)
    for target, expected in ((0, [0.0, -math.log(2)]), (2, [-2 * size, -2 * size])):
        logprobs, entropy, grad_hidden, grad_weight = values_and_gradients(
            linear_logprob, logits, torch.eye(3), torch.tensor([target] * 2), upstream
        )
        assert logprobs.tolist() == pytest.approx(expected, rel=1e-3)
        assert entropy.tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
        one_hot = torch.eye(3)[[target] * 2]
        probs = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
        torch.testing.assert_close(grad_hidden, one_hot - probs, rtol=0, atol=1e-6)  # entropy: at its minimum, or even
        assert grad_weight.isfinite().all()


def test_a_logit_that_overflows_to_minus_infinity_is_a_token_of_probability_0():
    hidden, weight = torch.tensor([[1e20]]), torch.tensor([[0.0], [0.0], [-1e20]])  # float32: the product is -inf
    logprobs, entropy, grad_hidden, grad_weight = values_and_gradients(
        linear_logprob, hidden, weight, torch.tensor([0]), torch.ones(2, 1)
    )
    assert (logprobs.item(), entropy.item()) == pytest.approx((-math.log(2), math.log(2)), abs=1e-6)
    assert grad_hidden.isfinite().all() and grad_weight.isfinite().all()


# Types, and what takes a gradient.


@pytest.mark.parametrize(
    "hidden_dtype,weight_dtype,expected",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float32),
    ],
    ids=str,
)
def test_outputs_are_float32_or_float64_and_gradients_have_the_type_of_their_input(
    hidden_dtype, weight_dtype, expected
):
    hidden, weight, targets, upstream = inputs(6, 4, 5)
    results = values_and_gradients(
        linear_logprob, hidden.to(hidden_dtype), weight.to(weight_dtype), targets, upstream, chunk=4
    )
    assert [result.dtype for result in results] == [expected, expected, hidden_dtype, weight_dtype]


def test_low_precision_inputs_are_multiplied_in_float32():
    hidden, weight, targets, upstream = inputs(64, 96, 300)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logprobs, entropy, *gradients = values_and_gradients(linear_logprob, hidden, weight, targets, upstream, chunk=8)
    truth = values_and_gradients(dense, hidden.double(), weight.double(), targets, upstream)
    torch.testing.assert_close(logprobs.double(), truth[0], rtol=0, atol=1e-4)  # bfloat16 logits are 0.1 nat off
    torch.testing.assert_close(entropy.double(), truth[1], rtol=0, atol=1e-4)
    for gradient, exact in zip(gradients, truth[2:], strict=True):  # rounded once to bfloat16's 8 bits
        torch.testing.assert_close(gradient.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_any_type_of_integer_serves_as_target(dtype):
    hidden, weight, targets, upstream = inputs(8, 3, 5, ignored=0.0)
    expected = values_and_gradients(linear_logprob, hidden, weight, targets, upstream)
    results = values_and_gradients(linear_logprob, hidden, weight, targets.to(dtype), upstream)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


@pytest.mark.parametrize(("dtype", "target", "ignore_index"), [(torch.uint8, 156, -100), (torch.int8, 100, 356)])
def test_a_target_equal_to_ignore_index_in_its_last_8_bits_alone_is_scored(dtype, target, ignore_index):
    hidden, weight, _, _ = inputs(3, 4, 200, ignored=0.0)
    wide = torch.tensor([target, 1, 2])
    results = linear_logprob(hidden, weight, wide.to(dtype), ignore_index=ignore_index)
    expected = linear_logprob(hidden, weight, wide)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert results[0][0] < -0.1


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, weight, targets, upstream = inputs(9, 4, 6)
    expected = values_and_gradients(linear_logprob, hidden, weight, targets, upstream)
    leaves = {"hidden": hidden.requires_grad_(frozen != "hidden"), "weight": weight.requires_grad_(frozen != "weight")}
    torch.autograd.backward(linear_logprob(**leaves, targets=targets), list(upstream))
    assert leaves.pop(frozen).grad is None
    ((other, leaf),) = leaves.items()
    assert torch.equal(leaf.grad, expected[2 if other == "hidden" else 3])


def test_without_gradients_the_result_has_no_graph():
    hidden, weight, targets, _ = inputs(4, 3, 5)
    with torch.no_grad():
        logprobs, entropy = linear_logprob(hidden, weight.requires_grad_(), targets)
    assert not logprobs.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("output", [0, 1], ids=["log-prob", "entropy"])
def test_a_second_derivative_is_an_error_instead_of_wrong(output):
    hidden, weight, targets, _ = inputs(4, 3, 5, ignored=0.0)
    hidden.requires_grad_()
    loss = linear_logprob(hidden, weight, targets)[output].sum()  # linear: autograd itself would not notice
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("keep", [0, 2**30])
def test_a_second_backward_adds_the_same_also_after_kept_logits_are_gone(keep):
    hidden, weight, targets, upstream = inputs(40, 4, 6)
    hidden.requires_grad_()
    outputs = linear_logprob(hidden, weight, targets, chunk=16, keep_logits_bytes=keep)
    torch.autograd.backward(outputs, list(upstream), retain_graph=True)
    once = hidden.grad.clone()
    torch.autograd.backward(outputs, list(upstream))
    assert torch.equal(hidden.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        outputs[0].sum().backward()


# The softcap, the exact KL, and the dial.


@pytest.mark.parametrize("softcap", [2.0, 30.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_softcap_bounds_the_logits_before_the_temperature_divides_them(softcap, temperature):
    arguments = inputs(17, 24, 257)
    options = {"softcap": softcap, "temperature": temperature}

    def capped(h, w, t):
        logits = softcap * torch.tanh(h @ w.T / softcap)
        return dense(logits, torch.eye(257, dtype=torch.float64), t, temperature)

    result = values_and_gradients(linear_logprob, *arguments, chunk=5, **options)
    assert_all_close(result, values_and_gradients(capped, *arguments), 1e-12)
    assert torch.autograd.gradcheck(
        lambda h: linear_logprob(h, arguments[1], arguments[2], **options), arguments[0].requires_grad_()
    )


def pair(N: int = 20, V: int = 33, dtype=torch.float64):
    hidden, weight, targets, upstream = inputs(N, 7, V, dtype)
    ref_hidden, ref_weight, _, _ = inputs(N, 5, V, dtype, seed=1)  # the reference may be a narrower model
    return hidden, weight, ref_hidden, ref_weight, targets, upstream


@pytest.mark.parametrize("chunk", [3, 16, 512])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.3}], ids=str)
def test_the_exact_kl_and_its_gradients_equal_the_dense_definition(options, chunk):
    hidden, weight, ref_hidden, ref_weight, targets, upstream = pair()

    def kl(h, w, t, **more):
        return (linear_kl(h, w, ref_hidden, ref_weight, t, chunk=chunk, **options),) * 2

    def dense_kl(h, w, t):
        return (reference.linear_logprob(h, w, t, ref_hidden=ref_hidden, ref_weight=ref_weight, **options)[2],) * 2

    arguments = hidden, weight, targets, upstream
    assert_all_close(values_and_gradients(kl, *arguments), values_and_gradients(dense_kl, *arguments), 1e-12)


def test_the_exact_kl_passes_the_check_by_finite_differences_and_asks_for_no_targets():
    hidden, weight, ref_hidden, ref_weight, *_ = pair(4, 6)
    ref_hidden.requires_grad_()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: linear_kl(h, w, ref_hidden, ref_weight, softcap=3.0), leaves)
    linear_kl(*leaves, ref_hidden, ref_weight).sum().backward()
    assert ref_hidden.grad is None  # the reference is held fixed


def test_kl_to_itself_is_0_and_so_is_its_gradient():
    hidden, weight, _, _, targets, _ = pair(dtype=torch.float32)
    leaf = hidden.clone().requires_grad_()
    kl = linear_kl(leaf, weight, hidden, weight, targets, temperature=0.7)
    kl.sum().backward()
    assert kl.abs().max() < 1e-6 and leaf.grad.abs().max() < 1e-6


def test_log_prob_entropy_and_kl_in_one_pass_are_what_each_is_alone():
    hidden, weight, ref_hidden, ref_weight, targets, _ = pair()
    logprobs, entropy, kl = linear_logprob(hidden, weight, targets, reference=(ref_hidden, ref_weight))
    assert torch.equal(torch.stack([logprobs, entropy]), torch.stack(linear_logprob(hidden, weight, targets)))
    assert torch.equal(kl, linear_kl(hidden, weight, ref_hidden, ref_weight, targets))
    assert (kl[targets == IGNORE] == 0).all() and (kl[targets != IGNORE] > 0).all()


def test_a_reference_of_another_vocabulary_is_an_error_that_shows_both():
    hidden, weight, ref_hidden, ref_weight, *_ = pair()
    with pytest.raises(ValueError, match="33 and 32 words"):
        linear_kl(hidden, weight, ref_hidden, ref_weight[:-1])


@pytest.mark.parametrize("keep", [0, 4 * 16 * 257 * 2, 2**30], ids=["none kept", "two chunks kept", "all kept"])
def test_kept_logits_change_no_bit_and_save_a_matrix_product_each(keep, monkeypatch):
    arguments = inputs(70, 24, 257, torch.float32, ignored=0.0)
    expected = values_and_gradients(linear_logprob, *arguments, chunk=16, keep_logits_bytes=2**30)
    products, product = [], kernels.linear.product
    monkeypatch.setattr(kernels.linear, "product", lambda *rest: products.append(1) or product(*rest))
    results = values_and_gradients(linear_logprob, *arguments, chunk=16, keep_logits_bytes=keep)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert len(products) == {0: 10, 2**30: 5}.get(keep, 8)


def test_nothing_is_kept_where_no_gradient_is_taken():
    hidden, weight, targets, _ = inputs(2048, 8, 512, torch.float32)
    with torch.no_grad(), Allocations() as seen:
        linear_logprob(hidden, weight, targets, chunk=64, keep_logits_bytes=2**40)
    assert seen.peak < 4 * 2048 * 512 / 4


# Bits. A library multiplies a few rows, or the odd one behind the last tile, in another order.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("D,V", [(96, 20), (32, 257), (64, 1000)])
def test_a_row_has_the_same_bits_whatever_the_chunk_and_the_rows_beside_it(D, V, dtype):
    hidden, weight, targets, upstream = inputs(600, D, V, dtype, ignored=0.1)
    of_rows = values_and_gradients(linear_logprob, hidden, weight, targets, upstream)[:3]
    for chunk in (1, 16, 32, 100, 1024):
        others = values_and_gradients(linear_logprob, hidden, weight, targets, upstream, chunk=chunk)[:3]
        assert all(torch.equal(one, other) for one, other in zip(of_rows, others, strict=True)), chunk
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    for some in (order[:1], order[:3], order[:17], order[:555]):
        others = values_and_gradients(linear_logprob, hidden[some], weight, targets[some], upstream[:, some])[:3]
        assert all(torch.equal(one[some], other) for one, other in zip(of_rows, others, strict=True)), len(some)


def test_the_result_does_not_hang_on_what_memory_held():
    arguments = inputs(20, 6, 9, torch.float32)
    expected = values_and_gradients(linear_logprob, *arguments)
    torch.use_deterministic_algorithms(True)  # fills new, empty tensors with NaN
    try:
        results = values_and_gradients(linear_logprob, *arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_targets_and_upstream_gradients_may_be_slices_of_something_else():
    hidden, weight, targets, upstream = inputs(20, 4, 6)
    expected = values_and_gradients(linear_logprob, hidden, weight, targets, upstream)
    wide = torch.stack([targets, targets], 1)[:, 1]
    strided = torch.stack([upstream, upstream], -1)[..., 1]
    results = values_and_gradients(linear_logprob, hidden, weight, wide, strided)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_the_products_of_a_gpu_in_bfloat16_sum_in_float32_on_shapes_with_a_gap_behind_each_row():
    """Nothing is computed on this device, but shapes and types are checked as on a GPU."""
    hidden = torch.empty(16, 8, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(100, 8, dtype=torch.bfloat16, device="meta")
    space = torch.empty(16, 128, dtype=torch.float32, device="meta")[:, :100]
    logits = kernels.linear.product(hidden, weight, 16, space)
    assert logits.dtype == torch.float32 and logits.shape == (16, 100) and logits.stride() == (128, 1)
    grad = torch.empty(16, 128, dtype=torch.bfloat16, device="meta")[:, :100]
    total = torch.empty(100, 8, device="meta")
    kernels.linear.add_product(grad.T, hidden, total)
    assert total.shape == (100, 8) and total.dtype == torch.float32


@pytest.mark.parametrize(
    "device,dtype,triton,level,said",
    [
        ("cpu", torch.float32, object(), "INFO", "Triton has no cpu"),
        ("cpu", torch.float32, None, "INFO", "triton is not installed"),
        ("mps", torch.float32, object(), "WARNING", "Triton has no mps"),
        ("cuda", torch.float32, None, "WARNING", "triton is not installed"),
        ("cuda", torch.float64, object(), "WARNING", "not in torch.float64"),
        ("cuda", torch.bfloat16, object(), None, ""),
    ],
)
def test_where_triton_cannot_serve_torch_does_and_says_so_once(monkeypatch, caplog, device, dtype, triton, level, said):
    class Somewhere(NamedTuple):
        device: torch.device
        dtype: torch.dtype

    monkeypatch.setattr(backend, "triton", triton)
    monkeypatch.setattr(backend, "said", set())
    monkeypatch.setattr(backend, "INTERPRETED", False)
    with caplog.at_level("INFO", logger="kernels"):
        answers = [backend.use_triton(Somewhere(torch.device(device), dtype)) for _ in range(3)]
    assert answers == [level is None] * 3
    assert [record.levelname for record in caplog.records] == [level] * (level is not None)
    assert said in caplog.text


# Errors.


@pytest.mark.parametrize("wrong", [0.0, -30.0, math.nan, math.inf])
def test_a_softcap_that_is_not_positive_and_finite_is_an_error_that_shows_it(wrong):
    with pytest.raises(ValueError, match=f"softcap must be positive and finite, or None for no cap, not {wrong}"):
        linear_logprob(torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3).long(), softcap=wrong)


@pytest.mark.parametrize("hidden,weight", [((4, 3), (5, 2)), ((4,), (5, 4)), ((2, 4, 3), (5, 3)), ((4, 3), (3,))])
def test_wrong_shapes_are_an_error_that_says_what_was_expected(hidden, weight):
    with pytest.raises(ValueError, match=r"expected hidden \(N, D\) and weight \(V, D\), got"):
        linear_logprob(torch.zeros(hidden), torch.zeros(weight), torch.zeros(hidden[0], dtype=torch.long))


@pytest.mark.parametrize(
    "targets", [torch.zeros(3).long(), torch.zeros(4, 1).long(), torch.zeros(4), torch.zeros(4) * 1j]
)
def test_wrong_targets_are_an_error_that_says_what_was_expected(targets):
    with pytest.raises(ValueError, match="expected 4 integer targets, got"):
        linear_logprob(torch.zeros(4, 3), torch.zeros(5, 3), targets)


@pytest.mark.parametrize("wrong", [5, 1000, -1, -99])
def test_a_target_outside_the_vocabulary_is_an_error_that_shows_it(wrong):
    with pytest.raises(ValueError, match=rf"targets must lie in \[0, 5\) or be -100; got .*{wrong}"):
        linear_logprob(torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([2, wrong, IGNORE]))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_an_error_that_shows_it(wrong):
    with pytest.raises(ValueError, match=f"temperature must be positive, not {wrong}"):
        linear_logprob(torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3).long(), temperature=wrong)


@pytest.mark.parametrize("wrong", [0, -8])
def test_a_chunk_of_no_token_is_an_error_that_shows_it(wrong):
    with pytest.raises(ValueError, match=f"chunk must be at least 1 token, not {wrong}"):
        linear_logprob(torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3).long(), chunk=wrong)


# Trap H.1: memory.


def allocations(function, N: int, D: int, V: int, **options) -> Allocations:
    hidden, weight, targets, upstream = inputs(N, D, V, torch.float32)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with Allocations() as seen:
        torch.autograd.backward(function(hidden, weight, targets, **options), list(upstream))
    assert hidden.grad is not None and weight.grad is not None
    return seen


def test_trap_h1_no_tensor_of_all_logits_is_ever_made_forward_or_backward():
    N, D, V = 4096, 8, 512
    assert allocations(dense, N, D, V).largest >= N * V  # the watch sees such a tensor where there is one
    assert allocations(linear_logprob, N, D, V).largest <= kernels.linear.CHUNK_TOKENS * V
    assert allocations(linear_logprob, N, D, V, chunk=64).largest <= max(64 * V, N * D)


def test_trap_h1_chunks_do_not_pile_up():
    N, D, V, chunk = 4096, 8, 512, 64
    logits = 4 * N * V  # bytes
    assert allocations(dense, N, D, V).peak > 2 * logits
    assert allocations(linear_logprob, N, D, V, chunk=chunk).peak < logits / 4


def tiny_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=512, width=8, layers=1, heads=1, max_context=64))


def rollout_of(prompts: list[list[int]], lengths: list[int]) -> Rollout:
    return Rollout.from_responses(prompts, [[(3 * t + 1) % 512 for t in range(n)] for n in lengths])


def test_trap_h1_only_response_positions_reach_the_head(monkeypatch):
    rows_of_calls, rows_of_products = [], []

    def spy(hidden, *arguments, **options):
        rows_of_calls.append(len(hidden))
        return linear_logprob(hidden, *arguments, **options)

    product = kernels.linear.product

    def spy_on_products(hidden, *arguments):
        rows_of_products.append(len(hidden))
        return product(hidden, *arguments)

    monkeypatch.setattr(nanorl.scorer, "linear_logprob", spy)
    monkeypatch.setattr(kernels.linear, "product", spy_on_products)
    rollout = rollout_of([[1] * 30, [2] * 7, [3] * 20], [4, 9, 1])
    rollout.mask[1, 3:5] = False  # tokens an environment inserted
    nanorl.scorer.score(tiny_model(), rollout)
    assert rows_of_calls == [3 * 9]  # B x T: of 34 positions a row, prompt included, the 9 of the response
    assert rows_of_products == [4 + 7 + 1]  # and of those no padding, no inserted token


def test_trap_h1_a_group_in_micro_batches_of_one_needs_the_memory_of_one_row():
    model, rollout = tiny_model(), rollout_of([[1, 2, 3]] * 32, [40] * 32)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)

    def peak(rollout: Rollout, size: int | None) -> int:
        with Allocations() as seen:
            for part in rollout.split(size):
                logprobs, entropy = nanorl.scorer.score(model, part)
                (logprobs.sum() + entropy.sum()).backward()
                del logprobs, entropy
        return seen.peak

    one = peak(rollout.select([0]), 1)
    assert peak(rollout, 1) < 1.2 * one
    assert peak(rollout, None) > 3 * one  # the watch sees the group where it is scored at once


def test_trap_h1_a_grpo_step_at_50257_words_never_makes_a_tensor_of_all_logits():
    B, T, V = 4, 150, 50257
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=V, width=32, layers=1, heads=2, max_context=T + 8))
    rollout = Rollout.from_responses([[1, 2, 3]] * B, [[(7 * t + b) % V for t in range(T)] for b in range(B)])
    with Allocations() as seen:
        logprobs, entropy = nanorl.scorer.score(model, rollout)
        loss, _ = grpo_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -1.0, 0.5, -0.5]), rollout.mask)
        (loss - 0.01 * entropy.mean()).backward()
    assert model.head.grad.abs().sum() > 0
    assert seen.largest <= kernels.linear.CHUNK_TOKENS * V < B * T * V


def test_trap_h1_at_50257_words_the_peak_is_at_most_a_tenth_of_dense(monkeypatch):
    """On a device that computes nothing; which rows have a target cannot be asked there."""
    N, D, V = 4096, 256, 50257
    monkeypatch.setattr(kernels.rows, "CACHE_LOGITS", 2**21)  # fewer steps here; it costs more memory than the default
    monkeypatch.setattr(
        kernels.linear, "scored_rows", lambda hidden, weight, targets, *_: (torch.arange(N, device="meta"), targets)
    )
    hidden, weight = torch.empty(N, D, device="meta"), torch.empty(V, D, device="meta")
    targets, upstream = torch.empty(N, dtype=torch.long, device="meta"), torch.empty(2, N, device="meta")

    def peak(function) -> int:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with Allocations() as seen:
            logprobs, entropy = function(*leaves)
            torch.autograd.backward([logprobs, entropy], list(upstream))
        return seen.peak

    def plain(hidden, weight):
        logprobs = (hidden @ weight.T).log_softmax(-1)
        return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)

    assert 0 < 10 * peak(lambda *leaves: linear_logprob(*leaves, targets)) <= peak(plain)
