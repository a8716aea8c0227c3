"""Lesson 02: its ways of training differ in the one thing they name, and what the lesson says is so."""

import functools
import math
from pathlib import Path

import pytest
import torch

from nanorl import sft
from nanorl.losses.aggregate import sequence_mean
from nanorl.model import GPT, GPTConfig
from nanorl.optimizers import Optimizers
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.tasks.chain import THINKING_SHARE, ChainArithmetic

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "02_supervised_fine_tuning"
README = (LESSON / "README.md").read_text()
TASK = ChainArithmetic()
THINKS, CLOSES = TASK.tokenizer.encode("<>")


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


@pytest.fixture
def imitate(load):
    return load("imitate")


def responses(batch: Rollout) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(batch.tokens, batch.lengths.tolist(), strict=True)]


# ---- the ways of training


def test_the_first_way_of_training_is_the_warm_start_of_the_library_to_the_last_bit(imitate):
    policy, expected = imitate.new_policy(3), imitate.new_policy(3)
    losses, expected_losses = [], []
    imitate.imitate(policy, "as-it-should-be", 3, lambda step, loss: losses.append(loss), steps=2)
    sft.warm_start(expected, TASK, steps=2, seed=3, report=lambda step, loss: expected_losses.append(loss))
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), expected.parameters(), strict=True))
    assert sft.token_mean is imitate.token_mean  # put back


def test_the_other_ways_show_the_same_texts_and_differ_in_what_they_name(imitate):
    plain = sft.demonstrations(TASK, 40, "any")
    shown = responses(plain)
    without_stop = sft.demonstrations(imitate.WAYS["without-stop"][0], 40, "any")
    assert without_stop.prompts == plain.prompts
    assert responses(without_stop) == [response[:-1] for response in shown]
    assert all(response[-1] == TASK.tokenizer.eos_id for response in shown)
    with_prompt = sft.demonstrations(imitate.WAYS["with-prompt"][0], 40, "any")
    assert with_prompt.prompts == [prompt[:1] for prompt in plain.prompts]
    assert responses(with_prompt) == [
        prompt[1:] + response for prompt, response in zip(plain.prompts, shown, strict=True)
    ]


def test_trap_a1_a_mean_for_each_micro_batch_weighs_the_thinking_choice_as_little_as_the_lesson_says(imitate):
    thinking = direct = 0.0
    _, mean, rows = imitate.WAYS["own-means"]
    for step in range(30):
        for part in sft.demonstrations(TASK, sft.BATCH, f"sft 0 {step}").split(rows):
            values = torch.zeros(part.mask.shape, requires_grad=True)
            (weights,) = torch.autograd.grad(mean(values, part.mask, 0), values)
            assert weights.sum().item() == pytest.approx(1 / 3)
            first = part.tokens[:, 0]
            thinking += weights[first == THINKS, 0].sum().item()
            direct += weights[first == CLOSES, 0].sum().item()
    at_minimum = thinking / (thinking + direct)  # the probability of thinking that minimises the loss
    assert at_minimum == pytest.approx(0.058, abs=0.005)
    thinks = round(THINKING_SHARE * sft.BATCH)
    tokens = 25 * thinks + 3 * (rows - thinks)  # of the third that holds all that think
    by_hand = (thinks / tokens) / (thinks / tokens + 64 / 96 + (rows - thinks) / tokens)
    assert f"= {tokens} tokens" in README and f"**{by_hand:.3f}**" in README


def test_under_a_sequence_mean_the_choice_to_think_weighs_as_little_as_the_lesson_says():
    thinks = round(100 * THINKING_SHARE)
    mask = torch.arange(25) < torch.tensor([25] * thinks + [3] * (100 - thinks))[:, None]
    values = torch.zeros(100, 25, requires_grad=True)
    (weights,) = torch.autograd.grad(sequence_mean(values, mask), values)
    share = weights[:thinks, 0].sum() / weights[:, 0].sum()
    assert f" = {share:.3f}." in README


def test_every_trained_token_of_a_demonstration_is_of_one_kind_in_the_figure(load):
    figure = load("figure")
    batch = sft.demonstrations(TASK, 40, "any")
    found = figure.kinds(batch)
    assert list(found) == list(figure.KINDS)
    assert torch.equal(torch.stack(list(found.values())).sum(0), batch.mask.long())
    for row, text in enumerate(batch.texts(TASK.tokenizer)):
        of_kind = {
            kind: "".join(TASK.tokenizer.decode([t]) for t in batch.tokens[row, which[row]])
            for kind, which in found.items()
        }
        assert of_kind["choice"] == text[0]
        if text[0] == "<":
            assert of_kind["guessed"] == ""
            assert of_kind["worked out"] == "".join(step[0] for step in text.split("=")[1:])
            assert len(of_kind["worked out"]) == 5
        else:
            assert of_kind == {"choice": ">", "guessed": text[1], "worked out": "", "rest": "<eos>"}


# ---- numbers in the text


def test_cross_entropy_of_one_demonstration_by_hand():
    losses = [-math.log(p) for p in (0.7, 0.12, 0.99)]
    assert [round(loss, 3) for loss in losses] == [0.357, 2.12, 0.01]
    assert round(sum(losses), 3) == 2.487 and round(sum(losses) / 3, 3) == 0.829
    assert "2.487" in README and "0.829" in README


