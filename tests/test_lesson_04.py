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
from nanorl.batch_metrics import explained_variance
from nanorl.losses import ppo_loss, value_loss
from nanorl.model import GPT
from nanorl.options import describe_memory, policy_shape
from nanorl.reward_model import RewardModel, critic_from
from nanorl.tasks import reviews
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
    assert "policy 3.7 MB (0.9 of" in text and "critic 3.6 MB (0.9 of" in text and "reward model 0.9 MB" in text
    for model, megabytes in (("policy", 3.7), ("critic", 3.6), ("reference", 0.9), ("reward model", 0.9)):
        (row,) = (row for row in rows_of(model) if len(row) == 4)
        assert row[-1] == [megabytes]
    weights = [sum(weight.numel() for weight in model.parameters()) for model in (policy, reward_model)]
    assert f"saves the critic, {16 * weights[1] / 1e6:.1f} of {(16 + 4) * sum(weights) / 1e6:.1f} MB" in PROSE
    assert "112 + 112 + 14 + 14 = 252 GB" in PROSE and 7 * 16 == 112 and 7 * 2 == 14 and 2 * (112 + 14) == 252


def test_trap_a4_the_rewards_of_three_tokens_worked_by_hand():
    assert rewards_by_hand().tolist() == [pytest.approx([-0.05, 0.0, 0.9])]
    for start, k1, earned in (("1", 0.5, [-0.05]), ("2", 0.0, [0.0]), ("3, the stop token", 1.0, [-0.10, 1.0, 0.90])):
        (row,) = (row for row in rows_of(start) if len(row) == 4 and row[0][0] in LOGPROBS)
        assert row[2] == [k1] and row[3] == earned
    assert f"At the default {train_ppo.Config().beta} a policy that is $e^{{10}}$ times as likely" in PROSE
    assert train_ppo.Config().beta * 10 == pytest.approx(1.0)  # what it pays


@pytest.mark.parametrize("lam", [0, 0.5, 0.95, 1])
def test_advantages_and_targets_of_the_table_of_lambdas(lam):
    advantages, returns = gae(rewards_by_hand(), f64([VALUES]), torch.ones(1, 3), gamma=1.0, lam=lam)
    ((row),) = (row for row in rows_of(str(lam)) if len(row) == 6)
    assert [cell for (cell,) in row] == pytest.approx([*advantages[0].tolist(), *returns[0].tolist()], abs=1e-9)


def test_explained_variance_by_hand():
    mask, found = torch.ones(1, 3), []
    for lam in (0, 1):
        _, returns = gae(rewards_by_hand(), f64([VALUES]), mask, gamma=1.0, lam=lam)
        found.append(explained_variance(f64([VALUES]), returns, mask))
    assert found == pytest.approx([0.92, -36], abs=0.0051)
    assert "0.92 at $\\lambda = 0$, and -36 at $\\lambda = 1$, where the targets 0.85, 0.90 and 0.90" in PROSE
    assert returns[0].tolist() == pytest.approx([0.85, 0.9, 0.9])
    assert explained_variance(torch.ones(1, 3), returns, mask) == pytest.approx(0)
    assert explained_variance(returns - 7, returns, mask) == pytest.approx(1)


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


RUNS = (
    "KL in the reward, lambda 0.95 (default)",
    "KL in the loss",
    "KL in the loss, beta 0.3",
    "KL in the loss, beta 1",
    "lambda 0",
    "lambda 1",
    "2 epochs of 2 mini-batches",
)
DEFAULT, IN_LOSS, IN_LOSS_03, IN_LOSS_1, LAM_0, LAM_1, TWO = RUNS


def numbers(table: str, head: str) -> dict[str, list[float]]:
    """Of each row of a table that figure.py writes: the numbers in the column of that head, or one behind: `head+1`."""
    lines = README.partition(f"<!-- {table} -->\n")[2].partition(f"<!-- end of {table} -->")[0].splitlines()
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    head, _, behind = head.partition("+")
    column = heads.index(head) + int(behind or 0)
    return {row[0]: [float(x) for x in re.findall(r"[-+]?\d+(?:\.\d+)?", row[column])] for row in rows}


def of(table: str, head: str, run: str) -> float:
    return numbers(table, head)[run][0]


def result(head: str, run: str = DEFAULT) -> float:
    return of("results", head, run)


def course(head: str, run: str = DEFAULT) -> float:
    return of("courses", head, run)


def text(head: str, run: str = DEFAULT) -> float:
    return of("texts", head, run)


FIRST_POLICY = "the first policy, before PPO"
END, VARIANCE, LOSS = "at the end", "explained variance in step 0", "value loss in step 0"


def test_the_tables_are_of_the_runs_that_the_lesson_speaks_of():
    assert tuple(numbers("results", END)) == tuple(numbers("texts", "gold")) == (FIRST_POLICY, *RUNS)
    assert tuple(numbers("courses", "best gold")) == RUNS


