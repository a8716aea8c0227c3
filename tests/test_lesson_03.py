"""Lesson 03: its numbers are those of the code, and its checks refuse wrong answers."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import train_ppo
from nanorl.losses import bradley_terry_loss
from nanorl.model import GPTConfig
from nanorl.reward_model import RewardModel
from nanorl.tasks.reviews import SHARPNESS, gold

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "03_rewards_from_preferences"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break
METRICS = (LESSON.parents[1] / "docs" / "metrics.md").read_text()


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
    assert SHARPNESS == 2 and r"\sigma(2 (\text{gold}_A - \text{gold}_B))" in PROSE


def test_gold_counts_as_the_lesson_says():
    prompt, good = " the plot was very dull", " and the acting was superb"
    assert gold(prompt, good + " and the acting was warm .") == 1 - 1  # a noun that came before
    assert gold(prompt, good + " and the music was superb .") == 1 - 1  # an adjective
    assert gold(prompt, " and the acting was weak .") == -1
    assert gold(prompt, good) == 1 - 2  # a missing end
    assert gold(prompt, " the acting was superb .") == 1 - 2  # no joining word
    long = " and the acting was very superb and the music was very warm and the ending was very vivid"
    assert len(long.split()) == 18
    assert gold(prompt, long + " .") == 3 - 0.5
    assert "a missing end included, costs 2, and each word behind the 18th half a point" in PROSE


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


def means(start: str) -> list[float]:
    """The first number of each column, None where a cell has none."""
    return [cell[0] if cell else None for cell in row_of(start)]


def listed(values: list[float], digits: int) -> str:
    """As the text says three seeds: a, b and c."""
    a, b, c = (f"{value:.{digits}f}" for value in values)
    return f"{a}, {b} and {c}"


def spoken(number: float, text: str) -> bool:
    return text in PROSE and float(re.search(r"\d+\.\d+", text)[0]) == pytest.approx(number, abs=0.0051)


def test_what_the_lesson_says_of_its_runs_stands_in_their_table():
    few, some, many, half = (means(start) for start in ("250", "2,000", "8,000", "8,000, half the steps"))
    assert spoken(few[0], "From 0.68 with 250 pairs") and spoken(some[0], "to 0.79 with 2,000")
    assert spoken(many[0], "0.85 with 8,000")
    assert spoken(few[1], "from 3.50 to 0.36") and many[1] == pytest.approx(0.36, abs=0.0051)
    assert few[1] / math.log(2) == pytest.approx(5, abs=0.1)
    assert spoken(some[1], "with 2,000 it is still 1.25") and some[1] > math.log(2)
    assert f"Certainty is off by {many[2]:.3f} instead of {some[2]:.3f}" in PROSE
    assert f"by {half[2]:.3f} instead of {many[2]:.3f}" in PROSE
    assert f"the best possible is {means('the best possible')[0]:.3f}" in PROSE
    assert round(100 * means("the best possible")[0]) == 94 and "the ceiling is 94 %, it would be poor" in PROSE
    assert means("behind the prompt") == [0.0, 0.693]


def test_the_seeds_of_the_table_have_the_means_of_the_other_tables():
    for seeds, mean in (
        ("accuracy, 250 pairs", "250"),
        ("accuracy, 1,000 pairs", "1,000"),
        ("accuracy, 2,000 pairs", "2,000"),
        ("accuracy, 8,000 pairs", "8,000"),
        ("accuracy, 8,000 pairs", "behind the last token"),
        ("accuracy, 8,000, half the steps", "8,000, half the steps"),
        ("accuracy, at the end of the padding", "at the end of the padding"),
    ):
        assert sum(means(seeds)) / 3 == pytest.approx(means(mean)[0], abs=1.1e-3), seeds
    for name in ("8,000 pairs", "8,000, half the steps"):
        seeds = means(f"certainty off by, {name}")
        assert sum(seeds) / 3 == pytest.approx(means(name.removesuffix(" pairs"))[2], abs=1.1e-3)


def test_what_the_lesson_says_of_each_seed_stands_in_the_table_of_seeds():
    whole, half = means("accuracy, 8,000 pairs"), means("accuracy, 8,000, half the steps")
    assert f"{listed(half, 3)} instead of {listed(whole, 3)}, lower for each seed" in PROSE
    assert all(h < w for h, w in zip(half, whole, strict=True))
    off, off_half = means("certainty off by, 8,000 pairs"), means("certainty off by, 8,000, half the steps")
    assert all(h < w for h, w in zip(off_half, off, strict=True)) and "off by less for each seed" in PROSE
    assert listed(means("accuracy, at the end of the padding"), 3) in PROSE
    assert all(share == pytest.approx(0.8, abs=0.06) for share in means("250 pairs: more than 90 % sure of"))
    right = means("of these right")
    assert (round(100 * min(right)), math.ceil(100 * max(right))) == (68, 73) and "68 to 73 % are right" in PROSE
    for row in ("correlation of score and gold", "within prompts", "correlation of score and length"):
        assert listed(means(row), 2) in PROSE, row
    assert "gold and length with " + listed(means("of gold and length"), 2) in PROSE
    for one, other in zip(means("correlation of score and length"), means("of gold and length"), strict=True):
        assert one == pytest.approx(other, abs=0.025)  # alike, which says nothing yet
    shown = zip(
        *(
            means(row)
            for row in ("correlation of score and length", "correlation of score and gold", "of gold and length")
        ),
        strict=True,
    )
    shrunk, left = [], []
    for with_length, with_gold, gold_and_length in shown:
        shrunk.append(with_gold * gold_and_length)
        left.append((with_length - shrunk[-1]) / math.sqrt((1 - with_gold**2) * (1 - gold_and_length**2)))
    assert f"of gold and length: {listed(shrunk, 2)}. What is left" in PROSE
    assert "equal gold is about -0.12 for each seed" in PROSE and left == pytest.approx([-0.12] * 3, abs=0.015)
    higher = means("how much higher behind a good opening, at equal gold")
    assert f"score {higher[0]:.2f} higher" in PROSE and f"({higher[1]:.2f} and {higher[2]:.2f} in the other" in PROSE
    assert f"**The slope is not 2 but {listed(means('slope within prompts'), 2)}**" in PROSE
    assert "the score rises by " + listed(means("rise of the score from gold 0 to 1"), 2) in PROSE
    assert "from 2 to 3 by " + listed(means("rise of the score from gold 2 to 3"), 2) in PROSE
    assert sum(means("share of responses of gold 3")) / 3 == pytest.approx(0.01, abs=0.003)


def test_what_the_lesson_says_of_its_start_command_fits_the_table_of_seeds():
    accuracy, off = means("accuracy, 8,000 pairs")[0], means("certainty off by, 8,000 pairs")[0]
    assert f"where the table of seeds has {accuracy:.3f} and {off:.3f}" in PROSE
    assert (train_ppo.Config().pairs, train_ppo.Config().seed) == ("8000", 0)
    assert round(train_ppo.Config().reward_model_steps * 64 / 6294) == 5 and "6,294 are left, seen five times" in PROSE
    assert abs(0.864 - accuracy) < 1.96 * math.sqrt(0.864 * (1 - 0.864) / 799) and "accuracy 0.864" in PROSE
    (healthy,) = re.findall(r"^\| `reward_model.calibration`, .* \| below about ([\d.]+) \|", METRICS, re.M)
    assert 0.054 < float(healthy) and "certainty off by 0.054" in PROSE


def test_what_500_pairs_and_the_labeller_who_loves_length_make_fits_the_tables():
    (few, _), (more, _) = row_of("250")[0], row_of("1,000")[0]
    assert few < 0.692 < more and abs(0.692 - few) < abs(0.692 - more) and "accuracy 0.692" in PROSE
    (mean, half), off = row_of("250")[2], 0.264
    assert abs(off - mean) < half and f"certainty off by {off}" in PROSE
    assert round(train_ppo.Config().reward_model_steps * 64 / 386) == 83 and "386 to learn from, each seen 83" in PROSE
    hacking = (LESSON.parent / "14_reward_hacking" / "README.md").read_text()
    for name, seed_0 in (("correlation of score and length", 0.59), ("accuracy on fresh pairs of the same .*?", 0.829)):
        (cell,) = re.findall(rf"^\| {name} +\| [^|]+ \| ([^|]+) \|$", hacking, re.M)
        mean, half = (float(x) for x in cell.split(" ± "))
        assert abs(seed_0 - mean) < half
    assert "correlate with +0.59 instead of -0.32" in PROSE and means("correlation of score and length")[0] == -0.32


def test_agreement_of_two_people_does_not_say_where_the_ceiling_is():
    def agreement(*pairs: tuple[float, float]) -> float:
        return sum(share * (p**2 + (1 - p) ** 2) for share, p in pairs)

    def ceiling(*pairs: tuple[float, float]) -> float:
        return sum(share * max(p, 1 - p) for share, p in pairs)

    equal = (1, (1 + math.sqrt(2 * 0.65 - 1)) / 2)
    assert agreement(equal) == pytest.approx(0.65) and round(ceiling(equal), 2) == 0.77
    mixed = (0.3, 1.0), (0.7, 0.5)
    assert agreement(*mixed) == pytest.approx(0.65) and ceiling(*mixed) == pytest.approx(0.65)
    assert "may mean that $p$ is 0.77 for every pair: the ceiling is 77 %" in PROSE
    assert "30 % of the pairs are certain and the rest coin tosses: it is 65 %" in PROSE
    best = means("the best possible")[0]
    assert 0.89 <= best <= (1 + math.sqrt(2 * 0.89 - 1)) / 2 and "people would agree on 89 %" in PROSE  # the bounds


def test_what_the_lesson_says_of_training_with_the_bug_stands_in_its_table():
    padded, alone = means("trained at the end of the padding")[0], means("the same, alone")[0]
    right = means("accuracy, 2,000 pairs")[0]
    assert spoken(100 * padded, f"{100 * padded:.1f} %, as good as the model that reads in the right place")
    assert f"({100 * right:.1f} % with the same pairs)" in PROSE and padded == pytest.approx(right, abs=0.002)
    assert f"it is right on {100 * alone:.1f} %, and that is the number PPO gets" in PROSE


def test_the_symptom_of_the_first_silent_bug_is_what_the_table_shows():
    symptom = " ".join((LESSON / "exercise.py").read_text().split())
    right, wrong = (sum(means(f"accuracy, {name}")) / 3 for name in ("8,000 pairs", "at the end of the padding"))
    assert f"right on {100 * right:.0f} % of the pairs" in symptom
    assert f"mixed lengths it is {100 * wrong:.0f} %," in symptom


def test_what_the_lesson_says_of_mistakes_that_few_pairs_show_stands_in_its_table():
    bad, noun, adjective = (
        means(f"{what}") for what in ("two of them bad", "one noun three times", "one adjective three times")
    )
    assert means("three good claims")[0] == 3 and [row[0] for row in (bad, noun, adjective)] == [-1, -1, -1]
    assert SHARPNESS * (-1 - 3) == -8 and "$2 (-1 - 3) = -8$" in PROSE
    assert 100 / adjective[1] == pytest.approx(16, abs=0.5) and noun[1] / adjective[1] == pytest.approx(6, abs=0.5)
    assert "it falls by " + listed([-x for x in noun[2:]], 2) in PROSE
    assert "The score falls by " + listed([-x for x in adjective[2:]], 2) in PROSE
    accuracy = means("accuracy, 8,000 pairs")
    assert accuracy.index(min(accuracy)) == noun[2:].index(max(noun[2:])) == 2  # the third is the least accurate


@pytest.mark.parametrize("prompt", [" the plot was very dull", " the camera was superb"])
def test_the_three_claims_have_the_gold_and_the_words_that_the_lesson_says(load, prompt):
    figure = load("figure")
    for kind, worth in figure.SAME_GOLD.items():
        assert means(kind)[0] == worth
        for key in range(20):
            text = figure.written(kind, prompt, f"{key}")
            assert gold(prompt, text) == worth and len(text.split()) == 16


def test_the_mistakes_counted_are_those_of_the_responses(load):
    figure = load("figure")
    task = figure.Reviews()
    prompt, texts = (
        " the plot was dull",
        (
            " and the acting was great and the music was great .",  # an adjective again
            " and the plot was great .",  # the prompt's noun again
            " and the music was dull and the ending was weak .",  # two bad ones, one of them the prompt's
            " .",
        ),
    )
    ids = [task.tokenizer.encode_response(text) for text in texts]
    start = task.tokenizer.encode_prompt(prompt)
    counted = figure.seen([figure.Pair(start, ids[0], ids[1]), figure.Pair(start, ids[2], ids[3])], task)
    assert counted == {
        "three good claims": 0,
        "two of them bad": 1 / 4,
        "one noun three times": 1 / 4,
        "one adjective three times": 2 / 4,
    }