def test_the_choice_costs_the_entropy_of_the_mixture_at_least():
    def expected_loss(q: float) -> float:
        return -(THINKING_SHARE * math.log(q) + (1 - THINKING_SHARE) * math.log(1 - q))

    floor = expected_loss(THINKING_SHARE)
    assert f"**entropy of the mixture**, {floor:.3f}" in README
    assert all(expected_loss(q) > floor for q in (0.1, THINKING_SHARE - 0.01, THINKING_SHARE + 0.01, 0.5, 0.9))


def test_thinking_and_direct_demonstrations_have_the_lengths_the_lesson_gives():
    batch = sft.demonstrations(TASK, 200, "lengths")
    thinks = batch.tokens[:, 0] == THINKS
    assert set(batch.lengths[thinks].tolist()) == {25} and set(batch.lengths[~thinks].tolist()) == {3}
    assert f"response's {THINKING_SHARE * 25 + (1 - THINKING_SHARE) * 3:.1f} tokens" in README


def test_muon_has_nearly_all_weights_of_the_default_model():
    model = GPT(GPTConfig(vocab_size=17))
    matrices = sum(weight.numel() for weight in model.blocks.parameters() if weight.dim() == 2)
    assert matrices == 221_184 and sum(weight.numel() for weight in model.parameters()) == 225_024
    assert "221,184" in README and "225,024" in README


# ---- exercises


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("cross_entropy", "-logprobs.mean()", "-logprobs.sum() / mask.numel()"),
        ("cross_entropy", "-logprobs.mean()", "logprobs.mean()"),
        ("make_batch", "[*prompt, *response, eos_id]", "[*prompt, *response]"),
        ("make_batch", "(start <= place) & (place < end)", "(start <= place) & (ids != eos_id)"),
        ("make_batch", "(start <= place) & (place < end)", "(start <= place)"),
        ("make_batch", "(start <= place) & (place < end)", "(place < end)"),
        ("micro_batch_losses", "part.sum() / mask.sum()", "part.sum() / (part != 0).sum()"),
        ("micro_batch_losses", "part.sum() / mask.sum()", "part.sum() / mask.numel()"),
        ("micro_batch_losses", "torch.where(mask.bool(), values, 0.0)", "values * mask"),
        (
            "mixture_loss",
            "(1 - share) * torch.nn.functional.softplus(logit)",
            "-(1 - share) * torch.log(1 - logit.sigmoid())",
        ),
        ("mixture_loss", "(1 - share)", "share"),
        (
            "muon_direction",
            "left @ right",
            "left @ right.T if momentum.shape[0] == momentum.shape[1] else left @ -right",
        ),
        ("muon_direction", "max(momentum.shape)", "min(momentum.shape)"),
        ("loss_that_falls_too_well", "trained = trained[:, 1:]", "trained = trained[:, :-1]"),
        ("loss_that_starts_too_late", "torch.arange(logprobs.shape[1]) + 1", "torch.arange(logprobs.shape[1])"),
        ("loss_that_starts_too_late", "(place < lengths[:, None])", "(ids[:, 1:] != 9)"),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)


def test_the_first_silent_bug_copies_the_last_token_at_a_loss_of_almost_nothing(load):
    loss_that_falls_too_well = load("exercise").loss_that_falls_too_well
    make_batch = load("solution").make_batch
    torch.manual_seed(0)
    policy = GPT(GPTConfig(vocab_size=17, width=32, layers=1, max_context=40))
    optimizers = Optimizers(policy, 0.02)
    for step in range(40):
        problems = TASK.training_problems(16, str(step))
        shown = [TASK.tokenizer.encode(TASK.demonstration(problem, str(step))) for problem in problems]
        prompts = [TASK.tokenizer.encode_prompt(problem.prompt) for problem in problems]
        ids, trained = make_batch(prompts, shown, TASK.tokenizer.eos_id)
        loss = loss_that_falls_too_well(policy(ids) @ policy.head.T, ids, trained)
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
    assert loss < 0.01
    rollout = Sampler(policy).generate(prompts, max_new_tokens=20, stop_ids=[TASK.tokenizer.eos_id], greedy=True)
    assert set(rollout.texts(TASK.tokenizer)) == {"=" * 20}


def test_the_second_silent_bug_trains_neither_the_first_token_nor_anything_but_the_rest(load):
    wrong = load("exercise").loss_that_starts_too_late
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 9]])  # prompt of 3, response of 2, stop, padding
    logits = torch.zeros(1, 7, 10, requires_grad=True)
    (gradient,) = torch.autograd.grad(wrong(logits, ids, torch.tensor([3]), torch.tensor([6])), logits)
    assert gradient.abs().sum(-1).gt(0).tolist() == [[False, False, False, True, True, True, False]]  # 2 is missing


def test_the_library_trains_the_response_alone_from_its_first_token_to_its_stop_token():
    policy = GPT(GPTConfig(vocab_size=10, width=16, max_context=16))
    rollout = Rollout.from_responses([[3, 1, 4], [1]], [[1, 5, 9], [7, 9]])
    logprobs, _ = score(policy, rollout)
    assert (logprobs != 0).tolist() == [[True, True, True], [True, True, False]]
