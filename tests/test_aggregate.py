"""The means behind every loss: the same number and gradient for any padding, micro-batch, accumulation and rank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanorl.losses.aggregate import constant_mean, masked, sequence_count, sequence_mean, token_count, token_mean

MAX_LENGTH = 7  # the constant divisor of Dr. GRPO in these tests


def constant(values: Tensor, mask: Tensor, denominator: float | None = None) -> Tensor:
    return constant_mean(values, mask, MAX_LENGTH, denominator)


MEANS = {  # name -> the mean, and what it counts
    "token": (token_mean, token_count),
    "sequence": (sequence_mean, sequence_count),
    "constant": (constant, sequence_count),
}
every_mean = pytest.mark.parametrize("mean,count", MEANS.values(), ids=MEANS)
GARBAGE = st.sampled_from([0.0, 1.0, -3.5, 1e30, math.inf, -math.inf, math.nan])


def ragged(lengths: list[int], width: int | None = None) -> Tensor:
    """(B, T) mask of responses of these lengths."""
    return torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]


def random_batch(seed: int, lengths: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Values (B, T) and a mask with holes in it, as environment tokens make them."""
    generator = torch.Generator().manual_seed(seed)
    mask = ragged(lengths, max(*lengths, 1))
    mask = mask & (torch.rand(mask.shape, generator=generator) < 0.8)
    return torch.randn(mask.shape, generator=generator, dtype=dtype), mask


def value_and_gradient(mean, values: Tensor, mask: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    values = values.clone().requires_grad_()
    result = mean(values, mask, *arguments)
    result.backward()
    return result.detach(), values.grad


# Trap A.1: lengths 2 and 6, advantages +1 and -1, every ratio 1.
A1_MASK = ragged([2, 6])
A1_ADVANTAGES = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)