def test_what_gold_counts_in_the_texts_adds_up_to_gold():
    heads = "good claims", "bad claims", "said again", "broken places", "words too many"
    worth = 1, -1, -reviews.REPEATED, -reviews.BROKEN, -reviews.RAMBLING
    for run in (FIRST_POLICY, *RUNS):
        total = sum(each * text(head, run) for each, head in zip(worth, heads, strict=True))
        assert total == pytest.approx(text("gold", run), abs=0.03)  # each was rounded
    assert worth == (1, -1, -1, -2, -0.5) and "a broken place counting twice and a word too many half" in PROSE


def says(*sentences: str) -> None:
    for sentence in sentences:
        assert sentence in PROSE


def half_interval(run: str) -> float:
    return numbers("results", END)[run][1]


def test_what_the_lesson_says_of_the_default_stands_in_the_tables():
    before, after, proxy, kl = result(END, FIRST_POLICY), result(END), result("proxy"), result("KL")
    says(
        f"Gold from {before:.2f} to {after:.2f} while the proxy goes from {result('proxy', FIRST_POLICY):.2f} to",
        f"to {proxy:.2f}, at a KL of {kl:.2f} nats a response, which costs {train_ppo.Config().beta * kl:.2f} of those",
        f"of those {proxy:.2f}.",
        f"never falls by more than {course('deepest fall'):.2f}, less than its interval",
    )
    assert course("deepest fall") < half_interval(DEFAULT)
    good, bad, again = (text(head, FIRST_POLICY) for head in ("good claims", "bad claims", "said again"))
    assert text("bad claims") == 0
    says(
        f"{text('good claims'):.2f} good claims instead of {good:.2f}, and none that is bad",
        f"{text('said again'):.2f} claims a response say something again, from {again:.2f}",
        f"Of {good + bad + again:.2f} claims in a response of the first policy {bad + again:.2f} cost a point",
    )
    shortest, step = numbers("courses", "shortest batch")[DEFAULT]
    says(
        f"In {step:.0f} steps the mean length falls from {course('length in step 0')} tokens to {shortest}",
        f"by step 10 gold is {result('gold at step 10'):.2f}",
        f"talks again: {result('length')} tokens",
    )


def test_the_lesson_admits_that_its_seed_is_the_highest_of_the_five_in_the_readme():
    (row,) = re.findall(r"^\| `train_ppo.py` \| ([^|]+) \|", (LESSON.parents[1] / "README.md").read_text(), re.M)
    ends = [float(end) for end in row.split(", ")]
    assert len(ends) == 5 and ends[0] == max(ends) == result(END)
    says(f"five seeds end at a gold of {min(ends):.2f} to {max(ends):.2f}", "and seed 0 is the highest")


def test_what_happens_without_kl_stands_in_the_table_of_lesson_14():
    hacking = (LESSON.parent / "14_reward_hacking" / "README.md").read_text()
    (row,) = re.findall(r"^\| 0 +\| 0 +\|(.*)\|$", hacking.partition("<!-- turns -->")[2], re.M)
    best, step, _, _, end, _, kl, _ = (cell.strip() for cell in row.split("|"))
    says(
        f"`--beta 0`: gold rises to {best} in step {step} and ends at {end}, KL {kl} (lesson 14)",
        f"The default ends at gold {result(END)}, KL {result('KL')}",
    )
    assert train_ppo.Config().mini_batches == 4 and "`--mini-batches 1`: a quarter of the updates" in PROSE


def test_what_the_lesson_says_of_critic_and_clip_stands_in_the_tables():
    mean, most = numbers("courses", "clipped, policy")[DEFAULT]
    says(
        f"(explained variance {course(VARIANCE):.2f}:",
        f"{course(VARIANCE + '+1'):.2f} in step 20, {result('explained variance'):.2f} at the end",
        f"loss falls from {course(LOSS):.3f} to {result('value loss'):.3f}",
        f"{mean:.2f} % of the policy's tokens are clipped, at most {most} % in a step",
        f"and {course('clipped, critic'):.2f} % of the critic's values",
        "KL(old || policy) stays below 0.01 nats a token",
        "In the seven runs below it never acts",
    )
    assert course("KL(old, policy)") < 0.01
    assert not any(course("left early", run) for run in RUNS) and len(RUNS) == 7


