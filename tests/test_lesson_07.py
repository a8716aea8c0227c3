"""Lesson 07: its numbers are those of the code, its runs say what it says of them, its checks refuse wrong answers."""

import functools
import itertools
import math
import re
import warnings
from pathlib import Path

import pytest
import torch

from nanorl.advantages import group_advantages
from nanorl.algorithms import ALGORITHMS
from nanorl.from_trl import read, translate
from nanorl.losses import dapo_loss, dr_grpo_loss, grpo_loss
from nanorl.own_loss import with_own_loss

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "07_dr_grpo"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


def rows_of(start: str, page: str = README) -> list[list[list[float]]]:
    """The numbers of the cells behind the first one, in the table rows whose first cell is `start`."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    number = r"[-+]?\d+(?:\.\d+)?"
    return [
        [[float(x) for x in re.findall(number, cell)] for cell in row[1:]] for row in rows if row[0].strip() == start
    ]


def section(name: str) -> str:
    return README.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]


def gradient(loss, lengths: list[int], advantages: list[float], **options) -> tuple[float, list[float]]:
    """The loss at ratio 1, and its gradient on the first token of each response."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    logprobs = torch.full(mask.shape, -1.0, dtype=torch.float64, requires_grad=True)
    value, _ = loss(logprobs, logprobs.detach(), torch.tensor(advantages, dtype=torch.float64), mask, **options)
    found = torch.autograd.grad(value, logprobs)[0]
    assert torch.equal(found != 0, mask)
    return value.item(), found[:, 0].tolist()


def filler(stop: float, limit: int) -> list[tuple[float, float, int]]:
    """Of every response of a digit and at most `limit` decisions: probability, d log p / dz by autograd, tokens."""
    z = torch.tensor(math.log((1 - stop) / stop), dtype=torch.float64, requires_grad=True)
    go_on, end = torch.nn.functional.logsigmoid(z), torch.nn.functional.logsigmoid(-z)
    responses = []
    for decisions in itertools.chain(((1,) * n + (0,) for n in range(limit)), [(1,) * limit]):
        logprob = sum(go_on if decision else end for decision in decisions)
        (score,) = torch.autograd.grad(logprob, z, retain_graph=True)
        responses.append((logprob.exp().item(), score.item(), 1 + len(decisions)))
    return responses


# ---- the length bias


def test_by_hand_a_token_of_a_long_wrong_answer_is_punished_less_and_by_dr_grpo_the_same():
    lengths, advantages = [2, 10], [1.0, -1.0]
    _, grpo = gradient(grpo_loss, lengths, advantages)
    _, dr_grpo = gradient(dr_grpo_loss, lengths, advantages, max_length=64)
    _, short = gradient(grpo_loss, [2, 2], advantages)
    (right,), (long_wrong, short_wrong) = rows_of("right"), rows_of("wrong")
    assert [right[1][0], long_wrong[1][0], short_wrong[1][0]] == pytest.approx([*grpo, short[1]], abs=5e-7)
    assert [right[2][0], long_wrong[2][0], short_wrong[2][0]] == pytest.approx([*dr_grpo, dr_grpo[1]], abs=5e-7)


@pytest.mark.parametrize("stop", [0.9, 0.5, 0.2, 0.1, 0.02])
def test_the_table_of_pushes_is_what_adding_up_all_responses_gives(stop):
    responses = filler(stop, limit=60 if stop > 0.1 else 200 if stop == 0.1 else 1200)
    assert sum(p for p, _, _ in responses) == pytest.approx(1)
    ((length, up, down),) = rows_of(f"{stop:g}")
    assert sum(p * tokens for p, _, tokens in responses) == pytest.approx(length[0], abs=0.05)
    push = sum(p * score / tokens for p, score, tokens in responses)
    assert [push, -push] == pytest.approx([up[0], down[0]], abs=1e-4)
    assert sum(p * score for p, score, _ in responses) == pytest.approx(0, abs=1e-9)  # divided by a constant


@pytest.mark.parametrize("limit", [2, 3, 8, 62])
def test_a_limit_changes_neither_the_zero_nor_the_sign(limit):
    for stop in (0.02, 0.2, 0.9):
        responses = filler(stop, limit)
        assert sum(p * score for p, score, _ in responses) == pytest.approx(0, abs=1e-12)
        assert sum(p * score / tokens for p, score, tokens in responses) < -1e-4


