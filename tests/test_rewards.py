"""Rewards that are programs."""

import pytest
import torch

from nanorl.rewards.overlong import overlong_penalty


def test_the_overlong_penalty_is_that_of_dapos_equation_13():
    # DAPO's own numbers: 20,480 tokens, the last 4,096 of which are the buffer.
    lengths = torch.tensor([1, 16_384, 17_408, 18_432, 20_480])
    penalties = overlong_penalty(lengths, 20_480, 4_096)
    assert penalties.tolist() == [0, 0, -0.25, -0.5, -1]


def test_the_buffer_is_a_tenth_of_the_limit_and_at_least_a_token():
    assert overlong_penalty(torch.tensor([90, 95, 100]), 100).tolist() == [0, -0.5, -1]
    assert overlong_penalty(torch.tensor([3, 4]), 4).tolist() == [0, -1]


@pytest.mark.parametrize("buffer", [0, 9, -1])
def test_a_buffer_that_does_not_fit_is_an_error(buffer):
    with pytest.raises(ValueError, match="1 to 8 tokens"):
        overlong_penalty(torch.tensor([1]), 8, buffer)