def a1_policy_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-r A with r = 1: the per-token loss on the policy that sampled."""
    return -(logprobs - logprobs.detach()).exp() * advantages


@pytest.mark.parametrize("copies,parts", [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4)])
def test_trap_a1_token_mean_is_the_same_for_any_micro_batch_and_accumulation(copies, parts):
    mask = A1_MASK.repeat(copies, 1)
    advantages = A1_ADVANTAGES.repeat(copies, 1)
    logprobs = torch.full(mask.shape, -1.3, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for rows in torch.arange(len(mask)).chunk(parts):
        loss = token_mean(a1_policy_loss(logprobs[rows], advantages[rows]), mask[rows], denominator=token_count(mask))
        loss.backward()  # gradients of the parts accumulate
        total += loss.item()
    assert total == pytest.approx(0.5, abs=1e-12)
    by_hand = torch.tensor([[-0.125] * 2 + [0.0] * 4, [0.125] * 6], dtype=torch.float64) / copies
    torch.testing.assert_close(logprobs.grad, by_hand.repeat(copies, 1), rtol=0, atol=1e-12)


def test_trap_a1_the_mean_of_micro_batch_means_is_another_number():
    values = a1_policy_loss(torch.zeros(A1_MASK.shape, dtype=torch.float64), A1_ADVANTAGES)
    naive = [token_mean(values[row], A1_MASK[row]).item() for row in ([0], [1])]
    assert sum(naive) / 2 == 0.0  # short responses get extra weight; the right answer is 0.5
    assert token_mean(values, A1_MASK).item() == 0.5


def test_trap_a1_two_ranks_of_different_token_counts_agree_with_one():
    ranks = [
        (torch.full((2, 5), 1.0, dtype=torch.float64), ragged([5, 5])),
        (torch.full((1, 5), 4.0, dtype=torch.float64), ragged([2], 5)),
    ]
    tokens = sum(token_count(mask) for _, mask in ranks)  # what the ranks would sum over the network
    assert tokens == 12
    parts = [value_and_gradient(token_mean, values, mask, tokens) for values, mask in ranks]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(1.5, abs=1e-12)  # the mean of means would be 2.5
    for (_, gradient), (_, mask) in zip(parts, ranks, strict=True):
        torch.testing.assert_close(gradient, mask.double() / 12, rtol=0, atol=1e-12)


@every_mean
@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_trap_a1_any_partition_of_rows_adds_up_to_the_whole(mean, count, seed, lengths):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        values, mask = random_batch(seed, lengths, dtype)
        whole, gradient = value_and_gradient(mean, values, mask)
        denominator = max(count(mask), 1)
        for size in (1, 2, 4, len(values)):
            pieces = zip(values.split(size), mask.split(size), strict=True)
            parts = [value_and_gradient(mean, *piece, denominator) for piece in pieces]
            torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=0, atol=tolerance)
            torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient, rtol=0, atol=tolerance)


# Trap A.2: per-token losses [1, 1, 1, 1] and [3].
A2_VALUES = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
A2_MASK = ragged([4, 1])
A2_CASES = {  # name -> (mean, its value, its derivative by a token of row 1 and of row 2)
    "token": (lambda v, m: token_mean(v, m), 1.4, 1 / 5, 1 / 5),
    "sequence": (lambda v, m: sequence_mean(v, m), 2.0, 1 / 8, 1 / 2),
    "sum": (lambda v, m: constant_mean(v, m, 1), 3.5, 1 / 2, 1 / 2),  # the mean over sequences of token sums
    "constant": (lambda v, m: constant_mean(v, m, 4), 0.875, 1 / 8, 1 / 8),
}


@pytest.mark.parametrize("pad", [0.0, 9.0, math.inf, math.nan])
@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("mean,expected,first,second", A2_CASES.values(), ids=A2_CASES)
def test_trap_a2_the_four_means_differ_and_none_sees_the_padding(mean, expected, first, second, columns, pad):
    values = torch.cat([A2_VALUES, torch.full((2, columns), pad, dtype=torch.float64)], 1)
    mask = torch.cat([A2_MASK, torch.zeros(2, columns, dtype=torch.bool)], 1)
    loss, gradient = value_and_gradient(mean, values, mask)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    by_hand = torch.tensor([[first] * 4, [second, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(gradient[:, :4], by_hand, rtol=0, atol=1e-12)
    assert (gradient[:, 4:] == 0).all()


@every_mean
@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    columns=st.integers(0, 4),
    garbage=GARBAGE,
)
def test_trap_a2_padding_of_any_width_and_content_changes_no_mean_and_no_gradient(
    mean, count, seed, lengths, columns, garbage
):
    values, mask = random_batch(seed, lengths)
    B, T = values.shape
    wide_mask = torch.cat([mask, torch.zeros(B, columns, dtype=torch.bool)], 1)
    wide = torch.cat([values, torch.zeros(B, columns)], 1).masked_fill(~wide_mask, garbage)
    assert count(wide_mask) == count(mask)
    loss, gradient = value_and_gradient(mean, values, mask)
    wide_loss, wide_gradient = value_and_gradient(mean, wide, wide_mask)
    torch.testing.assert_close(wide_loss, loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(wide_gradient[:, :T], gradient, rtol=0, atol=1e-14)
    assert (wide_gradient[~wide_mask] == 0).all()


@every_mean
@settings(derandomize=True, deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_a_row_without_trainable_tokens_is_in_no_denominator(mean, count, seed, lengths):
    values, mask = random_batch(seed, lengths)
    with_empty = torch.cat([values, torch.full((2, values.shape[1]), 5.0)])
    empty_mask = torch.cat([mask, torch.zeros(2, mask.shape[1], dtype=torch.bool)])
    torch.testing.assert_close(mean(with_empty, empty_mask), mean(values, mask), rtol=0, atol=1e-14)


def test_denominator_counts_empty_rows_when_the_caller_wants_it():
    mask = torch.tensor([[1, 1], [0, 0]])
    values = torch.tensor([[1.0, 3.0], [7.0, 7.0]])
    assert sequence_mean(values, mask).item() == 2.0
    assert sequence_mean(values, mask, denominator=2).item() == 1.0
    assert constant_mean(values, mask, 4).item() == 1.0
    assert constant_mean(values, mask, 4, denominator=2).item() == 0.5


def test_counts_are_of_trainable_tokens_and_of_rows_that_have_one():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    assert (token_count(mask), sequence_count(mask)) == (3, 2)
    assert (token_count(mask[1:2]), sequence_count(mask[1:2])) == (0, 0)


@every_mean
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
def test_a_batch_without_trainable_tokens_has_loss_and_gradient_0(mean, count, shape):
    values = torch.full(shape, math.nan, requires_grad=True)
    loss = mean(values, torch.zeros(shape))
    loss.backward()
    assert loss.item() == 0.0
    assert (values.grad == 0).all()


@every_mean
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32, torch.float64])
def test_any_type_of_mask_gives_the_same_mean(mean, count, dtype):
    values, mask = random_batch(3, [4, 2, 0, 3], torch.float32)
    assert mean(values, mask.to(dtype)).item() == mean(values, mask).item()
    assert count(mask.to(dtype)) == count(mask)


@every_mean
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float64])
def test_means_keep_the_type_of_the_values(mean, count, dtype, mask_dtype):
    values, mask = random_batch(0, [3, 1], dtype)
    assert mean(values, mask.to(mask_dtype)).dtype == dtype
    assert mean(values, mask.to(mask_dtype), 2).dtype == dtype


@every_mean
@pytest.mark.parametrize("wrong", [0, -1, -0.5, math.nan])
def test_a_denominator_that_is_not_positive_is_an_error_that_shows_it(mean, count, wrong):
    values, mask = random_batch(0, [3, 1])
    with pytest.raises(ValueError, match=f"denominator must be positive and finite, not {wrong}"):
        mean(values, mask, wrong)


@pytest.mark.parametrize("wrong", [0, -4])
def test_a_max_length_below_one_token_is_an_error_that_shows_it(wrong):
    values, mask = random_batch(0, [3, 1])
    with pytest.raises(ValueError, match=f"max_length must be at least 1 token, not {wrong}"):
        constant_mean(values, mask, wrong)


@every_mean
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_trap_a5_a_broken_value_under_the_mask_is_seen_and_one_outside_is_not(mean, count, broken):
    values, mask = random_batch(1, [3, 3])
    mask = ragged([3, 2])
    values[1, 2] = broken
    assert mean(values, mask).isfinite()
    values[1, 1] = broken
    assert not mean(values, mask).isfinite()


def test_masked_puts_zeros_where_the_mask_is_0():
    values = torch.tensor([[1.0, math.nan, math.inf, -2.0]])
    assert masked(values, torch.tensor([[1, 0, 0, 1]])).tolist() == [[1.0, 0.0, 0.0, -2.0]]