def test_the_expected_gradient_of_the_losses_themselves_pushes_as_the_formula_says():
    stop, limit, advantage = 0.2, 40, -1.0
    z = torch.tensor(math.log((1 - stop) / stop), dtype=torch.float64, requires_grad=True)
    go_on, end = torch.nn.functional.logsigmoid(z), torch.nn.functional.logsigmoid(-z)
    pushes = {grpo_loss: 0.0, dr_grpo_loss: 0.0}
    for loss, options in ((grpo_loss, {}), (dr_grpo_loss, {"max_length": 64})):
        for fillers in range(limit + 1):
            tokens = [
                torch.zeros((), dtype=torch.float64),
                *[go_on] * fillers,
                *[end] * (fillers < limit),
            ]  # digit first
            logprobs = torch.stack(tokens)[None]
            inputs = (logprobs.detach(), torch.tensor([advantage]).double(), torch.ones_like(logprobs))
            value, _ = loss(logprobs, *inputs, **options)
            (found,) = torch.autograd.grad(value, z, retain_graph=True)
            pushes[loss] -= logprobs.sum().exp().item() * found.item()
    assert pushes[grpo_loss] == pytest.approx(0.1035, abs=1e-4)  # going on becomes likelier
    assert pushes[dr_grpo_loss] == pytest.approx(0, abs=1e-12)


# ---- the difficulty bias


@pytest.mark.parametrize("right", range(9))
def test_weights_of_groups_in_the_table(right):
    ((grpo, dr_grpo, *_),) = rows_of(f"{right}", section("groups"))
    rewards = [1.0] * right + [0.0] * (8 - right)
    p = right / 8
    assert dr_grpo[0] == pytest.approx(2 * p * (1 - p), abs=6e-4)
    for scale, (shown,) in (("group", grpo), ("none", dr_grpo)):
        advantages = group_advantages(torch.tensor(rewards), torch.zeros(8, dtype=torch.long), scale=scale)
        assert advantages.abs().mean().item() == pytest.approx(shown, abs=6e-4)


def test_each_share_in_the_table_of_groups_follows_from_the_others():
    rows = [rows_of(f"{n}", section("groups"))[0] for n in range(9)]
    for column, weight in ((3, 0), (4, 1)):
        total = sum(row[2][0] * row[weight][0] for row in rows)
        for row in rows:
            assert row[column][0] == pytest.approx(100 * row[2][0] * row[weight][0] / total, abs=0.1)
    assert "0.66 of the weight of one with 4 of 8 under GRPO, and 0.44 under Dr. GRPO" in PROSE
    assert [round(rows[1][i][0] / rows[4][i][0], 2) for i in (0, 1)] == [0.66, 0.44]


def test_factors_on_the_gradient_of_a_problems_accuracy():
    """E[1/G sum_i A_i d log p(o_i)] over all groups; d log p is dp / p if right, -dp / (1 - p) if wrong."""
    shown = {name: rows_of(name)[0] for name in ("Dr. GRPO", "GRPO", "GRPO, infinite groups")}
    factors = []
    for i, p in enumerate((0.01, 0.1, 0.25, 0.5, 0.9)):
        for name, scale in (("Dr. GRPO", "none"), ("GRPO", "group")):
            factor = 0.0
            for right in range(9):
                rewards = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64)
                advantages = group_advantages(rewards, torch.zeros(8, dtype=torch.long), scale=scale)
                score = torch.where(rewards == 1, 1 / p, -1 / (1 - p))
                factor += math.comb(8, right) * p**right * (1 - p) ** (8 - right) * (advantages * score).mean().item()
            assert factor == pytest.approx(shown[name][i][0], abs=6e-4)
            factors += [factor] * (scale == "group")
        assert 1 / math.sqrt(p * (1 - p)) == pytest.approx(shown["GRPO, infinite groups"][i][0], abs=6e-4)
    assert "at most a factor of 1.43" in PROSE
    limit = 7 / 8 / math.sqrt(1 / 8)  # p to 0: the groups that count have one right answer
    assert max(factors) < limit and round(limit / min(factors), 2) == 1.43


# ---- the files, other frameworks, traps, questions


@pytest.mark.parametrize(
    "spec, loss, scale",
    [
        ("only_length.py:dr_grpo_loss", dr_grpo_loss, "group"),
        ("only_std.py:grpo_loss", grpo_loss, "none"),
        ("batch_std.py:dr_grpo_loss", dr_grpo_loss, "batch"),
    ],
)
def test_the_files_of_the_lesson_differ_from_the_rows_in_one_choice(spec, loss, scale):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = with_own_loss(ALGORITHMS["grpo"], str(LESSON / spec))
    assert (row.loss.__wrapped__, row.advantage_scale, row.mean_over) == (loss, scale, "sequences")


