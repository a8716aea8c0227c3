"""Lesson 04: its numbers are those of the code, and its checks refuse wrong answers."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import train_ppo
from nanorl import checkpoint
from nanorl.advantages import gae, place_rewards, whiten
from nanorl.losses import ppo_loss, value_loss
from nanorl.model import GPT
from nanorl.options import describe_memory, policy_shape
from nanorl.reward_model import RewardModel, critic_from
from nanorl.tasks.reviews import Reviews

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "04_ppo"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break
LOGPROBS, REF = [-1.0, -2.0, -0.5], [-1.5, -2.0, -1.5]
VALUES, BETA = [0.4, 0.6, 0.8], 0.1


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows_of(start: str) -> list[list[list[float]]]:
    """Of each table row that begins with `start`: the numbers of the cells behind the first one."""
    rows = [line.strip("|").split("|")[1:] for line in README.splitlines() if line.startswith(f"| {start} ")]
    return [[[float(x) for x in re.findall(r"[-+]?\d+(?:\.\d+)?", cell)] for cell in row] for row in rows]


def rewards_by_hand() -> Tensor:
    mask = torch.ones(1, 3)
    return place_rewards(f64([1.0]), mask) - BETA * (f64([LOGPROBS]) - f64([REF]))


def test_memory_of_the_four_models_is_what_the_script_prints_with_its_defaults():
    task = Reviews()
    policy = GPT(policy_shape(task, train_ppo.Config().size, task.max_new_tokens))
    reward_model = RewardModel.from_policy(policy).requires_grad_(False)
    text = describe_memory(policy=policy, critic=critic_from(reward_model), reward_model=reward_model)
    assert "policy 3.6 MB (0.9 of" in text and "critic 3.6 MB (0.9 of" in text and "reward model 0.9 MB" in text
    for model, megabytes in (("policy", 3.6), ("critic", 3.6), ("reference", 0.9), ("reward model", 0.9)):
        (row,) = (row for row in rows_of(model) if len(row) == 4)
        assert row[-1] == [megabytes]
    assert "112 + 112 + 14 + 14 = 252 GB" in PROSE and 7 * 16 == 112 and 7 * 2 == 14 and 2 * (112 + 14) == 252


def test_trap_a4_the_rewards_of_three_tokens_worked_by_hand():
    assert rewards_by_hand().tolist() == [pytest.approx([-0.05, 0.0, 0.9])]
    for start, k1, earned in (("1", 0.5, [-0.05]), ("2", 0.0, [0.0]), ("3, the stop token", 1.0, [-0.10, 1.0, 0.90])):
        (row,) = (row for row in rows_of(start) if len(row) == 4 and row[0][0] in LOGPROBS)
        assert row[2] == [k1] and row[3] == earned
    assert train_ppo.Config().beta * 20 == pytest.approx(1.0)  # "e^20 times as likely ... pays 1"


@pytest.mark.parametrize("lam", [0, 0.5, 0.95, 1])
def test_advantages_and_targets_of_the_table_of_lambdas(lam):
    advantages, returns = gae(rewards_by_hand(), f64([VALUES]), torch.ones(1, 3), gamma=1.0, lam=lam)
    ((row),) = (row for row in rows_of(str(lam)) if len(row) == 6)
    assert [cell for (cell,) in row] == pytest.approx([*advantages[0].tolist(), *returns[0].tolist()], abs=1e-9)


def test_trap_b3_the_table_of_the_clipped_value_loss():
    for v, target, loss, slope in ((2, 3, 1.62, 0.0), (2, 0.5, 1.125, 1.5), (1.1, 3, 1.805, -1.9)):
        (row,) = (row for row in rows_of(str(v)) if row[0] == [target])
        clipped = min(max(v, 0.8), 1.2)
        assert row[1:4] == [[pytest.approx(abs(v - target))], [pytest.approx(abs(clipped - target))], [loss]]
        assert row[4][0] == slope
        values = f64([[v]]).requires_grad_()
        found, _ = value_loss(values, f64([[1.0]]), f64([[target]]), torch.ones(1, 1), clip=0.2)
        assert found.item() == pytest.approx(loss)
        assert torch.autograd.grad(found, values)[0].item() == pytest.approx(slope)


def test_a_clipped_token_moves_on_when_another_one_pulls_at_the_same_weight():
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    ones = torch.ones(1, 2, dtype=torch.float64)
    first = None
    for _ in range(20_000):
        logprobs = torch.nn.functional.logsigmoid(torch.stack([theta, theta / 10]))[None]
        loss, _ = ppo_loss(logprobs, ones * math.log(0.5), ones, ones)
        (slope,) = torch.autograd.grad(loss, theta)
        if slope == 0:
            break
        if logprobs[0, 0] > math.log(0.6) and first is None:
            first = theta.item()
        theta = (theta - 0.05 * slope).detach().requires_grad_()
    assert first == pytest.approx(0.405, abs=0.02) and theta.item() == pytest.approx(4.055, abs=0.002)
    assert 2 * theta.sigmoid().item() == pytest.approx(1.966, abs=1e-3)
    assert "at $\\theta$ = 0.405. The second leaves it at 4.055" in PROSE and "first one's ratio is 1.966" in PROSE


def test_trap_b1_targets_made_of_whitened_advantages_teach_nothing_in_the_example():
    advantages, returns = gae(f64([[0, 1]]), f64([[0.5, 0.5]]), torch.ones(1, 2), gamma=1.0, lam=1.0)
    white = whiten(advantages, torch.ones(1, 2))
    assert (advantages.tolist(), returns.tolist(), white.tolist()) == ([[0.5, 0.5]], [[1, 1]], [[0, 0]])


def test_trap_b1_the_pad_in_the_traps():
    inputs = f64([[0, 1, 0]]), f64([[0.5, 0.5, 7]])
    right, _ = gae(*inputs, torch.tensor([[1, 1, 0]]), gamma=1.0, lam=0.95)
    wrong, _ = gae(*inputs, torch.ones(1, 3), gamma=1.0, lam=0.95)
    assert right[0, :2].tolist() == pytest.approx([0.475, 0.5]) and "[0.475, 0.5]" in PROSE
    assert wrong[0, :2].tolist() == pytest.approx([0.8075, 0.85]) and "[0.8075, 0.85]" in PROSE


def test_the_answer_about_lambda_0_and_1():
    inputs = f64([[0, 0, 1]]), f64([[0.5, 0.5, 0.5]]), torch.ones(1, 3)
    assert [x.tolist() for x in gae(*inputs, gamma=1.0, lam=0.0)] == [[[0, 0, 0.5]], [[0.5, 0.5, 1]]]
    assert [x.tolist() for x in gae(*inputs, gamma=1.0, lam=1.0)] == [[[0.5, 0.5, 0.5]], [[1, 1, 1]]]


# ---- exercises


def test_trap_b1_the_silent_bug_has_a_first_value_loss_of_one_half_as_its_symptom_says(load):
    bug = load("exercise").targets_never_reached
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(12) < torch.randint(1, 13, (128, 1), generator=generator)
    rewards, values = torch.randn(2, 128, 12, generator=generator, dtype=torch.float64)
    for scale in (1, 10):
        _, returns = bug(scale * rewards, values, mask)
        loss, _ = value_loss(values, values, returns, mask)
        assert f"{loss.item():.2f}" == "0.50"
        assert returns[mask].mean().item() == pytest.approx(values[mask].mean().item(), abs=1e-12)


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("token_rewards", "-beta", "beta"),
        ("token_rewards", "logprobs - ref_logprobs", "(logprobs - ref_logprobs).exp() - 1"),
        ("token_rewards", "mask.long().sum(1) - 1", "mask.long().sum(1) - 2"),
        ("token_rewards", "mask.long().sum(1) - 1", "-torch.ones(len(mask), dtype=torch.long)"),
        ("token_rewards", "+= scores.detach()", "= scores.detach()"),
        ("token_rewards", ", 0.0).detach()", ", 0.0)"),
        (
            "token_rewards",
            "torch.where(mask.bool(), -beta * (logprobs - ref_logprobs), 0.0)",
            "(-beta * (logprobs - ref_logprobs) * mask)",
        ),
        ("gae", "gamma * lam * later", "lam * later"),
        ("gae", "gamma * next_value", "next_value"),
        ("gae", "next_value = torch.where(mask[:, t], values[:, t], next_value)", "next_value = values[:, t]"),
        ("gae", "torch.zeros_like(bootstrap), bootstrap", "torch.zeros_like(bootstrap), torch.zeros_like(bootstrap)"),
        ("gae", "torch.where(mask, advantages + values, 0.0)", "torch.where(mask, advantages, 0.0)"),
        ("value_loss", "torch.maximum", "torch.minimum"),
        ("value_loss", "old_values - clip, old_values + clip", "returns - clip, returns + clip"),
        ("value_loss", "0.5 * ", ""),
        ("value_loss", "/ mask.sum()", "/ mask.numel()"),
        ("value_loss", "old_values.detach(), returns.detach()", "old_values, returns"),
        ("whiten", "chosen.var()", "chosen.var(correction=0)"),
        ("whiten", "values[mask.bool()]", "values.nan_to_num()"),
        ("whiten", "torch.where(mask.bool(), white, 0.0)", "white"),
        ("targets_never_reached", "returns = (advantages + values) * mask", "returns = reward_to_go * 0.95"),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)


def test_the_checks_refuse_the_silent_bug(load):
    checks = load("checks")
    with pytest.raises(checks.require.__globals__["Failed"], match="The symptom is still there"):
        checks.check_targets_never_reached(load("exercise").targets_never_reached)


# ---- the runs


def test_a_given_reward_model_leaves_the_seeds_first_policy_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(train_ppo, "FRESH_PAIRS", 16)
    learned = {"pairs": "16", "reward_model_steps": 1}
    tiny = {"steps": 1, "prompts": 2, "eval_problems": 2, "size": (16, 1, 2)}
    tiny |= {"warm_start_steps": 0, "device": "cpu", "mini_batches": 1, "max_new_tokens": 4}
    train_ppo.main(train_ppo.Config(out=str(tmp_path / "a"), **learned, **tiny))
    train_ppo.main(train_ppo.Config(out=str(tmp_path / "b"), reward=f"rm:{tmp_path / 'a'}", **tiny))
    first, second = (
        load_file(checkpoint.latest(tmp_path / out / "checkpoint") / "reference.safetensors") for out in "ab"
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_the_lesson_says_of_its_runs_stands_in_their_table():
    def numbers(start: str) -> list[float]:
        (row,) = rows_of(start.ljust(39))
        return [cell[0] for cell in row]

    default = numbers("KL in the reward, lambda 0.95 (default)")
    in_loss, half = numbers("KL in the loss"), numbers("KL in the loss, beta 0.5")
    zero, one = numbers("lambda 0"), numbers("lambda 1")
    assert f"Gold from -0.49 to {default[3]:.2f} while the proxy goes from -0.03 to {default[4]:.2f}" in PROSE
    assert f"costs {train_ppo.Config().beta * default[5]:.2f} of those {default[4]:.2f}" in PROSE
    assert f"talks again: {default[6]:.1f} tokens" in PROSE
    assert f"0.59 after 10 steps, {default[7]:.2f} at the end" in PROSE and f"from 0.51 to {default[8]:.4f}" in PROSE
    assert math.sqrt(2 * default[8]) == pytest.approx(0.07, abs=0.005)
    assert f"Gold peaks at {max(in_loss[:4]):.2f} and ends at {in_loss[3]:.2f}" in PROSE
    assert f"{in_loss[4]:.2f}, is the highest of all, at a KL of {in_loss[5]:.1f}" in PROSE
    assert in_loss[4] == max(row[4] for row in (default, in_loss, half, zero, one))
    assert f"KL {half[5]:.1f}, gold {half[3]:.2f}" in PROSE
    assert f"It recovers, to {zero[3]:.2f}" in PROSE
    assert f"ends at {one[3]:.2f}" in PROSE and f"{one[4]:.2f} at a KL of 6.5" in PROSE and 6.5 <= one[5] < 6.6