def test_what_the_lesson_says_of_epochs_and_mini_batches_stands_in_the_tables():
    config = train_ppo.Config()
    assert (config.epochs, config.mini_batches, config.prompts // config.mini_batches) == (1, 4, 32)
    assert (train_ppo.WARMUP, train_ppo.DECAY) == (0.1, 0.5)
    mean, most = numbers("courses", "clipped, policy")[TWO]
    says(
        "The default is one epoch of 4 mini-batches of 32 responses",
        "rises over the first tenth of the steps (",
        ") and falls to 0 over the last half.",
        f"cannot be told from the default: gold {result(END, TWO):.2f} at a KL of {result('KL', TWO):.2f}",
        f"with {mean:.2f} % of the policy's tokens clipped, at most {most} % in a step",
    )
    assert abs(result(END, TWO) - result(END)) < half_interval(TWO)


def test_what_the_lesson_says_of_kl_in_the_loss_stands_in_the_tables():
    fall, low, step = numbers("courses", "deepest fall")[IN_LOSS]
    says(
        f"Gold falls by {fall:.2f}, to {low:.2f} in step {step:.0f}, while the proxy climbs",
        f"up again to {result(END, IN_LOSS):.2f}, half of the default's",
        f"The proxy, {result('proxy', IN_LOSS):.2f}, is the highest of all, at a KL of {result('KL', IN_LOSS):.2f}",
        f"{text('said again', IN_LOSS):.2f} claims a response say something again. The first response of step 150",
    )
    assert result(END, IN_LOSS) / result(END) == pytest.approx(0.5, abs=0.05)
    assert result("proxy", IN_LOSS) == max(result("proxy", run) for run in RUNS)
    words = {run: numbers("texts", "commonest adjective")[run][0] for run in (IN_LOSS, DEFAULT)}
    says(f'{words[IN_LOSS]:.0f} % of its claims say "sharp"', f"(the default's commonest word: {words[DEFAULT]:.0f} %)")
    assert re.search(rf"^\| {IN_LOSS} +\| 150 .*\| sharp, {words[IN_LOSS]:.0f} % of the claims +\|$", README, re.M)
    assert text("step", IN_LOSS) == 150
    ((prompt, response),) = re.findall(r"```\n( the .+?)  (.+?)\n```", README)
    assert reviews.gold(prompt, response) == 1 and response.count("sharp") == 2
    says("for which the reward model gives 2.35 and gold 1:")


def test_what_the_lesson_says_of_another_beta_in_the_loss_stands_in_the_tables():
    error = math.sqrt(2 * result("value loss"))
    says(
        f"(a value loss of {result('value loss'):.3f} is an error of {error:.2f})",
        f"0.3 holds (KL {result('KL', IN_LOSS_03):.2f}, gold {result(END, IN_LOSS_03):.2f})",
        f"(KL {result('KL', IN_LOSS_1):.2f}, gold {result(END, IN_LOSS_1):.2f})",
    )
    assert error == pytest.approx(0.2, abs=0.03) and train_ppo.Config().beta / error == pytest.approx(0.5, abs=0.1)
    assert result("KL", IN_LOSS_03) == pytest.approx(result("KL"), rel=0.06)
    assert result(END, IN_LOSS_03) + half_interval(IN_LOSS_03) < result(END) - half_interval(DEFAULT)


def test_what_the_lesson_says_of_lambda_stands_in_the_tables():
    shortest, step = numbers("courses", "shortest batch")[LAM_0]
    says(
        f'By step {step:.0f} the policy mostly says " ." and ends: {shortest} tokens a response',
        f"near 0, {result('20', LAM_0):.2f} in step 20. It recovers, to {result(END, LAM_0):.2f}, and does not catch",
        f"{course(VARIANCE + '+1', LAM_0):.2f} in step 20, {course(VARIANCE + '+2', LAM_0):.2f} in step 40 and",
        f"{result('explained variance', LAM_0):.2f} at the end: its",
        f"cannot be told from the default: gold {result(END, LAM_1):.2f} at a KL of {result('KL', LAM_1):.2f}",
        f"foresees less, {result('explained variance', LAM_1):.2f} at the end",
    )
    assert result(END, LAM_0) + half_interval(LAM_0) < result(END) - half_interval(DEFAULT)
    for table, head in ("courses", VARIANCE + "+1"), ("courses", VARIANCE + "+2"), ("results", "explained variance"):
        found = {run: of(table, head, run) for run in RUNS}
        assert max(found, key=found.get) == LAM_0
    assert abs(result(END, LAM_1) - result(END)) < half_interval(LAM_1)
    assert result("explained variance", LAM_1) < result("explained variance")


def test_figure_counts_in_a_response_what_gold_counts(load):
    count = load("figure").count
    prompt = " the plot was dull"
    for response, counts in (
        (" .", (0, 0, 0, 0, 0)),
        ("", (0, 0, 0, 1, 0)),
        (" but the acting was very superb and the music was flat .", (1, 1, 0, 0, 0)),
        (" but the acting was superb and the music was superb and the plot was warm .", (1, 0, 2, 0, 0)),
        (" and the dull . . the", (0, 0, 0, 4, 0)),
        (" and the acting was warm ." * 4, (1, 0, 3, 3, 6)),
    ):
        good, bad, again, broken, long = count(prompt, response)
        assert (good, bad, again, broken, long) == counts
        assert good - bad - again - 2 * broken - 0.5 * long == reviews.gold(prompt, response)
