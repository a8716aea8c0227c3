"""Lesson 08: its numbers are those of the code, and its checks refuse wrong answers."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import train_grpo
from nanorl.advantages import group_advantages, teaching_groups
from nanorl.algorithms import ALGORITHMS, EXTRAS
from nanorl.from_trl import translate
from nanorl.losses import dapo_loss, grpo_loss
from nanorl.rewards.overlong import overlong_penalty

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "08_dapo"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


def rows_of(start: str) -> list[list[list[float]]]:
    """The numbers of the cells behind the first one, of each table row whose first cell is `start`."""
    rows = [line.strip("|").split("|") for line in README.splitlines() if line.startswith("|")]
    number = re.compile(r"[-+]?\d+(?:\.\d+)?")
    return [
        [[float(x) for x in number.findall(cell.replace(",", ""))] for cell in row[1:]]
        for row in rows
        if row[0].strip() == start
    ]


def row_of(start: str) -> list[list[float]]:
    (row,) = rows_of(start)
    return row


def gradient_at_ratio_1(loss, advantages: list[float], mask: Tensor, **options) -> Tensor:
    logprobs = torch.full(mask.shape, -1.0, dtype=torch.float64, requires_grad=True)
    value, _ = loss(logprobs, logprobs.detach(), torch.tensor(advantages, dtype=torch.float64), mask, **options)
    return torch.autograd.grad(value, logprobs)[0]


def mask_of(*lengths: int) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def test_the_parts_of_dapo_are_what_the_table_says_and_are_switched_off_by_its_options():
    dapo = ALGORITHMS["dapo"]
    assert set(dapo.extras) == set(EXTRAS) == {"dynamic_sampling", "overlong_penalty", "overlong_filtering"}
    assert all(f"`--extras` without `{name}`" in README for name in EXTRAS)
    assert (dapo.mean_over, ALGORITHMS["grpo"].mean_over) == ("tokens", "sequences")
    assert f"`--algo grpo --clip-high 0.28 --extras {' '.join(dapo.extras)}`" in README


@pytest.mark.parametrize("p", [0.9, 0.5, 0.01])
def test_how_far_a_probability_may_rise_before_its_gradient_ends(p):
    (at_most,), (room,), (at_most_higher,), (room_higher,) = row_of(f"{p:g}")
    for high, shown, shown_room in ((0.2, at_most, room), (0.28, at_most_higher, room_higher)):
        assert shown - p == pytest.approx(shown_room, abs=1e-12)
        old = torch.tensor([[math.log(p)]], dtype=torch.float64)
        for beyond in (-1e-6, 1e-6):
            if shown + beyond > 1:
                continue  # no probability
            logprobs = torch.tensor([[math.log(shown + beyond)]], dtype=torch.float64, requires_grad=True)
            loss, _ = dapo_loss(logprobs, old, torch.ones(1), torch.ones(1, 1), clip_high=high)
            assert bool(torch.autograd.grad(loss, logprobs)[0]) == (beyond < 0)


def test_batches_until_a_rare_token_passes_one_half():
    def batches(clip_high: float) -> int:
        p, n = 0.01, 0
        while p <= 0.5:
            p, n = p * (1 + clip_high), n + 1
        return n

    assert (batches(0.2), batches(0.28)) == (22, 16)
    assert "0.01 needs 22 batches to pass one half with 0.2, and 16 with 0.28" in PROSE


def test_gradients_of_a_long_wrong_response_among_short_right_ones():
    mask = mask_of(27, 3, 3, 3)
    advantages = [-1.5, 0.5, 0.5, 0.5]
    of_grpo, of_dapo = (gradient_at_ratio_1(loss, advantages, mask) for loss in (grpo_loss, dapo_loss))
    for start, row in (("27 tokens, wrong", 0), ("3 tokens, right", 1)):
        (advantage,), (sequence,), (token,) = row_of(start)
        assert advantage == advantages[row]
        assert of_grpo[row, 0].item() == pytest.approx(sequence, abs=5e-5)
        assert of_dapo[row, 0].item() == pytest.approx(token, abs=5e-5)


def test_the_papers_mean_by_prompt_and_the_mean_over_the_batch():
    mask, ones = mask_of(25, 25, 3, 3), [1.0] * 4
    whole = gradient_at_ratio_1(dapo_loss, ones, mask).abs()
    sequences = gradient_at_ratio_1(grpo_loss, ones, mask).abs()
    groups = [gradient_at_ratio_1(dapo_loss, ones[:2], mask[rows]).abs() / 2 for rows in (slice(0, 2), slice(2, 4))]
    for start, found in (
        ("the tokens of its own group, then prompts (the paper)", [group[0, 0] for group in groups]),
        ("the tokens of the batch (the frameworks)", [whole[0, 0], whole[2, 0]]),
        ("each response's own, then responses (GRPO)", [sequences[0, 0], sequences[2, 0]]),
    ):
        shown = [cell[0] for cell in row_of(start)]
        assert [x.item() for x in found] == pytest.approx(shown, abs=5e-5)


def test_the_soft_penalty_at_the_lengths_of_the_table():
    for start in ("0", "-0.5", "-1"):
        paper, here = (int(cell[0]) for cell in row_of(start))
        of_paper = overlong_penalty(torch.tensor([paper, paper + 1]), 20_480, 4096)
        of_here = overlong_penalty(torch.tensor([here, here + 1]), 27)  # its own buffer, of 2
        assert of_paper[0] == of_here[0] == float(start)
        assert start == "-1" or (of_paper[1] < of_paper[0] and of_here[1] < of_here[0])


def test_an_overlong_penalty_within_a_group_of_right_responses_is_as_loud_as_a_wrong_answer():
    groups = torch.zeros(8, dtype=torch.long)
    found = group_advantages(torch.tensor([1.0] * 7 + [0.5]), groups)
    assert (round(found[0].item(), 2), round(found[7].item(), 2)) == (0.35, -2.47)
    assert "z-scores +0.35 and -2.47" in PROSE
    hundredth = group_advantages(torch.tensor([1.0] * 7 + [0.99]), groups)
    assert hundredth[7].item() == pytest.approx(-2.41, abs=0.005)  # eps shows a little
    assert len(teaching_groups(torch.ones(8), groups)) == 0  # by the verifier's rewards it is dropped


def test_trap_f2_the_loop_gives_up_after_the_rounds_that_the_lesson_names():
    assert f"`MAX_ROUNDS` = {train_grpo.MAX_ROUNDS}" in PROSE


def test_trap_a1_a_mean_in_each_micro_batch_gives_0_where_the_token_mean_is_one_half():
    mask, same = mask_of(2, 6), torch.full((2, 6), -1.0, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    whole, _ = dapo_loss(same, same, advantages, mask)
    parts = [
        [
            dapo_loss(same[i : i + 1], same[i : i + 1], advantages[i : i + 1], mask[i : i + 1], denominator=d)[0]
            for i in (0, 1)
        ]
        for d in (8, None)
    ]
    assert whole.item() == sum(parts[0]).item() == 0.5
    assert sum(parts[1]).item() / 2 == 0.0
    assert "the token mean is 0.5; with one row a micro-batch the mean of means is 0" in PROSE


def test_trap_a6_the_four_corners_of_the_clip():
    for advantage, ratio, loss, gradient in (
        (1, 1.5, -1.28, 0),
        (-1, 1.5, 1.5, 1.5),
        (-1, 0.5, 0.8, 0),
        (1, 0.5, -0.5, -0.5),
    ):
        logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        value, _ = dapo_loss(logprobs, torch.zeros(1, 1), torch.tensor([float(advantage)]), torch.ones(1, 1))
        assert value.item() == pytest.approx(loss)
        assert torch.autograd.grad(value, logprobs)[0].item() == pytest.approx(gradient)
        assert f"({advantage:+d}, {ratio}): loss {loss}" in PROSE


def test_trls_dapo_is_the_token_mean_alone():
    flags = translate({"loss_type": "dapo"}).flags
    assert flags["algo"] == "dapo" and flags["clip_high"] == 0.2 and flags["extras"] == "none"


def test_the_answers_behind_the_questions():
    assert overlong_penalty(torch.tensor([85, 90, 100]), 100, 20).tolist() == [-0.25, -0.5, -1.0]
    rewards = torch.tensor([1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1.0])
    assert teaching_groups(rewards, torch.arange(4).repeat_interleave(4)).tolist() == [1, 3]  # counted from 0


def test_what_the_lesson_says_of_its_runs_stands_in_their_tables():
    def of_runs(name: str) -> list[list[float]]:  # mean and half the interval, by column
        return rows_of(name)[0]

    def minus_dapo(name: str) -> list[list[float]]:
        (_, gaps) = rows_of(name)
        return gaps

    early, end, entropy, length, cut, clipped, teaching, responses = range(8)

    def beyond(name: str, column: int) -> bool:
        mean, half = minus_dapo(name)[column]
        return abs(mean) > half

    def stands(text: str, *numbers: str) -> None:
        assert text.format(*numbers) in PROSE

    (dapo,) = rows_of("DAPO")
    without, longer = "no dynamic sampling", "no dynamic sampling, 90 steps"
    stands(
        "{} % of the groups trained on teach, {} % without",
        *(f"{100 * row[teaching][0]:.0f}" for row in (dapo, of_runs(without))),
    )
    mean, half = minus_dapo(without)[end]
    stands("at the end is {} lower, with an interval of {}", f"{-mean:.3f}", f"{half:.3f}")
    stands("{} thousand instead of {}", f"{dapo[responses][0]:.1f}", f"{of_runs(without)[responses][0]:.2f}")
    mean, half = minus_dapo(longer)[end]
    stands(
        "{}: {} ± {} against DAPO's {}",
        *(f"{of_runs(longer)[end][0]:.3f}", f"{mean:+.3f}", f"{half:.3f}", f"{dapo[end][0]:.3f}"),
    )
    assert beyond(without, end) and beyond(without, teaching) and not beyond(longer, end)
    mean, half = minus_dapo("with KL, beta 0.04")[end]
    stands("costs {} ± {} at the end", f"{-mean:.3f}", f"{half:.3f}")
    mean, half = minus_dapo("GRPO: all of them")[end]
    stands(
        "{} and {}, a gap of {} ± {}",
        *(f"{dapo[end][0]:.3f}", f"{of_runs('GRPO: all of them')[end][0]:.3f}", f"{-mean:.3f}", f"{half:.3f}"),
    )
    assert beyond("GRPO: all of them", end) and -mean < -minus_dapo(without)[end][0]

    clips = {name: f"clip {name} above" for name in ("0.05", "0.2", "1")}
    shown = [x for name in ("0.2", "0.05", "1") for x in minus_dapo(clips[name])[entropy]]
    stands("entropy is {:.4f} ± {:.4f} higher, of {:.3f}", *shown[:2], dapo[entropy][0])
    stands("With 0.05 it is {:.4f} ± {:.4f} higher", *shown[2:4])
    stands("with 1 it is {:.4f} ± {:.4f} *lower*", -shown[4], shown[5])
    assert not beyond(clips["0.2"], entropy) and not beyond(clips["0.05"], entropy)
    stands(
        "{:.2f} % of the tokens are clipped above with 0.05, {:.2f} % with 0.2, {:.2f} % with 0.28, {:.2f} % with 1",
        *(row[clipped][0] for row in (of_runs(clips["0.05"]), of_runs(clips["0.2"]), dapo, of_runs(clips["1"]))),
    )

    sequence = minus_dapo("sequence mean")
    stands(
        "{:.3f} ± {:.3f} lower, after 10 steps {:.3f} ± {:.3f} higher",
        -sequence[end][0],
        sequence[end][1],
        *sequence[early],
    )
    stands("responses are {:.2f} ± {:.2f} tokens *longer*", *sequence[length])
    assert beyond("sequence mean", length)
    assert [round(row[cut][0], 1) for row in (dapo, of_runs("sequence mean"))] == [0.4, 0.4]
    stands("0.4 % of the responses are cut off, with either mean")
    for name in ("no overlong penalty", "no overlong filtering"):
        assert not any(beyond(name, column) for column in range(8))

    ends = [round(row[end][0], 2) for row in (of_runs("limit of 25 tokens"), dapo, of_runs("limit of 25, no penalty"))]
    assert ends == [0.18, 0.97, 0.97]
    stands("accuracy ends at 0.18 instead of 0.97. The same limit without the penalty ends at 0.97")


# ---- exercises


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("room_to_grow", ".clamp(max=1)", ""),
        ("room_to_grow", " - p", ""),
        ("room_to_grow", "p * (1 + clip_high)", "p + clip_high"),
        ("soft_overlong_penalty", ".clamp(-1, 0)", ".clamp(max=0)"),
        ("soft_overlong_penalty", ".clamp(-1, 0)", ".clamp(min=-1)"),
        ("soft_overlong_penalty", "/ buffer", "/ max_length"),
        ("soft_overlong_penalty", "max_length - buffer - lengths", "max_length - lengths"),
        ("soft_overlong_penalty", "(max_length - buffer - lengths)", "(lengths - max_length + buffer)"),
        ("groups_that_teach", "[:wanted]", ""),
        ("groups_that_teach", "rewards.amax(1) > rewards.amin(1)", "rewards.mean(1) != rewards[:, 0]"),
        ("groups_that_teach", "rewards.amax(1) > rewards.amin(1)", "rewards.amax(1) > 0"),
        ("groups_that_teach", "[:wanted]", "[-wanted:]"),
        ("dapo_loss", "old_logprobs.detach()", "old_logprobs"),
        ("dapo_loss", "-torch.where", "torch.where"),
        ("dapo_loss", "torch.minimum", "torch.maximum"),
        ("dapo_loss", "torch.minimum(ratio * advantages, ratio", "(ratio"),
        ("dapo_loss", "1 - clip_low, 1 + clip_high", "1 - clip_high, 1 + clip_low"),
        ("dapo_loss", "1 - clip_low, 1 + clip_high", "1 - clip_low, 1 + clip_low"),
        ("dapo_loss", "sum() / mask.sum()", "sum() / mask.numel()"),
        ("dapo_loss", "0.0).sum() / mask.sum()", "0.0).sum(1).div(mask.sum(1)).mean()"),
        ("dapo_loss", "torch.where(mask.bool(), objective, 0.0)", "objective"),
        ("dapo_loss", "torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0)", "(logprobs - old_logprobs)"),
        ("loss_that_depends_on_the_micro_batch", "/ mask.sum()", "/ kept.sum() / len(parts)"),
        ("loss_that_depends_on_the_micro_batch", "/ mask.sum()", "/ mask.sum() / len(parts)"),
        ("loss_that_depends_on_the_micro_batch", "/ mask.sum()", "/ mask.numel()"),
        ("loss_that_fades_as_the_task_is_mastered", "/ mask[teaches].sum()", "/ mask.sum()"),
        ("loss_that_fades_as_the_task_is_mastered", "/ mask[teaches].sum()", "/ teaches.sum()"),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)
