"""Lesson 03: its numbers are those of the code, and its checks refuse wrong answers."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanorl.losses import bradley_terry_loss
from nanorl.model import GPTConfig
from nanorl.reward_model import RewardModel
from nanorl.tasks.reviews import SHARPNESS, gold

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "03_rewards_from_preferences"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row_of(start: str) -> list[list[float]]:
    """The numbers of the cells behind the first one, in the only table row that begins with `start`."""
    (row,) = (line for line in README.splitlines() if re.match(rf"\| {re.escape(start)} *\|", line))
    return [[float(x) for x in re.findall(r"[-+]?\d+(?:\.\d+)?", cell)] for cell in row.strip("|").split("|")[1:]]


@pytest.mark.parametrize("chosen, rejected", [(2, 0), (0, 0), (0, 1), (0, 5)])
def test_probability_loss_and_gradient_of_the_table_of_pairs(chosen, rejected):
    (p,), (shown_loss,), (slope,) = row_of(f"{chosen} | {rejected}")[1:]
    scores = f64(chosen).requires_grad_()
    loss, _ = bradley_terry_loss(scores, f64(rejected))
    assert p == pytest.approx(1 / (1 + math.exp(rejected - chosen)), abs=5e-7)
    assert shown_loss == pytest.approx(loss.item(), abs=5e-7)
    assert slope == pytest.approx(torch.autograd.grad(loss, scores)[0].item(), abs=5e-7)


def test_the_other_numbers_worked_by_hand():
    with_margin, _ = bradley_terry_loss(f64(2), f64(0), margin=f64(1))
    assert with_margin.item() == pytest.approx(0.313262, abs=5e-7) and "have the loss 0.313262" in PROSE
    turned, _ = bradley_terry_loss(f64(1), f64(3))
    assert turned.item() == pytest.approx(2.126928, abs=5e-7) and "loss 2.126928" in PROSE
    assert math.log(2) == pytest.approx(0.693147, abs=5e-7)
    assert math.log(3) == pytest.approx(1.0986, abs=5e-5) and 0.999 - 0.75 == pytest.approx(0.249)


def test_trap_d2_gain_and_bias_of_three_raw_scores():
    model = RewardModel(GPTConfig(4, width=8, layers=1, heads=1, max_context=8)).double()
    raw = f64(3, 5, 7)
    model.normalize(raw)
    assert model.gain.item() == pytest.approx(0.612372, abs=5e-7)
    assert model.bias.item() == pytest.approx(-3.061862, abs=5e-7)
    assert (model.gain * raw + model.bias).tolist() == pytest.approx([-1.224745, 0, 1.224745], abs=5e-7)
    assert "gain 0.612372, bias -3.061862" in PROSE and "[-1.224745, 0, 1.224745]" in PROSE


def test_the_example_is_a_good_review_and_the_labels_are_as_sharp_as_said():
    assert gold(" the plot was very dull", " but the acting was superb .") == 1.0
    assert SHARPNESS == 3 and r"\sigma(3 (\text{gold}_A - \text{gold}_B))" in PROSE


def test_the_lesson_measures_calibration_as_its_exercise_does(load):
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = 2 * torch.randn(2, 500, generator=generator, dtype=torch.float64)
    found = load("figure").quality(chosen, rejected)
    assert load("solution").calibration_error(chosen, rejected) == pytest.approx(found["off by"], abs=1e-12)
    assert found["accuracy"] == (chosen > rejected).double().mean().item()


# ---- exercises


def test_trap_d1_the_first_silent_bug_is_right_alone_and_for_the_longest_as_its_symptom_says(load):
    bug = load("exercise").scores_that_depend_on_their_company
    scores = torch.arange(12.0).view(3, 4)
    lengths = torch.tensor([2, 4, 1])
    assert bug(scores, lengths).tolist() == [3, 7, 11]  # 7 is the longest one's
    assert [bug(scores[i : i + 1], lengths[i : i + 1]).item() for i in range(3)] == [1, 7, 8]


def test_trap_d1_the_second_silent_bug_ties_conversations_and_cut_off_responses_as_its_symptom_says(load):
    bug, eos = load("exercise").scores_that_tie, 2
    ids = torch.tensor([[5, eos, 6, 7, eos], [5, eos, 6, 8, eos]])  # one prompt of a turn, two responses
    cut = torch.tensor([[5, 4, 6, 7, 7], [5, 4, 6, 8, 9]])
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 5, generator=generator, dtype=torch.float64).repeat(2, 1)
    scores[1, 3:] += 1  # they differ where the responses do
    for rows in (ids, cut):
        chosen, rejected = bug(scores, rows, torch.ones_like(rows), eos).chunk(2)
        assert bradley_terry_loss(chosen, rejected)[0].item() == pytest.approx(math.log(2), abs=1e-15)
    answer = torch.tensor([[5, 6, 7, eos, 0], [5, 6, 8, eos, 0]])
    mask = (answer > 0).long()
    right = load("solution").scores_that_tie(scores, answer, mask, eos)
    assert torch.equal(bug(scores, answer, mask, eos), right)


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("bradley_terry_loss", "-logsigmoid(chosen - rejected)", "-(chosen - rejected).sigmoid().log()"),
        ("bradley_terry_loss", "chosen - rejected", "rejected - chosen"),
        ("bradley_terry_loss", ".mean()", ".sum()"),
        ("bradley_terry_gradient", "-surprise, surprise", "surprise, -surprise"),
        ("bradley_terry_gradient", " / len(chosen)", ""),
        ("bradley_terry_gradient", "(rejected - chosen)", "(chosen - rejected)"),
        ("outcome_scores", "torch.where(mask.bool(), places, -1).amax(1)", "mask.long().sum(1) - 1"),
        ("outcome_scores", "torch.where(mask.bool(), places, -1).amax(1)", "torch.full((len(mask),), -1)"),
        ("calibration_error", "(chosen - rejected).abs()", "(chosen - rejected)"),
        ("calibration_error", "(chosen > rejected)", "(chosen >= rejected)"),
        ("calibration_error", ".clamp(max=bins - 1)", ""),
        ("calibration_error", " * inside.sum().item()", " * len(sure) / len(bin_of.unique())"),
        (
            "calibration_error",
            "(sure[inside].mean() - right[inside].mean()).abs()",
            "(sure - right)[inside].abs().mean()",
        ),
        ("scores_that_depend_on_their_company", "lengths - 1", "lengths.max() - 1"),
        ("scores_that_depend_on_their_company", "lengths - 1", "lengths - 2"),
        (
            "scores_that_tie",
            "torch.where(mask.bool(), places, -1)",
            "torch.where((ids == eos_id) & mask.bool(), places, 0)",
        ),
        ("scores_that_tie", "torch.where(mask.bool(), places, -1).amax(1)", "mask.sum(1) - 1"),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)


# ---- the runs


def test_what_the_lesson_says_of_its_runs_stands_in_their_tables():
    def means(start: str) -> list[float]:
        return [cell[0] for cell in row_of(start)]

    def spoken(number: float, text: str) -> bool:
        return text in PROSE and float(re.search(r"\d+\.\d+", text)[0]) == pytest.approx(number, abs=0.0051)

    few, some, many, twice = (means(start) for start in ("250", "2,000", "8,000", "8,000, twice the steps"))
    assert spoken(few[0], "From 0.70 with 250 pairs") and spoken(some[0], "to 0.85 with 2,000")
    assert f"from {few[1]:.2f} to {some[1]:.2f}" in PROSE and few[1] / math.log(2) == pytest.approx(3, abs=0.1)
    assert f"Certainty is off by {many[2]:.3f} instead of {some[2]:.3f}" in PROSE
    for mean, seeds in (
        (many[0], (0.897, 0.862, 0.843)),
        (some[0], (0.854, 0.848, 0.849)),
        (twice[0], (0.927, 0.930, 0.918)),
        (means("at the end of the padding")[0], (0.749, 0.566, 0.665)),
    ):
        a, b, c = seeds
        assert f"{a:.3f}, {b:.3f} and {c:.3f}" in PROSE and sum(seeds) / 3 == pytest.approx(mean, abs=6e-4)
    assert f"the best possible is {means('the best possible')[0]:.3f}" in PROSE
    assert means("behind the prompt") == [0.0, 0.693]
