"""Runs as numbers: what they come down to, how variants differ seed by seed, and what the picture shows."""

import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest

from nanorl import paired
from nanorl.paired import Course, draw, finding, read_course, shown_curves, summarize, table, tables

T2, T3 = 12.7062, 4.3027  # Student's t of two and three seeds


def write_run(out, accuracies: dict[int, float], *, seconds: float = 1.0, steps: int = 4, **changes):
    """A finished run: held-out accuracy by updates taken, the last one from the summary."""
    out.mkdir(parents=True)
    lines = []
    for step in range(steps):
        line = {"step": step, "length": 10.0 + step, "entropy": 1.0 - step / 10, "kl_old": 0.0} | changes
        line["seconds"] = {"step": seconds}
        if step in accuracies:
            line |= {"eval": {"accuracy": accuracies[step]}, "seconds": {"step": seconds + 7.0, "eval": 7.0}}
        lines.append(json.dumps(line) + "\n")
    (out / "metrics.jsonl").write_text("".join(lines))
    (out / "summary.json").write_text(json.dumps({"steps": steps, "eval_after": {"accuracy": accuracies[steps]}}))
    return read_course(out)


@pytest.fixture
def courses(tmp_path) -> dict[str, list[Course]]:
    """Three seeds of two variants; `b` is 0.1, 0.1 and 0.2 better and takes half a second a step instead of one."""
    finals = {"a": (0.5, 0.7, 0.9), "b": (0.6, 0.8, 1.1)}
    return {
        label: [
            write_run(tmp_path / label / str(seed), {0: 0.2, 2: 0.3, 4: final}, seconds=1.0 if label == "a" else 0.5)
            for seed, final in enumerate(of_seeds)
        ]
        for label, of_seeds in finals.items()
    }


def test_a_course_counts_the_seconds_of_training_without_those_of_evaluations(tmp_path):
    course = write_run(tmp_path / "run", {0: 0.2, 2: 0.6, 4: 0.8}, seconds=1.5)
    assert course.seconds.tolist() == [0, 1.5, 3.0, 4.5, 6.0]
    assert [values.tolist() for values in course.curves["accuracy"]] == [[0, 2, 4], [0.2, 0.6, 0.8]]
    assert [values.tolist() for values in course.curves["length"]] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert course.accuracy == 0.8


@pytest.mark.parametrize(
    ("target", "steps"), [(0.1, 0.0), (0.2, 0.0), (0.3, 0.5), (0.6, 2.0), (0.7, 3.0), (0.8, 4.0), (0.81, math.nan)]
)
def test_steps_to_a_target_lie_on_the_line_between_evaluations(target, steps, tmp_path):
    course = write_run(tmp_path / "run", {0: 0.2, 2: 0.6, 4: 0.8}, seconds=1.5)
    assert course.steps_to(target) == pytest.approx(steps, nan_ok=True)
    assert course.seconds_at(course.steps_to(target)) == pytest.approx(1.5 * steps, nan_ok=True)


def test_the_first_crossing_counts_if_accuracy_falls_again(tmp_path):
    assert write_run(tmp_path / "run", {0: 0.0, 1: 1.0, 2: 0.0, 4: 1.0}).steps_to(0.5) == 0.5


def test_final_values_and_their_paired_differences_by_hand(courses):
    a, b = summarize(courses, target=0.8)
    assert a["final"]["accuracy"]["mean"] == pytest.approx(0.7)
    assert a["final"]["accuracy"]["half"] == pytest.approx(T3 * 0.2 / math.sqrt(3), rel=1e-4)
    assert b["difference"]["accuracy"]["mean"] == pytest.approx(0.4 / 3, rel=1e-5)  # 0.1, 0.1, 0.2
    assert b["difference"]["accuracy"]["half"] == pytest.approx(T3 * math.sqrt(0.02 / 6) / math.sqrt(3), rel=1e-4)
    assert b["difference"]["seconds"]["values"] == [-2.0] * 3
    assert a["difference"]["accuracy"]["values"] == [0.0] * 3
    assert a["final"]["length"]["mean"] == 11.5 and a["final"]["entropy"]["mean"] == pytest.approx(0.85)


def test_a_target_that_some_seeds_never_reach_is_averaged_over_the_others(courses):
    a, b = summarize(courses, target=0.8)
    assert a["final"]["steps to 80%"]["values"] == [None, None, pytest.approx(2 + 2 * 5 / 6, rel=1e-5)]
    assert b["final"]["steps to 80%"]["values"] == [None, 4.0, pytest.approx(2 + 2 * 5 / 8, rel=1e-5)]
    assert b["difference"]["steps to 80%"]["values"][:2] == [None, None]
    assert b["difference"]["steps to 80%"]["mean"] == pytest.approx(2 * 5 / 8 - 2 * 5 / 6, rel=1e-5)
    assert b["difference"]["steps to 80%"]["half"] is None  # one pair is left
    assert b["final"]["seconds to 80%"]["mean"] == pytest.approx((2 + (2 + 2 * 5 / 8) / 2) / 2, rel=1e-5)
    assert "3.62 ± 4.76 (2 of 3 seeds)" in tables([a, b])  # 4 and 3.25


def test_a_target_that_no_seed_reaches_has_no_number(courses):
    a, _ = summarize(courses, target=1.5)
    assert a["final"]["steps to 150%"] == {"mean": None, "half": None, "values": [None] * 3}


