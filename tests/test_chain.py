"""Chain arithmetic: problems, demonstrations and a verifier that cannot be talked round."""

import itertools
import re

import pytest

from nanorl.tasks import TASKS
from nanorl.tasks.chain import ChainArithmetic, is_held_out, think, work_out
from nanorl.tasks.task import Problem

TASK = ChainArithmetic()
EXAMPLE = Problem("3+4*2-5*7+1=", "4")
PROBLEMS = TASK.training_problems(300, "a test")


def from_left_to_right(prompt: str) -> list[int]:
    """The value after each operation, by Python's own arithmetic and taken modulo 10 at the very end."""
    expression, values = prompt[0], []
    for operation in re.findall(r"[+*-]\d", prompt):
        expression = f"({expression}){operation}"
        values.append(eval(expression) % 10)
    return values


def test_the_documented_example_is_worked_out_right():
    assert work_out(EXAMPLE.prompt) == ["7", "4", "9", "3", "4"]
    assert think(EXAMPLE.prompt) == "<3+4=7*2=4-5=9*7=3+1=4>"
    assert work_out("1-9=") == ["2"]
    assert think("1-9=") == "<1-9=2>"


def test_every_step_agrees_with_an_independent_evaluator():
    for problem in PROBLEMS:
        values = from_left_to_right(problem.prompt)
        assert work_out(problem.prompt) == [str(value) for value in values]
        assert problem.answer == str(values[-1])


def test_thinking_writes_each_step_of_the_problem_in_its_order():
    for problem in PROBLEMS:
        thought = re.fullmatch(r"<(\d)((?:[+*-]\d=\d)+)>", think(problem.prompt))
        steps = re.findall(r"([+*-]\d)=(\d)", thought[2])
        assert thought[1] + "".join(step for step, _ in steps) + "=" == problem.prompt
        assert [int(value) for _, value in steps] == from_left_to_right(problem.prompt)


def test_a_problem_is_a_chain_of_six_digits_from_1_to_9():
    assert all(re.fullmatch(r"[1-9]([+*-][1-9]){5}=", problem.prompt) for problem in PROBLEMS)
    text = "".join(problem.prompt for problem in PROBLEMS)
    assert set(text) == set("123456789+*-=")
    assert {problem.answer for problem in PROBLEMS} == set("0123456789")


# ---- which problems


def test_held_out_problems_are_never_training_problems():
    held_out = {problem.prompt for problem in TASK.held_out_problems(512)}
    assert len(held_out) == 512
    training = {p.prompt for step in range(100) for p in TASK.training_problems(96, f"sft 0 {step}")}
    training |= {p.prompt for step in range(100) for p in TASK.training_problems(16, f"grpo 0 {step}")}
    assert len(training) > 10_000 and not training & held_out
    # Not by luck: the sides are told apart by the problem's text.
    assert all(is_held_out(Problem(prompt, "")) for prompt in held_out)
    assert not any(is_held_out(Problem(prompt, "")) for prompt in training)


def test_one_problem_in_eight_is_held_out():
    chains = [
        f"{a}+{b}*{c}-{d}+{d}*{e}=" for a, b, c, d, e in itertools.product("123", "456", "789", "123456789", "1278")
    ]
    share = sum(is_held_out(Problem(chain, "")) for chain in chains) / len(chains)
    assert abs(share - 1 / 8) < 0.035  # three standard deviations of 972 draws


def test_the_same_key_gives_the_same_problems_in_every_process():
    assert TASK.training_problems(16, "grpo 0 3") == ChainArithmetic().training_problems(16, "grpo 0 3")
    # Written down once: nothing may depend on the process, on hash seeds or on what was drawn before.
    training = [problem.prompt for problem in TASK.training_problems(3, "grpo 0 0")]
    assert training == ["9-9-9+1*4+9=", "7-1-2+1+8*8=", "2+6+4-4+5-4="]
    held_out = [problem.prompt for problem in TASK.held_out_problems(3)]
    assert held_out == ["2-3+3-1-5*1=", "2*7-2*1+1*5=", "8*4+3*2-8*7="]


