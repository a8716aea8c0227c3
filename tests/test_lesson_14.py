"""Lesson 14: its numbers are those of the code, and its checks refuse wrong answers."""

import functools
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from nanorl.best_of_n import kl_of_best, mean_of_best
from nanorl.tasks.reviews import BROKEN, LABELLERS, PATIENCE, RAMBLING, REPEATED, claims, gold

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "14_reward_hacking"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break
METRICS = (LESSON.parents[1] / "docs" / "metrics.md").read_text()


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


def test_noise_alone_shrinks_the_correlation_with_length_and_leaves_none_at_equal_gold(load):
    with_gold, gold_and_length = 0.75, -0.4
    basis = torch.linalg.qr(torch.cat([torch.ones(50, 1), torch.eye(50)[:, :3]], 1).double()).Q
    golds, other, noise = basis[:, 1:].T  # of mean 0, uncorrelated
    length = gold_and_length * golds + math.sqrt(1 - gold_and_length**2) * other
    score = golds + math.sqrt(1 / with_gold**2 - 1) * noise
    found = torch.corrcoef(torch.stack([score, golds, length]))
    assert [found[0, 1].item(), found[1, 2].item()] == pytest.approx([with_gold, gold_and_length])
    assert found[0, 2].item() == pytest.approx(-0.3) and "$0.75 \\cdot (-0.4) = -0.3$, without any bias" in PROSE
    assert load("solution").length_bias(score, golds, length) == pytest.approx(0, abs=1e-12)


def test_the_labeller_who_loves_length_pays_what_the_lesson_says():
    assert LABELLERS["length"] == 0.25 and "Each word is worth 0.25 gold" in PROSE


def test_what_gold_takes_points_for_is_what_the_lesson_says():
    assert "one that says something again, is worth -1" in PROSE and REPEATED == 1
    assert "Each breach of grammar costs 2, each word behind the 18th half a point" in PROSE
    assert (BROKEN, RAMBLING, PATIENCE) == (2, 0.5, 18)


def prompt_and_response(cell: str) -> tuple[str, str]:
    return re.fullmatch(r"\*(.*?)\* (.*)", cell).groups()


def test_the_responses_shown_have_the_gold_that_is_shown():
    responses, ends = table_of("responses"), table_of("ends")
    assert len(responses) >= 5 and {row[0] for row in ends} == {"0", "1", "2"}
    for _, text, _, shown in responses + ends:
        assert float(shown) == pytest.approx(gold(*prompt_and_response(text)), abs=0.051)


def test_what_the_lesson_says_of_the_proxy_of_the_last_responses_stands_in_their_table():
    proxies = sorted(float(row[2]) for row in table_of("ends"))
    assert (
        "five of these six between 1.65 and 2.38" in PROSE and proxies[1:][0::4] == [1.65, 2.38] and len(proxies) == 6
    )


def test_the_faults_counted_are_those_that_gold_takes_points_for(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "solution", load("solution"))
    faults = load("figure").faults
    again, broken = " but the plot was great .", " and the music was bold the acting was bold"
    assert faults(" the plot was dull", again) == {"broken": 0, "again": 1, "words": 6}
    assert faults(" the plot was dull", broken) == {"broken": 2, "again": 1, "words": 9}  # no joining word, no end
    for _, text, _, _ in table_of("responses") + table_of("ends"):
        found = faults(*prompt_and_response(text))
        lost = BROKEN * found["broken"] + RAMBLING * max(0, found["words"] - PATIENCE)
        claimed = len(claims(text.replace("*", "").split())) - 1  # the first one is the prompt's
        of_claims = gold(*prompt_and_response(text)) + lost
        assert of_claims == int(of_claims) and of_claims <= claimed - 2 * found["again"]


# ---- what the lesson says of its runs


def test_what_the_lesson_says_of_the_course_without_kl_stands_in_its_table():
    course = {int(row[0]): [measured(cell)[0] for cell in row[1:]] for row in table_of("course")}
    first, last = course[0], course[max(course)]
    assert "from -0.01 to 1.84" in PROSE and (round(first[1], 2), round(last[1], 2)) == (-0.01, 1.84)
    golds = {step: row[0] for step, row in course.items()}
    peak = max(golds, key=golds.get)
    assert "to 0.29 at step 30, and then falls to -3.37" in PROSE
    assert (peak, round(golds[peak], 2), round(last[0], 2)) == (30, 0.29, -3.37) and last[0] < first[0]
    assert "at step 20 the responses have 3.9 tokens instead of 11.0" in PROSE
    assert (round(course[20][3], 1), round(first[3], 1)) == (3.9, 11.0)
    (healthy,) = re.findall(r"^\| `kl`, .* settles below (\d+) \|", METRICS, re.M)
    assert f"KL goes to {last[2]:.1f}, where below {healthy} is healthy" in PROSE and last[2] > float(healthy)
    flat = [row[2] for step, row in course.items() if step >= 100]
    assert "from step 100 on both are flat, the KL between 37.8 and 40.9" in PROSE
    assert [min(flat), max(flat)] == [37.8, 40.9] and last[1] - course[100][1] < 0.04


