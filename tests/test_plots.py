"""The curves show what the run wrote, whatever stage it is in."""

import json
import math
import runpy
import sys

import matplotlib.pyplot as plt
import pytest

from nanorl.plots import draw_curves, evaluations, read_metrics

PNG = b"\x89PNG\r\n\x1a\n"


def evaluation(accuracy: float, length: float) -> dict:
    found = {"accuracy": accuracy, "accuracy_greedy": accuracy / 2, "mean_length": length}
    for name in ("accuracy", "accuracy_greedy"):
        found |= {f"{name}_low": found[name] - 0.05, f"{name}_high": found[name] + 0.05}
    return found


def line(step: int, **changes) -> dict:
    metrics = {"reward": step / 10, "reward_std": 0.4, "length": 5.0 + step, "entropy": 1.0 - step / 10, "thinks": 0.3}
    return {"step": step} | metrics | changes


def write_run(out, lines: list[dict], summary: dict | None = None):
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "config.json").write_text(json.dumps({"command": ["/where/it/lies/train_grpo.py", "--seed", "3"]}))
    if summary:
        (out / "summary.json").write_text(json.dumps(summary))
    return out


@pytest.fixture
def drawn(monkeypatch):
    """draw_curves(out), then the figure it made: {label of the y axis: {label of the line: (x, y)}} and its title."""
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)

    def draw(out):
        path = draw_curves(out)
        assert path == out / "curves.png" and path.read_bytes().startswith(PNG)
        figure = figures[-1]
        panels = {}
        for axes in figure.axes:
            lines = {curve.get_label(): tuple(map(list, curve.get_data(orig=False))) for curve in axes.get_lines()}
            panels[axes.get_ylabel()] = lines
        assert figure.get_supxlabel() == "Drawn by: python train_grpo.py --seed 3"
        return panels, figure.get_suptitle()

    yield draw
    monkeypatch.undo()
    for figure in figures:
        plt.close(figure)


FINISHED = [
    line(0, eval=evaluation(0.3, 6)),
    line(1),
    line(2, eval=evaluation(0.6, 9)),
]
SUMMARY = {"steps": 3, "eval_after": evaluation(0.9, 20)}


def test_a_finished_run_shows_every_step_and_every_evaluation(drawn, tmp_path):
    panels, title = drawn(write_run(tmp_path, FINISHED, SUMMARY))
    accuracy = panels["accuracy (95 % interval)"]
    assert accuracy["mean reward, training batch"] == ([0, 1, 2], [0.0, 0.1, 0.2])
    assert accuracy["held out, T = 1"] == ([0, 2, 3], [0.3, 0.6, 0.9])  # the last one after the last update
    assert accuracy["held out, greedy"] == ([0, 2, 3], [0.15, 0.3, 0.45])
    ((x, y),) = panels["mean response length (tokens)"].values()
    assert (x, y) == ([0, 1, 2], [5.0, 6.0, 7.0])
    ((_, entropy),) = panels["entropy (nats a token)"].values()
    assert entropy == [1.0, 0.9, 0.8]
    ((_, thinks),) = panels["share of responses that think"].values()
    assert thinks == [0.3, 0.3, 0.3]
    assert "0.30 -> 0.90" in title and "6 -> 20 tokens" in title


def test_a_task_without_thinking_shows_the_spread_of_rewards(drawn, tmp_path):
    lines = [{key: value for key, value in metrics.items() if key != "thinks"} for metrics in FINISHED]
    panels, _ = drawn(write_run(tmp_path, lines, SUMMARY))
    ((_, spread),) = panels["standard deviation of the reward"].values()
    assert spread == [0.4, 0.4, 0.4]


def preferred(gold: float, proxy: float, kl: float, **changes) -> dict:
    found = {"gold": gold, "gold_low": gold - 0.25, "gold_high": gold + 0.25, "proxy": proxy, "kl": kl}
    return found | {"mean_length": 8 + kl} | changes


def without(line: dict, *names: str) -> dict:
    return {name: value for name, value in line.items() if name not in names}


