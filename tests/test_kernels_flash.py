"""The fused head that writes no logit: in Triton's interpreter against float64, and its merge step in torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from kernel_matrix import cases

from kernels import backend, flash, flash_logprob, linear_logprob, reference
from kernels.flash import FlashLogprob, merge

interpreted = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is not written is NaN, and a small vocabulary too has several stripes, tiles and slabs."""
    torch.use_deterministic_algorithms(True)  # fills new, empty tensors
    monkeypatch.setattr(flash, "STRIPE", 128)
    monkeypatch.setattr(flash, "SLAB", 128)
    monkeypatch.setattr(flash, "TILES", dict.fromkeys((torch.float32, torch.bfloat16), (16, 64, 32, 4, 2)))
    yield
    torch.use_deterministic_algorithms(False)


class FlashCase(NamedTuple):
    V: int
    N: int
    D: int
    kind: str
    temperature: float
    softcap: float | None
    upstream: str


AXES = FlashCase(
    V=(1, 2, 127, 257, 1000),
    N=(0, 1, 17, 40),
    D=(1, 40, 64),
    kind=("plain", "-inf", "huge"),
    temperature=(0.3, 0.7, 1.0, 1.3),
    softcap=(None, 3.0),
    upstream=("both", "log-prob", "entropy"),
)


def inputs(N: int, D: int, V: int, kind: str = "plain", dtype=torch.float32):
    generator = torch.Generator().manual_seed(V + D)
    hidden, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator) / D**0.5
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::5] = -100
    hidden[::5] = math.nan
    if kind == "-inf":  # the product overflows: in words of whole tiles and stripes, never in the last
        hidden[:, 0] = 1e20
        weight[:, 0] = 0.0
        weight[: 3 * V // 4, 0] = -1e20 * (V > 2)
    elif kind == "huge":
        hidden *= 1e30
    if kind == "-inf" and V > 2:
        targets[targets >= 0] = V - 1
    upstream = torch.randn(2, 2 * N, generator=generator)[:, ::2]
    return hidden.to(dtype), weight.to(dtype), targets, upstream


def values_and_gradients(function, hidden, weight, targets, upstream, dtype=None, used="both", **options):
    hidden = hidden.detach().to(dtype or hidden.dtype, copy=True).requires_grad_()
    weight = weight.detach().to(dtype or weight.dtype, copy=True).requires_grad_()
    values = function(hidden, weight, targets, **options)[:2]
    chosen = {"both": slice(2), "log-prob": slice(1), "entropy": slice(1, 2)}[used]
    torch.autograd.backward(values[chosen], [g.to(values[0].dtype) for g in upstream[chosen]])
    return [*(value.detach() for value in values), hidden.grad, weight.grad]


@interpreted
@pytest.mark.parametrize("case", cases(AXES), ids=lambda case: "|".join(map(str, case)))
def test_values_and_gradients_agree_with_float64(case):
    hidden, weight, targets, upstream = inputs(case.N, case.D, case.V, case.kind)
    options = {"used": case.upstream, "temperature": case.temperature, "softcap": case.softcap}
    results = values_and_gradients(flash_logprob, hidden, weight, targets, upstream, **options)
    expected = values_and_gradients(
        reference.linear_logprob, hidden, weight, targets, upstream, torch.float64, **options
    )
    for name, result, exact in zip(("log-prob", "entropy", "d hidden", "d weight"), results, expected, strict=True):
        scale = exact.abs().max().clamp(min=1) if exact.numel() else 1.0
        torch.testing.assert_close(
            result.double() / scale, exact / scale, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@interpreted
def test_a_row_has_the_same_bits_whatever_stands_beside_it():
    hidden, weight, _, _ = inputs(37, 40, 257)
    hidden[::5] = 1.0
    targets = torch.arange(37)
    whole = flash_logprob(hidden, weight, targets)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))[:20]
    for value, of_some in zip(whole, flash_logprob(hidden[order], weight, targets[order]), strict=True):
        assert torch.equal(value[order], of_some)


@interpreted
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, weight, targets, upstream = inputs(9, 5, 130)
    expected = values_and_gradients(flash_logprob, hidden, weight, targets, upstream)
    leaves = {"hidden": hidden.requires_grad_(frozen != "hidden"), "weight": weight.requires_grad_(frozen != "weight")}
    torch.autograd.backward(flash_logprob(**leaves, targets=targets), list(upstream))
    assert leaves.pop(frozen).grad is None
    ((other, leaf),) = leaves.items()
    assert torch.equal(leaf.grad, expected[2 if other == "hidden" else 3])


