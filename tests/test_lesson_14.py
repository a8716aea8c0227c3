"""Lesson 14: its numbers are those of the code, and its checks refuse wrong answers."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch

from nanorl.best_of_n import kl_of_best, mean_of_best
from nanorl.tasks.reviews import LABELLERS, gold

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "14_reward_hacking"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


def table_of(name: str) -> list[list[str]]:
    """The cells of the rows behind the head, between the marks of that name."""
    text = README.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def measured(cell: str) -> tuple[float, float]:
    """Mean and half of its interval."""
    mean, _, half = cell.partition(" ± ")
    return float(mean), float(half.split()[0])


# ---- numbers by hand


def test_the_parabola_by_hand(load):
    kl = torch.arange(0, 20, dtype=torch.float64)
    curve = -0.5 + kl.sqrt() * (2 - 0.5 * kl.sqrt())
    assert load("solution").turning_point(kl, curve) == pytest.approx(4.0)
    assert curve[4].item() == 1.5 and curve[16].item() == -0.5
    assert "the top is at $d = 2$, KL 4, with a gold of $-0.5 + 2 (2 - 1) = 1.5$" in PROSE


def test_the_kl_of_the_best_of_64():
    assert round(kl_of_best(64), 2) == 3.17 and "$\\log 64 - 63 / 64 = 3.17$" in PROSE
    assert kl_of_best(64) < math.log(64)


def test_the_labeller_who_loves_length_pays_what_the_lesson_says():
    assert LABELLERS["length"] == 0.25 and "Each word is worth 0.25 gold" in PROSE


def test_the_responses_shown_have_the_gold_that_is_shown():
    rows = table_of("responses")
    assert len(rows) >= 5
    for _, text, _, shown in rows:
        prompt, response = re.fullmatch(r"\*(.*)\* (.*)", text).groups()
        assert float(shown) == pytest.approx(gold(prompt, response), abs=0.051)


# ---- exercises


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("best_of_n", "at_most**n - below**n", "(at_most - below)**n"),
        ("best_of_n", "kept[order] = ", "kept[:] = "),
        ("best_of_n", "scores.argsort()", "scores.argsort(descending=True)"),
        ("best_of_n_kl", "math.log(n) - (n - 1) / n", "math.log(n)"),
        ("turning_point", "(gold - gold[0])", "gold"),
        ("turning_point", "(a / (2 * b)) ** 2", "a / (2 * b)"),
        ("turning_point", " if a > 0 and b > 0 else math.inf", ""),
        ("turning_point", "d = kl.sqrt()", "d = kl"),
        ("length_bias", "return values - (values @ centered) / (centered @ centered) * centered", "return values"),
        ("length_bias", "(centered @ centered)", "len(gold)"),
        ("length_bias", "centered = gold - gold.mean()", "centered = gold"),
        ("gold_of_best", "gold.gather(1, scores.argsort(1))", "gold.sort(1).values"),
        ("gold_of_best", "gold.gather(1, scores.argsort(1))", "scores.sort(1).values"),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)


def test_the_exercise_is_the_estimate_that_the_frontier_uses(load):
    scores, golds = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for n in (1, 4, 9):
        torch.testing.assert_close(load("solution").gold_of_best(scores, golds, n), mean_of_best(scores, golds, n))


def test_the_silent_bug_makes_random_scores_look_like_a_perfect_judge(load):
    scores, golds = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wrong, right = (load(name).gold_of_best for name in ("exercise", "solution"))
    rising = [wrong(scores, golds, n).mean().item() for n in (1, 4, 16, 64)]
    assert rising == sorted(rising) and rising[-1] > 2
    assert all(abs(right(scores, golds, n).mean().item()) < 0.3 for n in (1, 4, 16, 64))
