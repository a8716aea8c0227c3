"""For each loss a batch on which it differs from GRPO, worked out by hand, and one on which theory says it is GRPO."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanorl.losses import cispo_loss, dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss, reinforce_loss


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_and_gradient(loss, ratios: list[list[float]], advantages: list, **options) -> tuple[float, list[list[float]]]:
    """Rows of token ratios, as long as their responses; log-probs are -1. Gradients, without those of the padding."""
    width = max(map(len, ratios))
    mask = torch.arange(width) < torch.tensor([[len(row)] for row in ratios])
    log_ratios = f64([[math.log(ratio) for ratio in row] + [9.0] * (width - len(row)) for row in ratios])
    logprobs = torch.full((len(ratios), width), -1.0, dtype=torch.float64, requires_grad=True)
    value, _ = loss(logprobs, logprobs.detach() - log_ratios, f64(advantages), mask, **options)
    value.backward()
    return value.item(), [row[: len(ratio)] for row, ratio in zip(logprobs.grad.tolist(), ratios, strict=True)]


def assert_close(found: tuple[float, list[list[float]]], value: float, gradient: list[list[float]]) -> None:
    assert found[0] == pytest.approx(value, abs=1e-14)
    assert [pytest.approx(row, abs=1e-14) for row in gradient] == found[1]


# A right answer of one token and a wrong one of two, on the policy that sampled them.
SHORT_RIGHT_LONG_WRONG = {"ratios": [[1.0], [1.0, 1.0]], "advantages": [1.0, -1.0]}
# Equal lengths; ratios inside and outside the band, advantages of either sign.
EQUAL_LENGTHS = {"ratios": [[1.5, 0.9, 1.1], [0.5, 1.0, 1.3], [1.19, 0.7, 2.0]], "advantages": [1.0, -2.0, 0.5]}
# The policy that sampled, equal lengths, and other ones.
ON_POLICY = {"ratios": [[1.0] * 3] * 2, "advantages": [1.5, -0.5]}
ON_POLICY_RAGGED = {"ratios": [[1.0], [1.0] * 4, [1.0] * 2], "advantages": [1.5, -0.5, 0.7]}


def test_grpo_weighs_each_response_alike_and_a_token_of_a_long_one_less():
    # -(1)/2 + (1 + 1)/2/2 = 0
    assert_close(loss_and_gradient(grpo_loss, **SHORT_RIGHT_LONG_WRONG), 0.0, [[-1 / 2], [1 / 4, 1 / 4]])


def test_dr_grpo_differs_from_grpo_in_weighing_each_token_alike_by_a_constant():
    # (-1 + 1 + 1) / (2 responses x 4 tokens)
    found = loss_and_gradient(dr_grpo_loss, **SHORT_RIGHT_LONG_WRONG, max_length=4)
    assert_close(found, 1 / 8, [[-1 / 8], [1 / 8, 1 / 8]])


def test_dr_grpo_is_grpo_where_every_response_has_the_greatest_length():
    assert_close(
        loss_and_gradient(dr_grpo_loss, **EQUAL_LENGTHS, max_length=3), *loss_and_gradient(grpo_loss, **EQUAL_LENGTHS)
    )


def test_dapo_differs_from_grpo_in_weighing_each_token_of_the_batch_alike():
    # (-1 + 1 + 1) / 3 tokens
    assert_close(loss_and_gradient(dapo_loss, **SHORT_RIGHT_LONG_WRONG), 1 / 3, [[-1 / 3], [1 / 3, 1 / 3]])


def test_dapo_differs_from_grpo_in_letting_a_likelier_token_grow_further():
    one = {"ratios": [[1.25]], "advantages": [1.0]}
    assert_close(loss_and_gradient(grpo_loss, **one), -1.2, [[0.0]])
    assert_close(loss_and_gradient(dapo_loss, **one), -1.25, [[-1.25]])
    assert_close(loss_and_gradient(dapo_loss, [[1.3]], [1.0]), -1.28, [[0.0]])


def test_dapo_is_grpo_where_lengths_and_clip_range_are_equal():
    assert_close(
        loss_and_gradient(dapo_loss, **EQUAL_LENGTHS, clip_high=0.2), *loss_and_gradient(grpo_loss, **EQUAL_LENGTHS)
    )


def test_gspo_differs_from_grpo_in_letting_ratios_of_a_response_cancel():
    one = {"ratios": [[1.5, 1 / 1.5]], "advantages": [1.0]}  # geometric mean 1
    # GRPO: -(1.2 + 2/3) / 2, the first token clipped
    assert_close(loss_and_gradient(grpo_loss, **one), -14 / 15, [[0.0, -1 / 3]])
    assert_close(loss_and_gradient(gspo_loss, **one), -1.0, [[-1 / 2, -1 / 2]])


def test_gspo_differs_from_grpo_in_leaving_a_clipped_response_out_whole():
    one = {"ratios": [[1.1, 1.0]], "advantages": [1.0]}  # geometric mean 1.0488: in GRPO's band, beyond GSPO's
    assert_close(loss_and_gradient(grpo_loss, **one), -1.05, [[-1.1 / 2, -1 / 2]])
    assert_close(loss_and_gradient(gspo_loss, **one), -1.0004, [[0.0, 0.0]])


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("batch", [ON_POLICY, ON_POLICY_RAGGED], ids=["equal lengths", "ragged"])
def test_gspo_is_grpo_where_every_ratio_is_1(batch, token_level):
    assert_close(loss_and_gradient(gspo_loss, **batch, token_level=token_level), *loss_and_gradient(grpo_loss, **batch))


def test_gspo_is_grpo_where_every_response_has_one_token():
    ones = {"ratios": [[1.5], [0.5], [1.1], [0.9]], "advantages": [1.0, -2.0, 0.5, -1.0]}
    assert_close(
        loss_and_gradient(gspo_loss, **ones, clip_low=0.2, clip_high=0.2), *loss_and_gradient(grpo_loss, **ones)
    )


def test_the_token_variant_of_gspo_differs_from_grpo_in_its_ratio_and_from_gspo_in_its_advantages():
    one = {"ratios": [[1.5, 1 / 1.5]], "advantages": [[1.0, 3.0]]}
    # GRPO: -(1.2 + 3 x 2/3) / 2
    assert_close(loss_and_gradient(grpo_loss, **one), -1.6, [[0.0, -1.0]])
    assert_close(loss_and_gradient(gspo_loss, **one, token_level=True), -2.0, [[-1 / 2, -3 / 2]])


def test_the_token_variant_of_gspo_is_gspo_where_the_tokens_of_a_response_share_an_advantage():
    batch = EQUAL_LENGTHS | {"ratios": [[1.5, 0.9], [0.5, 1.0, 1.3], [1.19]]}
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    token = loss_and_gradient(gspo_loss, **batch, **wide, token_level=True)
    assert_close(token, *loss_and_gradient(gspo_loss, **batch, **wide))


def test_reinforce_differs_from_grpo_in_knowing_no_ratio():
    one = {"ratios": [[2.0], [2.0]], "advantages": [1.0, -1.0]}
    assert_close(loss_and_gradient(grpo_loss, **one), (-1.2 + 2.0) / 2, [[0.0], [2.0 / 2]])
    # -(1 x -1) and -(-1 x -1) over 2 tokens
    assert_close(loss_and_gradient(reinforce_loss, **one), 0.0, [[-1 / 2], [1 / 2]])


def test_cispo_differs_from_grpo_in_keeping_the_gradient_of_every_token():
    one = {"ratios": [[2.0], [10.0]], "advantages": [1.0, 1.0]}
    assert_close(loss_and_gradient(grpo_loss, **one), -1.2, [[0.0], [0.0]])
    # weights 2 and, capped, 5; times the log-prob of -1
    assert_close(loss_and_gradient(cispo_loss, **one), (2.0 + 5.0) / 2, [[-2.0 / 2], [-5.0 / 2]])


@pytest.mark.parametrize("loss", [reinforce_loss, cispo_loss])
def test_without_clipping_the_gradient_is_that_of_grpo_where_ratios_are_1_and_lengths_equal(loss):
    """Only the gradient: their value is the log-prob's, GRPO's the ratio's."""
    assert loss_and_gradient(loss, **ON_POLICY)[1] == loss_and_gradient(grpo_loss, **ON_POLICY)[1]
    assert loss_and_gradient(loss, **ON_POLICY_RAGGED)[1] != loss_and_gradient(grpo_loss, **ON_POLICY_RAGGED)[1]


