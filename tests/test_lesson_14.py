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


# ---- what the lesson says of its runs


def test_what_the_lesson_says_of_its_runs_stands_in_their_tables():
    course = {int(row[0]): [measured(cell)[0] for cell in row[1:]] for row in table_of("course")}
    first, last = course[0], course[max(course)]
    assert "from -0.04 to 1.78" in PROSE and (round(first[1], 2), round(last[1], 2)) == (-0.04, 1.78)
    golds = {step: row[0] for step, row in course.items()}
    peak = max(golds, key=golds.get)
    assert "for ten steps, to 0.58, and then falls to -1.07" in PROSE
    assert (peak, round(golds[peak], 2), round(last[0], 2)) == (10, 0.58, -1.07) and last[0] < first[0]
    turns = table_of("turns")
    free, held = ([row for row in turns if row[0] == beta] for beta in ("0", "0.02"))
    assert "(1.23, 2.34, 1.32)" in PROSE and [row[6] for row in held] == ["1.23", "2.34", "1.32"]
    assert "(0.64, 1.30, 0.26)" in PROSE and [row[2] for row in free] == ["0.64", "1.30", "0.26"]
    assert all(float(a[6]) > float(b[2]) for a, b in zip(held, free, strict=True))
    assert "at step 10 or 30, at 2 to 11 nats" in PROSE and {row[3] for row in free} == {"10", "30"}
    assert [round(min(float(row[4]) for row in free)), round(max(float(row[4]) for row in free))] == [2, 11]
    waits = [int(row[9]) - int(row[3]) for row in free]
    assert "step 20 to 50, ten to twenty steps behind it" in PROSE and {min(waits), max(waits)} == {10, 20}
    assert [row[9] for row in held] == ["40", "-", "-"]
    labellers = {row[0]: measured(row[1]) for row in table_of("labellers")}
    plain = [labellers[f"correlation of {name} and length"][0] for name in ("score", "gold")]
    assert "-0.24 and -0.23" in PROSE and [round(x, 2) for x in plain] == [-0.24, -0.23]
    mean, half = labellers["the same among responses of equal gold"]
    assert "-0.09 ± 0.11" in PROSE and (round(mean, 2), round(half, 2)) == (-0.09, 0.11)


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
