"""The quantiles are those of the printed tables, and the intervals hold the truth as often as they say."""

import math

import pytest
import torch

from nanorl.intervals import mean_and_half, student_t

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 19: 2.0930, 30: 2.0423, 100: 1.9840}


@pytest.mark.parametrize("degrees", TABLE)
def test_the_quantile_of_students_t_is_that_of_the_table(degrees):
    assert student_t(degrees) == pytest.approx(TABLE[degrees], abs=6e-5)


def test_the_interval_by_hand():
    mean, half = mean_and_half([1.0, 2.0, 6.0])  # standard deviation sqrt(7)
    assert (mean.item(), half.item()) == pytest.approx((3.0, 4.3027 * math.sqrt(7 / 3)), rel=2e-5)


def test_of_a_curve_every_point_has_its_interval():
    mean, half = mean_and_half([[1.0, 5.0], [3.0, 5.0]])
    assert mean.tolist() == [2.0, 5.0] and half.tolist() == pytest.approx([12.7062, 0.0], rel=1e-5)


def test_one_seed_has_no_interval():
    mean, half = mean_and_half([0.7])
    assert mean.item() == pytest.approx(0.7) and math.isnan(half.item())


def test_of_5000_experiments_with_four_seeds_95_in_100_intervals_hold_the_truth():
    values = 0.3 + torch.randn(4, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, half = mean_and_half(values)
    assert ((mean - 0.3).abs() <= half).double().mean().item() == pytest.approx(0.95, abs=0.01)
