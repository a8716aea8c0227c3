"""Lesson 05: its numbers are those of the code, and its checks refuse wrong answers."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch

import train_dpo
import train_grpo
import train_ppo
from nanorl.errors import RunError
from nanorl.losses import dpo_loss, ipo_loss

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "05_dpo"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


def table_behind(text: str) -> list[list[str]]:
    """The cells of the rows, head and rule left out, of the first table behind `text`."""
    lines = README[README.index(text) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def numbers(cell: str) -> list[float]:
    return [float(x) for x in re.findall(r"[-+]?\d+(?:\.\d+)?", cell)]


def test_the_best_policy_and_its_worth_by_hand():
    rows = table_behind("**By hand**: three responses")
    assert [row[0] for row in rows] == ["2", "1", "0.5"]
    for beta, weights, total, probs, worth in ([numbers(cell) for cell in row] for row in rows):
        right = [p * math.exp(r / beta[0]) for p, r in zip((0.5, 0.3, 0.2), (0, 1, 2), strict=True)]
        assert weights == pytest.approx(right, abs=5.1e-5) and total == pytest.approx([sum(right)], abs=5.1e-5)
        assert probs == pytest.approx([w / sum(right) for w in right], abs=5.1e-5)
        assert worth == pytest.approx([beta[0] * math.log(sum(right))], abs=5.1e-5)


def loss_and_pull(margin: float, beta: float, loss=dpo_loss) -> tuple[float, float]:
    """Loss of a pair with that h, and the derivative by its chosen log-prob."""
    chosen = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(1, dtype=torch.float64)
    value, _ = loss(chosen, nothing, nothing, nothing, beta=beta)
    return value.item(), torch.autograd.grad(value, chosen)[0].item()


def test_the_loss_and_its_pull_by_hand():
    assert loss_and_pull(3.0, 0.1) == pytest.approx((0.554355, -0.042556), abs=5e-7)
    assert loss_and_pull(0.0, 0.1) == pytest.approx((0.693147, -0.05), abs=5e-7)
    assert [loss_and_pull(h, 0.1)[1] for h in (-30.0, 30.0)] == pytest.approx([-0.0953, -0.0047], abs=5e-5)
    assert loss_and_pull(-0.5, 0.2) == pytest.approx((0.744397, -0.104996), abs=5e-7)  # of the questions
    assert loss_and_pull(3.0, 0.1, ipo_loss)[0] == pytest.approx(4.0)
    for shown in ("0.554355", "0.042556", "0.693147", "0.0953", "0.0047", "0.744397", "0.104996"):
        assert shown in PROSE


def test_where_dpo_and_ipo_rest_is_where_their_mean_loss_is_flat():
    for p, dpo, ipo in table_behind("which rests at"):
        for shown, loss in ((dpo, dpo_loss), (ipo, ipo_loss)):
            if shown == "infinite":
                assert float(p) == 1 and loss_and_pull(500.0, 0.1)[1] < 0  # still pulling
                continue
            up, down = (loss_and_pull(sign * float(shown), 0.1, loss)[1] for sign in (1, -1))
            assert float(p) * up - (1 - float(p)) * down == pytest.approx(0.0, abs=2e-5)


def test_cdpo_ends_the_pull_on_one_answer_and_robust_dpo_does_not():
    smoothed = functools.partial(dpo_loss, label_smoothing=0.1)
    robust = functools.partial(smoothed, robust=True)
    rests = math.log(0.9 / 0.1) / 0.1
    assert loss_and_pull(rests, 0.1, smoothed)[1] == pytest.approx(0) and loss_and_pull(rests + 1, 0.1, smoothed)[1] > 0
    loss, pull = loss_and_pull(1000.0, 0.1, robust)
    assert loss == pytest.approx(-12.5) and "and $\\beta h = 100$ it is -12.5" in PROSE and "a tenth flipped" in PROSE
    assert loss_and_pull(1e6, 0.1, robust)[0] < -1e4 and loss_and_pull(1e6, 0.1, robust)[1] == pytest.approx(pull) != 0
    assert pull < 0 and loss_and_pull(1000.0, 0.1)[0] == pytest.approx(0)
    for h in (-2.0, 5.0):  # averaged over the flips it is DPO's of the true label
        right, flipped = loss_and_pull(h, 0.1, robust)[0], loss_and_pull(-h, 0.1, robust)[0]
        assert 0.9 * right + 0.1 * flipped == pytest.approx(loss_and_pull(h, 0.1)[0])
    with pytest.raises(RunError, match="--label-smoothing"):
        train_dpo.main(train_dpo.Config(robust=True))


def test_dpo_arrives_at_the_best_policy_and_the_table_shows_where(load):
    world = load("dpo_world")
    rows = table_behind("<!-- world -->")
    assert [float(row[0]) for row in rows] == list(world.BETAS)
    for row, beta in zip(rows, world.BETAS, strict=True):
        logits, distances = world.train(beta)
        found = world.found(logits, beta)
        assert distances[0] > 0.1 and found["off by"] < 1e-3
        mean = (found["chosen"] + found["rejected"]) / 2
        assert mean == pytest.approx(-found["KL(ref, pi)"], abs=1e-12)
        expected = [found["off by"], found["reward"], found["KL"], found["chosen"], found["rejected"], mean]
        assert [float(x) for x in row[1:7]] == pytest.approx(expected, abs=5.1e-4)
        assert world.loss(logits, beta).item() == pytest.approx(0.5663, abs=5e-5)
    assert "by 0.03 nats on average; with 0.3 by 1.4" in PROSE
    assert [round(float(rows[1][4]), 2), round(float(rows[0][4]), 1)] == [-0.03, -1.4]


# ---- exercises


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("best_policy", "rewards / beta", "rewards * beta"),
        ("best_policy", "ref_probs.log() + ", ""),
        ("best_policy", "beta * scores.logsumexp(0)", "scores.logsumexp(0)"),
        ("dpo_loss", "(rejected - ref_rejected.detach())", "rejected"),
        ("dpo_loss", "ref_chosen.detach()", "ref_chosen"),
        ("dpo_loss", "ref_rejected.detach()", "ref_rejected"),
        ("dpo_loss", ".mean()", ".sum()"),
        ("dpo_loss", "-torch.nn.functional.logsigmoid(beta * h)", "-(beta * h).sigmoid().log()"),
        ("dpo_loss", "beta * h", "h"),
        ("drift", "2 * ref_probs[:, None] * ref_probs * wins", "ref_probs[:, None] * ref_probs * wins"),
        ("drift", "* wins ", "* wins.T "),
        ("drift", "ref_probs[:, None] * ref_probs", "probs[:, None] * probs"),
        ("resting_margins", "p.logit() / beta", "p / beta"),
        ("resting_margins", "(2 * p - 1) / (2 * beta)", "1 / (2 * beta) + 0 * p"),
        ("response_logprobs", "stops.cumsum(1) - stops", "stops.cumsum(1)"),
        ("response_logprobs", "(before == 0)", "(before >= 0)"),
        ("train_on_pairs", "logprobs - reference)[chosen]", "logprobs - logprobs.detach())[chosen]"),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)


def test_the_first_silent_bug_cannot_tell_a_response_that_stops_from_one_that_was_cut_off(load):
    exercise, solution = load("exercise"), load("solution")
    stops, cut_off = torch.tensor([[4, 5, 9]]), torch.tensor([[4, 5]])
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]])
    wrong = [exercise.response_logprobs(logprobs[:, : t.shape[1]], t, 9).item() for t in (stops, cut_off)]
    right = [solution.response_logprobs(logprobs[:, : t.shape[1]], t, 9).item() for t in (stops, cut_off)]
    assert (wrong, right) == ([-3.0, -3.0], [-6.0, -3.0])


def test_the_second_silent_bug_doubles_its_margin_with_twice_the_updates(load):
    wrong = load("exercise").train_on_pairs
    start, chosen, rejected = torch.zeros(3, dtype=torch.float64), torch.tensor([0]), torch.tensor([1])

    def margin(updates: int) -> float:
        trained = wrong(start, chosen, rejected, 0.5, updates=updates, learning_rate=0.1)
        return (trained[0] - trained[1]).item()

    assert margin(200) == pytest.approx(2 * margin(100)) and margin(100) > 1


# ---- what the lesson says of its runs


def test_what_ipo_and_a_large_learning_rate_do_has_the_defaults_that_the_lesson_says():
    default = train_dpo.Config()
    assert (default.beta, 4e-3 / default.learning_rate) == (0.3, 4.0)
    assert "$1 / (2 \\cdot 0.3) = 1.67$" in PROSE and round(1 / (2 * default.beta), 2) == 1.67
    assert loss_and_pull(1 / (2 * default.beta), default.beta, ipo_loss) == pytest.approx((0, 0), abs=1e-12)
    (row,) = (row for row in table_behind("<!-- dpo -->") if row[0] == "0.3")  # over the seeds
    for seed_0, cell in ((0.84, row[1]), (0.71, row[2]), (3.1, row[3])):
        mean, half = measured(cell)
        assert abs(seed_0 - mean) < half
    assert "where DPO's default has 0.71 at 3.1" in PROSE and "the default on 0.84" in PROSE


def measured(cell: str) -> tuple[float, float]:
    """Mean and half of its interval; NaN where there is none."""
    mean, _, half = cell.partition(" ± ")
    return float(mean), float(half) if half else math.nan


def test_what_the_lesson_says_of_its_runs_stands_in_their_tables():
    frontier = {
        (row[0], row[1]): [measured(cell) for cell in row[2:] if cell != "-"]
        for row in table_behind("<!-- frontier -->")
    }

    def kl_and_gold(method: str, setting: str) -> tuple[float, float]:
        (kl, _), (gold, _) = frontier[method, setting][:2]
        return round(kl, 1), round(gold, 2)

    assert "Best of 64 has 1.47 of gold at no more than 3.2 nats; PPO with beta 0.1 has 1.38 there" in PROSE
    assert kl_and_gold("best-of-n", "n = 64") == (3.2, 1.47) and kl_and_gold("PPO", "beta 0.1") == (3.2, 1.38)
    assert "Beta 0.3 ends at 1.4 nats with 1.06, between best of 8 (0.93) and best of 16 (1.18)" in PROSE
    low, middle, high = (
        kl_and_gold(*point) for point in (("best-of-n", "n = 8"), ("PPO", "beta 0.3"), ("best-of-n", "n = 16"))
    )
    assert (middle, low[1], high[1]) == ((1.4, 1.06), 0.93, 1.18) and low[0] < middle[0] < high[0]
    for one, other in ((("PPO", "beta 0.1"), ("best-of-n", "n = 64")), (("PPO", "beta 0.3"), ("best-of-n", "n = 8"))):
        (a, half), (b, _) = frontier[one][1], frontier[other][1]
        assert abs(a - b) < half  # "do not tell these apart"
    assert "Beta 0.05 spends 5.6 nats for 1.46, beta 0.1 has 1.38 for 3.2" in PROSE
    assert kl_and_gold("PPO", "beta 0.05") == (5.6, 1.46)
    assert "With 0.3, the default, it has 0.69 at 3.8 nats: less than PPO gets for that" in PROSE
    assert kl_and_gold("DPO", "beta 0.3") == (3.8, 0.69) and kl_and_gold("PPO", "beta 0.1")[1] > 0.69
    assert "(-0.46 and -1.67, where best of 1, the warm start, has -0.50)" in PROSE
    assert [kl_and_gold("DPO", f"beta {beta}")[1] for beta in ("0.05", "0.1")] == [-0.46, -1.67]
    assert kl_and_gold("best-of-n", "n = 1") == (0.0, -0.5)
    assert "The seeds are far apart (± 2.35 and ± 5.84)" in PROSE
    assert [frontier["DPO", f"beta {beta}"][1][1] for beta in ("0.05", "0.1")] == [2.35, 5.84]
    assert "ends at 0.58 with beta 0.3 and 0.50 with 0.1, below best-of-n and PPO at the same KL" in PROSE
    grpo = [kl_and_gold("GRPO", f"beta {beta}") for beta in ("0.3", "0.1")]
    assert [gold for _, gold in grpo] == [0.58, 0.5]
    for (kl, gold), better in zip(grpo, (("best-of-n", "n = 8"), ("PPO", "beta 0.1")), strict=True):
        assert kl_and_gold(*better)[0] <= kl and kl_and_gold(*better)[1] > gold
    assert "(-0.23 ± 3.14)" in PROSE and frontier["GRPO", "beta 0.05"][1] == (-0.23, 3.14)
    assert "another one (lesson 04)" in PROSE
    assert "PPO alone pays for a response that is cut off, 1 off its score" in PROSE
    assert train_ppo.Config().missing_eos_penalty == 1 and not hasattr(train_grpo.Config(), "missing_eos_penalty")

    loose, middle, default = ([measured(cell)[0] for cell in row[1:]] for row in table_behind("<!-- dpo -->"))
    assert "in 0.80 and 0.81 of fresh pairs" in PROSE
    assert [round(row[0], 2) for row in (loose, middle)] == [0.8, 0.81]
    assert "less likely at every beta" in PROSE and all(row[4] < 0 for row in (loose, middle, default))
    assert "With 0.3 by 2.6 nats, rejected ones by 7.4" in PROSE
    assert [round(-x, 1) for x in default[4:]] == [2.6, 7.4]
    assert "is 5.0 nats, not much more than" in PROSE and round(-sum(default[4:]) / 2, 1) == 5.0 < 1.5 * default[2]
    assert "have lost 19.4 nats, rejected ones 43.6" in PROSE and [-x for x in loose[4:]] == [19.4, 43.6]
    other_kl = -sum(loose[4:]) / 2
    assert "more than 30 nats, about four times" in PROSE and other_kl > 30 and 3.5 < other_kl / loose[2] < 4.5