def test_where_nothing_is_verified_gold_stands_beside_the_proxy_and_kl_below(drawn, tmp_path):
    """As train_ppo.py logs it: no reward, no thinking."""
    lines = [
        without(line(step, **more), "reward", "reward_std", "thinks")
        for step, more in enumerate([{"eval": preferred(-0.5, 0, 0)}, {}, {"eval": preferred(1, 2, 3)}])
    ]
    summary = {"steps": 3, "eval_after": preferred(0.5, 4, 9)}
    panels, title = drawn(write_run(tmp_path, lines, summary))
    scores = panels["held-out score (95 % interval)"]
    assert scores["gold: hidden, what is wanted"] == ([0, 2, 3], [-0.5, 1, 0.5])
    assert scores["proxy: what is trained on"] == ([0, 2, 3], [0, 2, 4])
    ((x, y),) = panels["KL to the warm start (nats a response)"].values()
    assert (x, y) == ([0, 2, 3], [0, 3, 9])
    ((x, y),) = panels["mean response length (tokens)"].values()
    assert (x, y) == ([0, 1, 2], [5.0, 6.0, 7.0])
    assert "entropy (nats a token)" in panels
    assert "Held-out gold -0.50 -> 0.50" in title and "8 -> 17 tokens" in title


def test_where_there_is_no_reward_model_the_curve_is_not_called_what_is_trained_on(drawn, tmp_path):
    """DPO's evaluation: that of the pairs is in it."""
    points = [{"eval": preferred(-0.5, 0, 0, pair_accuracy=0.5)}, {"eval": preferred(1, 2, 3, pair_accuracy=0.8)}]
    panels, _ = drawn(write_run(tmp_path, [line(step, **point) for step, point in enumerate(points)]))
    labels = {"gold: hidden, what is wanted", "reward the policy implies: beta log(pi / pi_ref)"}
    assert {name for name in panels["held-out score (95 % interval)"] if not name.startswith("_")} == labels


def test_a_run_that_samples_nothing_shows_the_lengths_of_its_evaluations_and_its_loss(drawn, tmp_path):
    """As train_dpo.py logs it."""
    evaluated = [{"eval": preferred(-0.5, 0, 0)}, {}, {"eval": preferred(1, 2, 3)}]
    lines = [{"step": step, "loss": 0.7 - step / 10, "accuracy": 0.5} | more for step, more in enumerate(evaluated)]
    panels, _ = drawn(write_run(tmp_path, lines))
    ((x, y),) = panels["mean response length (tokens)"].values()
    assert (x, y) == ([0, 2], [8, 11])
    ((x, y),) = panels["loss (nats a pair)"].values()
    assert (x, y) == ([0, 1, 2], pytest.approx([0.7, 0.6, 0.5]))


def test_an_interval_without_bounds_is_left_out_of_the_picture(drawn, tmp_path):
    """One response has none: null in the files."""
    wide = preferred(1, 2, 3, gold_low=None, gold_high=None)
    panels, _ = drawn(write_run(tmp_path, [line(0, eval=wide)], {"steps": 1, "eval_after": wide}))
    assert panels["held-out score (95 % interval)"]["gold: hidden, what is wanted"] == ([0, 1], [1, 1])


def test_a_run_that_is_still_going_can_be_drawn(drawn, tmp_path):
    panels, title = drawn(write_run(tmp_path, FINISHED))
    assert panels["accuracy (95 % interval)"]["held out, T = 1"][0] == [0, 2]
    assert "0.30 -> 0.60" in title


def test_one_step_is_enough_for_a_picture(drawn, tmp_path):
    drawn(write_run(tmp_path, FINISHED[:1]))


def test_a_value_that_was_not_finite_leaves_a_gap(drawn, tmp_path):
    lines = [line(0), line(1, entropy=None, reward=None), line(2)]
    panels, _ = drawn(write_run(tmp_path, lines))
    ((_, entropy),) = panels["entropy (nats a token)"].values()
    assert entropy[0] == 1.0 and math.isnan(entropy[1]) and entropy[2] == 0.8


def test_metrics_and_evaluations_are_read_as_they_were_written(tmp_path):
    write_run(tmp_path, FINISHED, SUMMARY)
    assert read_metrics(tmp_path) == FINISHED
    points = evaluations(tmp_path, FINISHED)
    assert points == [(0, evaluation(0.3, 6)), (2, evaluation(0.6, 9)), (3, evaluation(0.9, 20))]


def plots_command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["plots.py", *map(str, arguments)])
    monkeypatch.delitem(sys.modules, "nanorl.plots")  # runpy warns about modules that are there already
    runpy.run_module("nanorl.plots", run_name="__main__")


def test_the_command_draws_a_run_again(monkeypatch, tmp_path, capsys):
    plots_command(monkeypatch, write_run(tmp_path, FINISHED, SUMMARY))
    assert capsys.readouterr().out.strip() == str(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["a", "b"]])
def test_the_command_says_how_it_is_used(monkeypatch, arguments):
    with pytest.raises(SystemExit, match=r"usage: python -m nanorl\.plots RUN_FOLDER"):
        plots_command(monkeypatch, *arguments)
