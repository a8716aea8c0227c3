"""The definitions themselves, and the torch path over the whole matrix of cases against them in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from kernel_matrix import AXES, FULL, Case, assert_agree, gradients, make, pairwise, truth

from kernels import linear_logprob, reference, rows


@pytest.fixture(autouse=True)
def poisoned():
    """What is not written is NaN."""
    torch.use_deterministic_algorithms(True)  # fills new, empty tensors
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# The definitions, by hand and by brute force.


def brute_force(x: list[float], y: list[float], target: int) -> tuple[float, float, float]:
    p = [math.exp(value) / sum(map(math.exp, x)) for value in x]
    q = [math.exp(value) / sum(map(math.exp, y)) for value in y]
    return (
        math.log(p[target]),
        -sum(one * math.log(one) for one in p),
        sum(one * math.log(one / other) for one, other in zip(p, q, strict=True)),
    )


def test_log_prob_entropy_and_kl_equal_sums_over_the_vocabulary():
    logits, ref_logits, targets, _ = make("plain", 9, 13)
    values = reference.logprob_entropy_kl(logits.double(), targets, ref_logits.double())
    for i in range(9):
        expected = brute_force(logits[i].tolist(), ref_logits[i].tolist(), targets[i].item())
        assert [value[i].item() for value in values] == pytest.approx(expected, rel=1e-12)


def test_values_worked_out_by_hand():
    logits, ref_logits = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2)  # (1/4, 3/4) against (1/2, 1/2)
    logprob, entropy, kl = reference.logprob_entropy_kl(logits.double(), torch.tensor([0]), ref_logits.double())
    assert logprob.item() == pytest.approx(math.log(1 / 4), abs=1e-7)
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3), abs=1e-7)
    assert kl.item() == pytest.approx(math.log(2) - entropy.item(), abs=1e-7)


def test_kl_of_a_distribution_to_itself_is_0_and_to_one_that_excludes_a_possible_word_infinite():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(3, dtype=torch.long)
    assert (reference.logprob_entropy_kl(logits, targets, logits)[2].abs() < 1e-6).all()
    excluding = logits.clone()
    excluding[1, 2] = -math.inf
    kl = reference.logprob_entropy_kl(logits, targets, excluding)[2]
    assert kl.isinf().tolist() == [False, True, False] and (kl >= -1e-6).all()
    assert reference.logprob_entropy_kl(excluding, targets, logits)[2].isfinite().all()  # 0 times infinity


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_definitions_pass_the_check_by_finite_differences(softcap):
    logits, ref_logits, targets, _ = make("plain", 3, 5)

    def values(x):
        return reference.logprob_entropy_kl(reference.capped(x, softcap) / 0.7, targets, ref_logits.double())

    assert torch.autograd.gradcheck(values, logits.double().requires_grad_())


def test_the_softcap_bounds_logits_and_leaves_small_ones_alone():
    x = torch.tensor([-1e30, -1e-3, 0.0, 1e-3, 1e30, math.inf], dtype=torch.float64)
    assert reference.capped(x, 30.0).tolist() == pytest.approx([-30, -1e-3, 0, 1e-3, 30, 30], abs=1e-12)
    assert reference.capped(x, None) is x


def test_rows_without_a_target_are_0_in_the_definition_and_take_no_part():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 3, generator=generator), torch.randn(5, 3, generator=generator)
    hidden[1] = math.nan
    targets = torch.tensor([0, -100, 4, 2])
    values = reference.linear_logprob(hidden, weight, targets, ref_hidden=hidden, ref_weight=weight)
    assert all(value[1] == 0 and value.isfinite().all() for value in values)
    assert values[2].abs().max() < 1e-6


# The torch path of kernels/rows.py.


@pytest.mark.parametrize("kind", AXES.logits)
@pytest.mark.parametrize("V", AXES.V)
def test_torch_rows_agree_with_float64_in_every_case(V, kind):
    some = V > 1000 and not FULL
    logits, ref_logits, targets, upstream = make(kind, 3 if some else 40, V)
    axes = (AXES.temperature, AXES.softcap, AXES.upstream)
    for temperature, softcap, used in pairwise(axes) if some else itertools.product(*axes):
        case = Case(V, len(logits), kind, temperature, softcap, used)
        values, true_grad = truth(logits, ref_logits, targets, upstream, case)
        for N in (0, 1, 3) if some else AXES.N:
            x, y, t, options = logits[:N], ref_logits[:N], targets[:N], {"temperature": temperature, "softcap": softcap}
            results = rows.rows_forward(x, t, y, **options)
            before = x.clone()
            grad = rows.rows_backward(x, t, results, *gradients(upstream[:, :N], case), y, out=before, **options)
            assert_agree(results, grad, [value[:N] for value in values], true_grad[:N])
            if N:
                again = rows.rows_backward(x.clone(), t, results, *gradients(upstream[:, :N], case), y, **options)
                assert torch.equal(again, grad)  # also when written over the logits


def test_the_matrix_has_every_pair_of_conditions():
    axes = ((1, 2, 3), ("a", "b"), (None, 0.5), (True, False))
    chosen = pairwise(axes)
    assert len(chosen) < 3 * 2 * 2 * 2 / 2
    for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in chosen} == set(itertools.product(one, other))


def test_without_a_reference_the_other_results_are_the_same_bits():
    logits, ref_logits, targets, _ = make("plain", 17, 257)
    assert torch.equal(rows.rows_forward(logits, targets), rows.rows_forward(logits, targets, ref_logits)[:4])


def test_the_definition_and_the_chunked_path_agree_on_hidden_states_and_heads():
    generator = torch.Generator().manual_seed(0)
    hidden, ref_hidden = torch.randn(2, 40, 7, generator=generator, dtype=torch.float64)
    weight, ref_weight = torch.randn(2, 33, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 33, (40,), generator=generator)
    targets[::4] = -100
    options = {"temperature": 0.7, "softcap": 2.0}
    expected = reference.linear_logprob(
        hidden, weight, targets, ref_hidden=ref_hidden, ref_weight=ref_weight, **options
    )
    for chunk in (16, 512):
        values = linear_logprob(hidden, weight, targets, reference=(ref_hidden, ref_weight), chunk=chunk, **options)
        for value, truth_ in zip(values, expected, strict=True):
            torch.testing.assert_close(value, truth_, rtol=1e-12, atol=1e-12)