def test_cispo_has_the_gradient_of_grpo_where_no_ratio_leaves_the_band():
    """The gradient of r is r times that of log r, whether r is inside or in front of it."""
    inside = EQUAL_LENGTHS | {"ratios": [[1.1, 0.9, 1.15], [0.85, 1.0, 1.05], [0.95, 1.19, 1.0]]}
    (_, cispo), (_, grpo) = loss_and_gradient(cispo_loss, **inside), loss_and_gradient(grpo_loss, **inside)
    assert [pytest.approx(row, abs=1e-14) for row in grpo] == cispo


def test_dual_clip_is_trls_delta_where_delta_is_above_the_band_and_another_thing_inside_it():
    """TRL's delta bounds the ratio of the unclipped term, for either sign: -min(min(r, delta) A, clip(r) A)."""

    def trl(ratio: float, advantage: float, delta: float) -> float:
        return -min(min(ratio, delta) * advantage, min(max(ratio, 0.8), 1.2) * advantage)

    for ratio in (0.5, 1.0, 1.15, 1.5, 3.0):
        for advantage in (-1.0, 1.0):
            found = loss_and_gradient(grpo_loss, [[ratio]], [advantage], dual_clip=1.5)[0]
            assert found == pytest.approx(trl(ratio, advantage, 1.5), abs=1e-14)
    assert loss_and_gradient(grpo_loss, [[1.15]], [1.0], dual_clip=1.1)[0] == pytest.approx(-1.15, abs=1e-14)
    assert trl(1.15, 1.0, 1.1) == -1.1
