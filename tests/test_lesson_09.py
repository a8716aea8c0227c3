"""Lesson 09: its numbers are those of the code, and its checks refuse wrong answers."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanorl.algorithms import ALGORITHMS
from nanorl.from_trl import read, translate
from nanorl.losses import dapo_loss, grpo_loss, gspo_loss

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "09_gspo"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break
LOG_RATIOS, MASK = torch.tensor([[0.2, 0.0, -0.1, 5.0]], dtype=torch.float64), torch.tensor([[1, 1, 1, 0]])
WIDE = {"clip_low": 1.0, "clip_high": 10.0}


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


def row_of(start: str) -> list[list[float]]:
    """The numbers of the cells behind the first one, in the only table row that begins with `start`."""
    (row,) = (line for line in README.splitlines() if line.startswith(f"| {start} |"))
    cells = row.strip("|").split("|")[1:]
    return [[float(x) for x in re.findall(r"[-+]?\d+(?:\.\d+)?", cell.replace(",", ", "))] for cell in cells]


def loss_and_gradient(loss, log_ratios: Tensor, advantages, mask: Tensor, **options) -> tuple[float, Tensor]:
    old = torch.full_like(log_ratios, -1.0)
    logprobs = (old + log_ratios).requires_grad_()
    value, _ = loss(logprobs, old, torch.tensor(advantages, dtype=torch.float64), mask, **options)
    return value.item(), torch.autograd.grad(value, logprobs)[0]


@pytest.mark.parametrize(
    "start, loss, options",
    [
        ("GRPO, wide clip", grpo_loss, WIDE),
        ("GRPO, clip 0.2", grpo_loss, {"clip_low": 0.2, "clip_high": 0.2}),
        ("GSPO, wide clip", gspo_loss, WIDE),
        ("GSPO, clip 0.03", gspo_loss, {"clip_low": 0.03, "clip_high": 0.03}),
    ],
)
def test_trap_a7_the_losses_and_gradients_of_the_first_table(start, loss, options):
    ratios, (shown_loss,), shown_gradient = row_of(start)
    by_hand = LOG_RATIOS[0, :3].exp().tolist() if loss is grpo_loss else [math.exp(0.1 / 3)]
    assert ratios == pytest.approx(by_hand, abs=5e-7)
    value, found = loss_and_gradient(loss, LOG_RATIOS, [2.0], MASK, **options)
    assert value == pytest.approx(shown_loss, abs=5e-7)
    assert found[0].tolist() == pytest.approx([*shown_gradient, 0.0], abs=5e-7)


def test_trap_a7_the_two_wrong_rows_of_the_first_table():
    for start, ratio, each in (
        ("wrong: the sum of the log-ratios", math.exp(0.1), 1),
        ("wrong: the padding is in the mean", math.exp(5.1 / 4), 4),
    ):
        shown = row_of(start)
        assert shown[0] == pytest.approx([ratio], abs=5e-7)
        assert shown[1] == pytest.approx([-2 * ratio], abs=1e-6)
        assert shown[2] == pytest.approx([-2 * ratio / each] * 3, abs=1e-6)


def test_trap_a7_the_token_variant_with_an_advantage_for_each_token():
    _, found = loss_and_gradient(gspo_loss, LOG_RATIOS, [[3.0, -1.0, 0.5, 9.0]], MASK, token_level=True, **WIDE)
    assert found[0].tolist() == pytest.approx([-1.033895, 0.344632, -0.172316, 0.0], abs=5e-7)
    assert "-1.033895, +0.344632, -0.172316" in PROSE


@pytest.mark.parametrize("tokens", [3, 25, 1000, 4000])
def test_how_far_a_response_may_move_before_it_is_clipped(tokens):
    (up,), (down,) = row_of(f"{tokens:,}")
    coarse = 0.005 if tokens == 3 else 0.05 if tokens == 25 else 0.5
    assert 100 * (1.0004**tokens - 1) == pytest.approx(up, abs=coarse)
    assert 100 * (1 - 0.9997**tokens) == pytest.approx(down, abs=coarse)


def test_with_one_update_a_batch_gspo_has_the_gradient_of_grpo():
    mask = (torch.arange(25) < torch.tensor([25, 3, 3, 3])[:, None]).double()
    same = torch.zeros(4, 25, dtype=torch.float64)
    advantages = [1.5, -0.5, -0.5, -0.5]
    loss, found = loss_and_gradient(gspo_loss, same, advantages, mask)
    grpo, of_grpo = loss_and_gradient(grpo_loss, same, advantages, mask)
    assert loss == pytest.approx(grpo, abs=1e-15)
    torch.testing.assert_close(found, of_grpo, rtol=0, atol=1e-15)
    moved, of_grpo = (loss_and_gradient(f, same + 0.01, advantages, mask)[1] for f in (gspo_loss, grpo_loss))
    assert not torch.equal(moved, of_grpo)  # from the second update on


def test_the_two_means_over_a_long_and_a_short_response():
    mask = (torch.arange(25) < torch.tensor([25, 3])[:, None]).double()
    same = torch.zeros(2, 25, dtype=torch.float64)
    for start, loss in (("over each response, then responses (GSPO)", gspo_loss), ("over all 28 tokens", dapo_loss)):
        value, found = loss_and_gradient(loss, same, [1.0, -1.0], mask)
        shown = row_of(start)
        assert [[value], [found[0, 0].item()], [found[1, 0].item()]] == [pytest.approx(x, abs=5e-7) for x in shown]


def test_trl_configuration_shown_is_gspo_here_and_the_ratio_of_a_sequence_alone_is_not(tmp_path):
    shown = re.search(r"GRPOConfig\(\n.*?\n\)\n", README, re.S)[0]
    (tmp_path / "config").write_text(shown)
    result = translate(read(tmp_path / "config"))
    expected = {"algo": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "beta": 0.0, "updates_per_rollout": 4}
    assert expected.items() <= result.flags.items()
    assert result.without == {}
    assert ALGORITHMS["gspo"].updates_per_rollout == 4
    alone = translate({"importance_sampling_level": "sequence"})
    assert "algo" not in alone.flags and "importance_sampling_level" in alone.without


def test_the_answers_behind_the_questions_and_the_numbers_of_the_traps():
    _, found = loss_and_gradient(gspo_loss, torch.tensor([[0.3, -0.1, 0.1, 0.1]]).double(), [-1.0], torch.ones(1, 4))
    assert found[0].tolist() == pytest.approx([0.276293] * 4, abs=5e-7)
    assert round(1.2**25) == 95 and "once it is 95 times as likely" in PROSE
    assert 0.007 / math.sqrt(25) == pytest.approx(0.0014)


def test_what_the_lesson_says_of_its_runs_stands_in_their_tables():
    def means(start: str) -> list[float]:
        return [cell[0] for cell in row_of(start)]

    grpo = [means(start.ljust(26)) for start in ("GRPO, 1 update a batch", "GRPO, 4", "GRPO, 8")]
    gspo = [means(start.ljust(26)) for start in ("GSPO, 1 update a batch", "GSPO, 4", "GSPO, 8")]
    wide = means("GSPO, 4, 40 times the band")
    assert "11 % of the responses against 0.1 % of the tokens" in PROSE
    assert (round(100 * gspo[1][4]), round(100 * grpo[1][4], 1)) == (11, 0.1)
    assert "In the first 10 steps it is 56 %" in PROSE and round(100 * gspo[1][3]) == 56
    assert "leaves out 3 % instead of 11 %" in PROSE and round(100 * wide[4]) == 3
    assert "0.69 with 1 update, 0.94 with 4, 0.84 with 8. From 20 to 50: 0.95, 0.93, 0.83" in PROSE
    assert [[round(row[i], 2) for row in grpo] for i in (0, 1)] == [[0.69, 0.94, 0.84], [0.95, 0.93, 0.83]]
    assert [round(row[2], 2) for row in [*grpo, *gspo[:2], wide]] == [0.99] * 6 and round(gspo[2][2], 2) == 0.92
    for start, beyond in (
        ("1 update a batch", [False, False, False]),
        ("4 updates a batch", [True, False, False]),
        ("4, 40 times the band", [False, False, False]),
        ("8 updates a batch", [False, False, False]),
    ):
        gaps = row_of(start.ljust(20))
        assert [abs(mean) > half for mean, half in gaps] == beyond
    assert all(mean < 0 for mean, _ in gaps)  # of 8 updates
    assert "0.08 behind GRPO" in PROSE and round(gspo[1][0] - grpo[1][0], 2) == -0.08
    assert "0.04 behind after 10 steps" in PROSE and round(wide[0] - grpo[1][0], 2) == -0.04


# ---- exercises


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("sequence_ratio", "log_ratio.sum(1) / mask.sum(1)", "log_ratio.sum(1)"),
        ("sequence_ratio", "log_ratio.sum(1) / mask.sum(1)", "log_ratio.mean(1)"),
        ("sequence_ratio", "old_logprobs.detach()", "old_logprobs"),
        (
            "sequence_ratio",
            "torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0)",
            "(logprobs - old_logprobs.detach()) * mask",
        ),
        ("gspo_loss", "-torch.minimum", "torch.minimum"),
        ("gspo_loss", "torch.minimum(s * advantages, s", "(s"),
        ("gspo_loss", "torch.minimum", "torch.maximum"),
        ("gspo_loss", ".mean()", ".sum()"),
        ("gspo_loss", "clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_high, 1 + clip_low)"),
        ("token_variant_ratio", "(logprobs - logprobs.detach()).exp()", "torch.ones_like(logprobs)"),
        ("token_variant_ratio", "mask).detach()", "mask)"),
        ("left_out", "too_high | too_low", "too_high"),
        ("left_out", " & (advantages > 0)", ""),
        ("left_out", "advantages < 0", "advantages > 0"),
        ("loss_that_listens_to_the_longest", "sum(1) / mask.sum(1)).mean()", "sum() / mask.sum())"),
        ("loss_that_listens_to_the_longest", "sum(1) / mask.sum(1)).mean()", "mean(1)).mean()"),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)