def test_another_key_gives_other_problems():
    keys = ["grpo 0 3", "grpo 0 4", "grpo 1 3", "sft 0 3"]
    prompts = [{problem.prompt for problem in TASK.training_problems(16, key)} for key in keys]
    assert not any(a & b for i, a in enumerate(prompts) for b in prompts[:i])


def test_a_batch_holds_no_problem_twice_and_a_smaller_one_is_its_beginning():
    for draw in (TASK.held_out_problems, lambda n: TASK.training_problems(n, "key")):
        problems = draw(200)
        assert len({problem.prompt for problem in problems}) == 200
        assert draw(20) == problems[:20]


# ---- demonstrations


def test_every_demonstration_is_right():
    assert all(TASK.reward(problem, TASK.demonstration(problem, "key")) == 1 for problem in PROBLEMS)


def test_a_demonstration_thinks_or_answers_at_once_with_an_empty_thought():
    for problem in PROBLEMS:
        text = TASK.demonstration(problem, "key")
        assert text in (f">{problem.answer}", think(problem.prompt) + problem.answer)


def test_about_three_demonstrations_in_ten_think():
    problems = TASK.training_problems(4000, "many")
    share = sum(TASK.demonstration(problem, "many").startswith("<") for problem in problems) / 4000
    assert abs(share - 0.28) < 0.022  # three standard deviations


def test_a_demonstration_depends_on_problem_and_key_alone():
    texts = {key: [TASK.demonstration(problem, key) for problem in PROBLEMS] for key in ("one", "two")}
    assert texts["one"] == [TASK.demonstration(problem, "one") for problem in reversed(PROBLEMS)][::-1]
    assert texts["one"] != texts["two"]


def test_prompts_and_the_longest_demonstration_fit_and_can_be_encoded():
    for problem in PROBLEMS:
        assert len(TASK.tokenizer.encode_prompt(problem.prompt)) == TASK.max_prompt_tokens
        response = TASK.tokenizer.encode_response(think(problem.prompt) + problem.answer)
        assert len(response) <= TASK.max_new_tokens
        assert TASK.tokenizer.decode(response[:-1]) == think(problem.prompt) + problem.answer


# ---- the verifier


@pytest.mark.parametrize(
    "response",
    [">4", "<3+4=7*2=4-5=9*7=3+1=4>4", "<>4", ">>4", ">5>4", "<3+4=0>4", "44444>4", "=>4"],
)
def test_the_right_digit_behind_the_last_mark_is_right_whatever_stands_before_it(response):
    assert TASK.reward(EXAMPLE, response) == 1


@pytest.mark.parametrize(
    "response",
    [
        "",
        "4",
        "44",
        "=4",
        "<4",
        "<3+4=7*2=4-5=9*7=3+1=4",  # all of the thinking, no closing mark: the hack that GRPO finds by itself
        "<3+4=7*2=4-5=9*7=3+1=4<4",
        ">",
        "4>",
        ">4>",
        ">4>5",
        ">5",
        ">5<4",
        ">44",
        ">04",
        ">4=4",
        ">=4",
        ">+4",
        ">-4",
        ">0+4",
        ">4+0",
        ">14",
        "> 4",
        ">4 ",
        ">4\n",
        ">4.0",
        ">4<eos>",
        ">\uff14",  # a full-width digit
        ">\u0664",  # an Arabic-Indic digit
        ">4\u200b",  # a space of no width
        ">0123456789",
        ">three plus one",
    ],
)
def test_anything_else_behind_the_last_mark_is_wrong(response):
    assert TASK.reward(EXAMPLE, response) == 0


def test_of_the_ten_answers_one_is_right():
    for problem in PROBLEMS[:50]:
        right = [digit for digit in "0123456789" if TASK.reward(problem, f">{digit}")]
        assert right == [problem.answer]


def test_thinking_is_what_starts_with_the_opening_mark():
    texts = {"<3+4=7": 1.0, "<": 1.0, ">4": 0.0, "": 0.0, "4<": 0.0}
    assert {text: TASK.describe(EXAMPLE, text)["thinks"] for text in texts} == texts


def test_the_task_is_known_by_its_name():
    assert TASKS["chain"] is ChainArithmetic