@interpreted
def test_a_second_backward_adds_the_same_and_a_second_derivative_is_an_error():
    hidden, weight, targets, upstream = inputs(9, 5, 130)
    weight.requires_grad_()
    logprobs, _ = flash_logprob(hidden, weight, targets)
    logprobs.backward(upstream[0], retain_graph=True)
    once = weight.grad.clone()
    logprobs.backward(upstream[0], retain_graph=True)
    assert torch.equal(weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(logprobs.sum(), weight, create_graph=True)


@interpreted
@pytest.mark.parametrize("N", [0, 4])
def test_without_a_scored_row_values_and_gradients_are_0(N):
    hidden, weight = torch.full((N, 3), math.nan), torch.ones(130, 3)
    results = values_and_gradients(flash_logprob, hidden, weight, torch.full((N,), -100), torch.ones(2, N))
    assert [tuple(result.shape) for result in results] == [(N,), (N,), (N, 3), (130, 3)]
    assert all((result == 0).all() for result in results)


@interpreted
def test_a_nan_is_reported_in_its_row_alone():
    hidden, weight, _, _ = inputs(4, 5, 130)
    hidden[:] = 1.0
    hidden[2, 1] = math.nan
    for values in flash_logprob(hidden, weight, torch.arange(4)):
        assert values.isnan().tolist() == [False, False, True, False]


@interpreted
def test_bfloat16_is_multiplied_exactly_and_summed_in_float32():
    """What the kernel gets on a GPU; the interpreter's own product would be one of bit patterns."""
    hidden, weight, _, _ = inputs(4, 40, 130)
    hidden[0] = 1.0
    hidden, weight, targets = hidden.bfloat16(), weight.bfloat16(), torch.arange(4)
    with torch.no_grad():
        values = FlashLogprob.apply(hidden, weight, targets, 1.0, None)
    exact = reference.linear_logprob(hidden.double(), weight.double(), targets)
    for value, of_float64 in zip(values, exact[:2], strict=True):
        torch.testing.assert_close(value.double(), of_float64, rtol=1e-5, atol=1e-5)


@interpreted
def test_the_largest_tensor_is_a_slab_of_dlogits():
    N, V = 40, 1000
    sizes = []
    empty = torch.Tensor.new_empty

    def spy(self, *size, **options):
        sizes.append(math.prod(size))
        return empty(self, *size, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", spy)
        values_and_gradients(flash_logprob, *inputs(N, 5, V))
    assert sizes and max(sizes) <= N * flash.SLAB


# In torch.


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_merged_stripes_are_the_whole_vocabulary_also_where_a_stripe_is_all_minus_infinity(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    logits[:, 10:20] = -math.inf
    logits[2, :20] = -math.inf
    states = []
    for stripe in logits.split(10, dim=1):
        m = stripe.amax(1)
        shifted = (stripe - m[:, None]).masked_fill(stripe == -math.inf, -math.inf) / temperature
        e = shifted.exp()
        states.append((m, e.sum(1), (e * shifted.masked_fill(e == 0, 0)).sum(1)))
    m, s, a = merge(*(torch.stack(numbers) for numbers in zip(*states, strict=True)), temperature)
    _, entropy, _ = reference.logprob_entropy_kl(logits / temperature, torch.full((6,), 39))
    assert torch.equal(m, logits.amax(1))
    torch.testing.assert_close(s.log() - a / s, entropy, rtol=1e-12, atol=1e-12)


def test_without_triton_or_a_gpu_the_chunked_path_serves_and_says_so_once(monkeypatch, caplog):
    hidden, weight, targets, upstream = inputs(9, 5, 130)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    for without in (None, backend.triton):
        monkeypatch.setattr(backend, "triton", without)
        monkeypatch.setattr(backend, "said", set())
        caplog.clear()
        with caplog.at_level("INFO", logger="kernels"):
            for _ in range(2):
                results = values_and_gradients(flash_logprob, hidden, weight, targets, upstream, temperature=0.7)
                expected = values_and_gradients(linear_logprob, hidden, weight, targets, upstream, temperature=0.7)
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
        assert len(caplog.messages) == 1 and "torch serves" in caplog.text