def test_what_the_lesson_says_of_where_it_begins_stands_in_the_table_of_turns():
    turns = table_of("turns")
    of_beta = {beta: [row for row in turns if row[0] == beta] for beta in ("0.05", "0.1", "0.3", "0")}
    free, held = of_beta["0"], [row for row in turns if row[0] != "0"]
    assert len(held) == 9 and len(free) == 3
    assert "at step 30 or 80, at 3 to 13 nats" in PROSE and {row[3] for row in free} == {"30", "80"}
    assert [round(min(float(row[4]) for row in free)), round(max(float(row[4]) for row in free))] == [3, 13]
    assert "ten steps behind it" in PROSE and all(int(row[9]) - int(row[3]) == 10 for row in free)
    assert "None of the nine runs with a KL penalty is warned of" in PROSE and all(row[9] == "-" for row in held)
    assert "never more than 0.05 below their best" in PROSE
    assert all(float(row[2]) - float(row[6]) < 0.0501 for row in held)
    assert "its best is 0.02" in PROSE and free[2][2] == "0.02"
    ends = {beta: [row[6] for row in rows] for beta, rows in of_beta.items()}
    assert "(1.75, 1.72, 0.92 and 1.73, 1.46, 0.96)" in PROSE
    assert [*ends["0.05"], *ends["0.1"]] == ["1.75", "1.72", "0.92", "1.73", "1.46", "0.96"]
    assert "(0.39, 1.33, 0.02); with 0.3 two of three do" in PROSE and [row[2] for row in free] == [
        "0.39",
        "1.33",
        "0.02",
    ]
    more = {
        beta: sum(float(a) > float(b[2]) for a, b in zip(ends[beta], free, strict=True))
        for beta in ("0.05", "0.1", "0.3")
    }
    assert more == {"0.05": 3, "0.1": 3, "0.3": 2}
    assert all(min(rows, key=lambda row: float(row[6]))[1] == "2" for beta, rows in of_beta.items())


def test_what_fewer_pairs_do_is_compared_with_the_run_of_the_table_of_turns():
    (row,) = (row for row in table_of("turns") if row[:2] == ["0", "0"])
    assert row[3] == "30" and "in step 30 as before" in PROSE
    assert f"to -17.2 instead of {row[6]}, at a KL of 69.1 instead of {row[8]}" in PROSE


def test_what_the_lesson_says_of_the_pairs_stands_in_the_table_of_what_was_seen():
    seen = table_of("seen")
    pairs, ends = seen[::2], seen[1::2]
    asked = [int(re.search(r"[\d,]+", row[1])[0].replace(",", "")) for row in pairs]
    assert "Not one of the 37,636 responses" in PROSE and 2 * sum(asked) == 37636
    assert {row[6] for row in pairs} == {"0.00 %"}  # one of them would be 0.01 %
    assert 100 / (2 * max(asked)) > 0.005
    assert "at most one in a hundred has one" in PROSE and all(float(row[5].split()[0]) <= 1 for row in pairs)
    assert "it is 86, 61 and 100 % that have two or more" in PROSE
    assert [round(float(row[6].split()[0])) for row in ends] == [86, 61, 100]


def test_what_the_lesson_says_of_the_labellers_stands_in_their_table():
    labellers, biased = ({row[0]: measured(row[i]) for row in table_of("labellers")} for i in (1, 2))
    plain = [labellers[f"correlation of {name} and length"][0] for name in ("score", "gold")]
    assert "-0.29 and -0.29" in PROSE and [round(x, 2) for x in plain] == [-0.29, -0.29]
    mean, half = labellers["the same among responses of equal gold"]
    assert "-0.13 ± 0.02" in PROSE and (round(mean, 2), round(half, 2)) == (-0.13, 0.02)
    assert "writes 12.0 tokens instead of 11.0" in PROSE and round(labellers["length after PPO"][0], 1) == 12.0
    for name, said in (
        ("accuracy on fresh pairs of the same labeller", "as accurate, 0.83"),
        ("the same among responses of equal gold", "does: +0.82 ± 0.18"),
        ("correlation of score and length", "follows length (+0.62)"),
        ("correlation of score and gold", "more than gold (+0.37)"),
    ):
        shown = float(re.search(r"0\.\d\d", said)[0])
        assert said in PROSE and round(biased[name][0], 2) == shown
    assert round(labellers["accuracy on fresh pairs of the same labeller"][0], 2) == 0.83
    assert "17.9 tokens, in each seed" in PROSE and biased["length after PPO"] == (17.9, 0.1)
    golds = [of["gold after PPO"] for of in (biased, labellers)]
    assert "1.60 against 1.38" in PROSE and [round(mean, 2) for mean, _ in golds] == [1.6, 1.38]
    assert abs(golds[0][0] - golds[1][0]) < min(half for _, half in golds)
    assert PATIENCE == 18


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
        ("turning_point", " if a > 0 and b > 0 ", " if b > 0 "),
        ("turning_point", " if a > 0 and b > 0 ", " if a > 0 "),
        ("turning_point", " if a > 0 and b > 0 ", " if a / b > 0 "),
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


def test_the_check_of_best_of_n_with_its_kl_refuses_another_kl_and_asks_for_no_more_than_a_loop_can_do(load):
    solution, checks = load("solution"), load("checks")
    asked = []

    def recorded(probs, scores, n):
        asked.append(len(probs))
        return solution.best_of_n(probs, scores, n)

    checks.check_best_of_n_and_best_of_n_kl(recorded, solution.best_of_n_kl)
    assert max(asked) <= 2000  # squared: what a loop over the responses, each of which looks at all, has to do
    for wrong in (math.log, lambda n: math.log(n) - (n - 1) / (n + 1), lambda n: math.log(n) - (n - 1) / n + 0.002):
        with pytest.raises(checks.require.__globals__["Failed"]):
            checks.check_best_of_n_and_best_of_n_kl(solution.best_of_n, wrong)


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
