"""The task whose length is free: the verifier reads the digit alone, and demonstrations' lengths depend on nothing."""

import math

import pytest
import torch

from nanorl.batch_metrics import lengths_by_answer
from nanorl.evaluation import grade
from nanorl.rollout import Rollout
from nanorl.tasks import TASKS
from nanorl.tasks.free_length import FreeLength
from nanorl.tasks.task import Problem

TASK = FreeLength()
EXAMPLE = Problem("3+4=7*2=", "4")
PROBLEMS = TASK.training_problems(2000, "a test")
SHOWN = [(problem, TASK.demonstration(problem, "a test")) for problem in PROBLEMS]


@pytest.mark.parametrize("response", ["4", "4.", "4" + 62 * ".", "4~", "4~~~~", "4.~.", "4~.."])
def test_the_right_digit_is_right_whatever_filler_stands_behind_it(response):
    assert TASK.reward(EXAMPLE, response) == 1


@pytest.mark.parametrize(
    "response",
    ["", ".", "~~", "5", "5....", ".4", "~4", "44", "4.4", "4.5", "4=", "=4", "4 ", "4.\n", "04", "4,", "\u0664"],
)
def test_anything_else_is_wrong(response):
    assert TASK.reward(EXAMPLE, response) == 0


def test_a_problem_is_a_chain_with_its_steps_written_out_but_for_the_last_result():
    assert len({problem.prompt for problem in PROBLEMS}) == len(PROBLEMS)
    for problem in PROBLEMS:
        first, second, rest = problem.prompt.split("=")
        assert rest == "" and len(problem.prompt) == TASK.max_prompt_tokens
        assert int(second[0]) == eval(first) % 10
        assert int(problem.answer) == eval(second) % 10


def test_no_held_out_problem_is_ever_trained_on_and_there_are_enough_for_an_evaluation():
    held_out = {problem.prompt for problem in TASK.held_out_problems(512)}
    assert len(held_out) == 512
    assert held_out == {problem.prompt for problem in TASK.held_out_problems(512)}
    assert not held_out & {problem.prompt for problem in PROBLEMS}


def test_right_digits_are_followed_by_dots_and_wrong_ones_by_tildes():
    right = [TASK.reward(problem, text) == 1 for problem, text in SHOWN]
    assert sum(right) / len(right) == pytest.approx(0.7, abs=3 * math.sqrt(0.7 * 0.3 / len(right)))
    for (problem, text), good in zip(SHOWN, right, strict=True):
        assert set(text[1:]) <= {"." if good else "~"}
        assert TASK.describe(problem, text) == {"in_doubt": float("~" in text)}
    wrong = {(int(text[0]) - int(problem.answer)) % 10 for problem, text in SHOWN if text[0] != problem.answer}
    assert wrong == set(range(1, 10))


def test_the_filler_of_demonstrations_is_geometric_and_the_same_behind_right_and_wrong_digits():
    stop = 1 / 5
    for good in (True, False):
        lengths = [len(text) - 1 for problem, text in SHOWN if (text[0] == problem.answer) == good]
        spread = math.sqrt(1 - stop) / stop / math.sqrt(len(lengths))  # of the mean
        assert sum(lengths) / len(lengths) == pytest.approx(4.0, abs=3 * spread)
        none = lengths.count(0) / len(lengths)
        assert none == pytest.approx(stop, abs=3 * math.sqrt(stop * (1 - stop) / len(lengths)))


def test_a_demonstration_fits_with_its_stop_token_and_is_a_function_of_its_arguments(monkeypatch):
    monkeypatch.setattr("nanorl.tasks.free_length.STOP", 0.0)
    text = TASK.demonstration(EXAMPLE, "a test")
    assert len(TASK.tokenizer.encode_response(text)) == TASK.max_new_tokens
    assert text == TASK.demonstration(EXAMPLE, "a test")
    assert len({TASK.demonstration(EXAMPLE, f"{n}")[0] for n in range(30)}) > 1


def test_the_task_is_known_by_its_name():
    assert TASKS["free_length"] is FreeLength


def test_lengths_are_told_apart_by_the_answer_and_missing_ones_are_no_number():
    texts = ["4..", "4", "5~~~~", "7"]
    rollout = Rollout.from_responses([[1]] * 4, [TASK.tokenizer.encode_response(text) for text in texts])
    rollout.groups = torch.zeros(4, dtype=torch.long)
    rewards, described = grade(TASK, [EXAMPLE], rollout)
    assert (rewards, described) == ([1, 1, 0, 0], {"in_doubt": [0, 0, 1, 0]})
    found = lengths_by_answer(torch.tensor(rewards), rollout.lengths)
    assert found == {"length_right": 3.0, "length_wrong": 4.0}  # with the stop token: (4 + 2) / 2 and (6 + 2) / 2
    none_right = lengths_by_answer(torch.tensor([0.0, 0.5]), torch.tensor([3, 5]))  # half a reward is not right
    assert none_right["length_wrong"] == 4.0 and math.isnan(none_right["length_right"])