def test_trl_configuration_shown_is_dr_grpo_here_and_the_loss_type_alone_is_half_of_it(tmp_path):
    (tmp_path / "config").write_text(re.search(r"GRPOConfig\(\n.*?\n\)\n", README, re.S)[0])
    result = translate(read(tmp_path / "config"))
    assert {"algo": "dr_grpo", "max_new_tokens": 64}.items() <= result.flags.items() and result.without == {}
    assert "scale_rewards" in translate({"loss_type": "dr_grpo"}).without
    assert (ALGORITHMS["dr_grpo"].loss, ALGORITHMS["dr_grpo"].advantage_scale) == (dr_grpo_loss, "none")


def test_trap_a2_the_divisors_of_the_traps():
    losses, mask = torch.tensor([[1.0, 1, 1, 1], [3, 0, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    for width in (4, 7):
        advantages, padded = (torch.nn.functional.pad(x, (0, width - 4)) for x in (-losses, mask))
        logprobs = torch.full((2, width), -1.0)  # at ratio 1 a token's loss is minus its advantage
        assert dr_grpo_loss(logprobs, logprobs, advantages, padded, max_length=4)[0].item() == pytest.approx(0.875)
        assert dapo_loss(logprobs, logprobs, advantages, padded)[0].item() == pytest.approx(1.4)
        assert grpo_loss(logprobs, logprobs, advantages, padded)[0].item() == pytest.approx(2.0)
    assert "**0.875**" in PROSE and "it becomes 7 / (2 x 7) = 0.5" in PROSE and "responses: 1.75" in PROSE


def test_a_batch_with_one_wrong_answer_has_large_advantages():
    rewards, groups = torch.ones(128), torch.arange(16).repeat_interleave(8)
    rewards[0] = 0
    assert round(rewards.std().item(), 3) == 0.088
    assert group_advantages(rewards, groups, scale="batch").abs().max().item() == pytest.approx(10, abs=0.15)


def test_the_answers_behind_the_questions():
    loss, found = gradient(dr_grpo_loss, [2, 10, 10, 10], [0.75, -0.25, -0.25, -0.25], max_length=64)
    assert found == pytest.approx([-0.0029297, *[0.00097656] * 3], abs=5e-8)
    assert loss == pytest.approx(6 / 256) and round(loss, 4) == 0.0234
    _, tokens = gradient(dapo_loss, [2, 10], [1.0, -1.0])
    assert tokens[0] == pytest.approx(-tokens[1])


def test_what_the_lesson_says_of_its_runs_stands_in_their_tables():
    found, gaps = {}, {}
    for name, into in (("results", found), ("differences", gaps)):
        for line in section(name).splitlines()[3:]:
            label = line.strip("|").split("|")[0].strip()
            into[label] = rows_of(label, section(name))[0]
    wrong, apart, in_doubt, sure, accuracy = 0, 2, 3, 4, 5  # columns

    def says(text: str, *numbers: tuple[float, float]) -> None:
        """The text stands in the lesson; each number of the tables rounds to the one said."""
        assert text in PROSE
        for value, said in numbers:
            digits = len(f"{said}".partition(".")[2])
            assert round(value, digits) == said

    def beyond(label: str, column: int) -> bool:
        mean, half = gaps[label][column]
        return abs(mean) > half

    grpo, dr_grpo, fast, dr_fast = (
        found[name] for name in ("GRPO", "Dr. GRPO: neither", "GRPO, twice the rate", "Dr. GRPO, twice the rate")
    )
    says("from 6 to 14.5 tokens, under Dr. GRPO they stay at 6.8", (grpo[wrong][0], 14.5), (dr_grpo[wrong][0], 6.8))
    gap = gaps["Dr. GRPO: neither"]
    says("the difference, -7.7 ± 3.5, is well beyond", (gap[wrong][0], -7.7), (gap[wrong][1], 3.5))
    without_length = ("no division by length", "Dr. GRPO: neither", "Dr. GRPO, std of the batch")
    assert all(beyond(name, column) for name in without_length for column in (wrong, apart, in_doubt))
    assert not any(beyond("no division by std", column) for column in range(7))
    assert all(abs(mean) < 0.3 for mean, _ in gaps["no division by std"][: sure + 1])
    says("wrong minus right is 0.2 to 0.3 with an interval of 1: nothing")
    for name in without_length:
        mean, half = found[name][apart]
        assert round(mean, 1) in (0.2, 0.3) and round(half) == 1
    says("to 35 tokens, sure from 5.8 to 2.7", (grpo[in_doubt][0], 35), (grpo[sure][0], 2.7))
    says("at 57 of 64 tokens", (fast[in_doubt][0], 57))
    rows = [rows_of(f"{n}", section("groups"))[0] for n in (1, 7)]
    says(
        "17 % of GRPO's weight and 13 % of Dr. GRPO's",
        *((sum(r[i][0] for r in rows), x) for i, x in ((3, 17), (4, 13))),
    )
    no_std = gaps["no division by std"][accuracy]
    says("changes accuracy by +0.002 ± 0.011", (no_std[0], 0.002), (no_std[1], 0.011))
    for (mean, half), (other, _) in zip(dr_grpo, found["Dr. GRPO, std of the batch"], strict=True):
        assert abs(mean - other) < half / 10
    says("With Dr. GRPO it is +0.011 ± 0.016", (gap[accuracy][0], 0.011), (gap[accuracy][1], 0.016))
    assert not any(beyond(name, accuracy) for name in ("no division by std", *without_length))
    gap = gaps["Dr. GRPO, twice the rate"]
    says("twice the rate +0.023 ± 0.023", (gap[accuracy][0], 0.023), (gap[accuracy][1], 0.023))
    says("ends at 11.0 ± 6.5", (dr_fast[wrong][0], 11.0), (dr_fast[wrong][1], 6.5))
    says("-6.8 ± 8.2, drowns", (gap[wrong][0], -6.8), (gap[wrong][1], 8.2))
    says("-9.4 ± 5.8, does not", (gap[apart][0], -9.4), (gap[apart][1], 5.8))


# ---- exercises


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("centered_advantages", "rewards.mean(-1, keepdim=True)", "rewards.mean()"),
        ("centered_advantages", "rewards - rewards", "rewards / rewards"),
        ("batch_advantages", "(rewards.std() + eps)", "(centered_advantages(rewards).std() + eps)"),
        ("batch_advantages", "(rewards.std() + eps)", "(rewards.std(-1, keepdim=True) + eps)"),
        ("batch_advantages", "rewards.std()", "rewards.std(correction=0)"),
        ("batch_advantages", "centered_advantages(rewards)", "(rewards - rewards.mean())"),
        ("batch_advantages", " + eps", ""),
        ("dr_grpo_loss", "len(logprobs) * max_length", "max_length"),
        ("dr_grpo_loss", "len(logprobs) * max_length", "len(logprobs) * logprobs.shape[1]"),
        ("dr_grpo_loss", "len(logprobs) * max_length", "mask.sum()"),
        ("dr_grpo_loss", "old_logprobs.detach()", "old_logprobs"),
        (
            "dr_grpo_loss",
            "torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0)",
            "(logprobs - old_logprobs)",
        ),
        ("dr_grpo_loss", "torch.minimum(ratio * advantages, r", "torch.maximum(ratio * advantages, r"),
        ("dr_grpo_loss", "clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_high, 1 + clip_low)"),
        ("dr_grpo_loss", "return -torch", "return torch"),
        ("push_on_going_on", "fillers + 2 if", "fillers + 1 if"),
        ("push_on_going_on", "fillers * stop - (1 - stop)", "fillers * stop"),
        ("push_on_going_on", "total + cut_off / (limit + 1 if divide_by_length else 1)", "total"),
        ("push_on_going_on", "limit + 1 if", "limit + 2 if"),
        ("loss_that_minds_its_company", "longest = max_length", "longest = min(max_length, mask.shape[1])"),
        ("loss_that_minds_its_company", "longest = max_length", "longest = mask.sum(1).max()"),
        ("loss_that_minds_its_company", "sequences * longest", "len(logprobs) * longest"),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)


def test_the_silent_bug_hides_where_a_response_reaches_the_limit_and_shows_elsewhere(load):
    buggy = load("exercise").loss_that_minds_its_company
    mask = (torch.arange(5) < torch.tensor([5, 2])[:, None]).double()
    logprobs = torch.full((2, 5), -1.0, dtype=torch.float64)
    advantages = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for limit, agrees in ((5, True), (8, False)):
        want, _ = dr_grpo_loss(logprobs, logprobs, advantages, mask, max_length=limit)
        found = buggy(logprobs, logprobs, advantages, mask, limit, 2)
        assert torch.isclose(found, want).item() is agrees