def test_curves_are_means_over_seeds_against_updates_and_against_seconds(courses):
    a, b = summarize(courses, target=0.8)
    for variant, length in ((a, 4.0), (b, 2.0)):
        against = variant["curves"]["accuracy"]
        assert against["steps"]["x"] == [0, 2, 4]
        assert against["steps"]["mean"][:2] == [0.2, 0.3] and against["steps"]["half"][:2] == [0, 0]
        assert against["seconds"]["x"][0] == 0 and against["seconds"]["x"][-1] == length
        assert against["seconds"]["mean"][-1] == against["steps"]["mean"][-1]
    assert a["curves"]["accuracy"]["steps"]["mean"][2] == pytest.approx(0.7)
    assert a["curves"]["length"]["steps"]["mean"] == [10, 11, 12, 13]


def test_seeds_of_different_speed_are_compared_at_the_same_second_as_far_as_all_have_come(tmp_path):
    fast = write_run(tmp_path / "fast", {0: 0.0, 4: 0.8}, seconds=1.0)
    slow = write_run(tmp_path / "slow", {0: 0.0, 4: 0.8}, seconds=2.0)
    (variant,) = summarize({"a": [fast, slow]}, target=0.5)
    curve = variant["curves"]["accuracy"]["seconds"]
    assert curve["x"][-1] == 4.0 and curve["mean"][-1] == pytest.approx((0.8 + 0.4) / 2)
    assert curve["half"][-1] == pytest.approx(T2 * 0.2, rel=1e-4)  # standard deviation 0.4 / sqrt(2), of two


def test_kl_to_the_warm_start_is_shown_if_every_run_has_it(tmp_path):
    plain = write_run(tmp_path / "plain", {0: 0.1, 4: 0.2})
    with_reference = write_run(tmp_path / "ref", {0: 0.1, 4: 0.2}, kl_ref=0.01)
    assert shown_curves({"a": [with_reference], "b": [with_reference]})[-1] == "kl_ref"
    assert shown_curves({"a": [with_reference], "b": [plain]})[-1] == "kl_old"


def test_an_own_loss_may_log_no_kl(tmp_path):
    plain, silent = (write_run(tmp_path / name, {0: 0.1, 4: 0.2}) for name in ("plain", "silent"))
    del silent.curves["kl_old"]
    a, b = summarize({"a": [plain], "b": [silent]}, target=0.5)
    assert "kl_old" in a["curves"] and "kl_old" not in b["curves"]
    assert b["final"]["kl_old"]["mean"] is None and b["difference"]["kl_old"]["mean"] is None
    draw([a, b], tmp_path / "picture.png", "caption")
    draw([b, a], tmp_path / "picture.png", "caption")


def test_a_value_that_was_not_finite_leaves_a_gap_and_breaks_nothing(tmp_path):
    runs = [write_run(tmp_path / str(seed), {0: 0.1, 4: 0.2}, entropy=None) for seed in range(2)]
    (variant,) = summarize({"a": runs}, target=0.5)
    assert variant["final"]["entropy"]["mean"] is None
    assert variant["curves"]["entropy"]["steps"]["mean"] == [None] * 4
    json.dumps(variant, allow_nan=False)
    draw([variant], tmp_path / "picture.png", "caption")


def test_the_tables_show_every_variant_and_the_difference_to_the_first(courses):
    text = tables(summarize(courses, target=0.8))
    final, difference = text.split("\n\n")
    assert [line.split("|")[1].strip() for line in final.splitlines()] == ["variant", "-" * 9, "a", "b"]
    assert [line.split("|")[1].strip() for line in difference.splitlines()][0::2] == ["minus a, seed by seed", "b"]
    assert "+0.1333 ± 0.1434" in difference and "0.7000 ± 0.4968" in final
    assert len({line.count("|") for line in text.splitlines() if line}) == 1


def test_a_bar_in_a_label_does_not_break_the_table():
    assert table([["a|b", "c"], ["d", "e"]]).splitlines() == ["| a\\|b | c |", "|------|---|", "| d    | e |"]


def test_the_title_names_the_variants_whose_interval_leaves_out_0(courses, tmp_path):
    a, b = summarize(courses, target=0.8)
    assert finding([a, b]).startswith("No final accuracy differs from that of a")  # 0.133 +- 0.143
    b["difference"]["accuracy"]["half"] = 0.13
    assert finding([a, b]) == "Final accuracy differs from that of a: b +0.1333 ± 0.1300 (3 seeds)"
    assert finding([a]) == "a: final accuracy 0.7000 ± 0.4968"
    single = summarize({label: runs[:1] for label, runs in courses.items()}, target=0.8)
    assert finding(single).startswith("No final accuracy differs")  # one seed has no interval


def test_the_picture_has_a_row_against_steps_and_one_against_seconds(courses, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(paired, "save", lambda figure, path, caption: kept.append(figure) or path)
    variants = summarize(courses, target=0.8)
    draw(variants, tmp_path / "picture.png", "caption")
    (figure,) = kept
    assert [axes.get_xlabel() for axes in figure.axes] == ["step (updates)"] * 4 + ["seconds of training"] * 4
    assert [axes.get_ylabel() for axes in figure.axes[:4]] == [
        "held-out accuracy, sampled at T = 1",
        "mean response length (tokens)",
        "entropy (nats a token)",
        "KL within a batch (nats a token)",
    ]
    for axes in figure.axes:
        assert [line.get_label() for line in axes.get_lines()] == ["a", "b"]
    assert [axes.get_ylim() for axes in figure.axes[:4]] == [  # the means decide, not their intervals
        (0, 1.02),
        (0, pytest.approx(1.3 * 13)),
        (0, pytest.approx(1.3 * 1.0)),
        (0, pytest.approx(1.3e-4)),  # a KL of 0 is a line at the bottom, not noise
    ]
    x, y = figure.axes[0].get_lines()[1].get_data()
    assert np.array_equal(x, [0, 2, 4]) and y[-1] == pytest.approx(2.5 / 3, rel=1e-5)
    plt.close(figure)
