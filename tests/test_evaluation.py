"""Accuracy, its interval, pass@k: against published values, brute force, and counting by hand."""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from nanorl import evaluation
from nanorl.evaluation import (
    describe_evaluation,
    evaluate,
    evaluate_preferred,
    grade,
    pass_at_k,
    sample_lines,
    wilson_interval,
)
from nanorl.model import frozen_copy
from nanorl.rollout import Rollout
from nanorl.tasks.task import Problem
from nanorl.tokenizer import Tokenizer

# ---- the interval


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_those_of_newcombe_1998(right, n, low, high):
    assert wilson_interval(right, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 512])
def test_the_bounds_are_the_shares_from_which_the_observed_one_is_1_96_deviations_away(n):
    for right in {0, 1, n // 3, n - 1, n}:
        low, high = wilson_interval(right, n)
        for share in (low, high):
            if 1e-12 < share < 1 - 1e-12:
                deviations = (right / n - share) / math.sqrt(share * (1 - share) / n)
                assert abs(deviations) == pytest.approx(1.959963984540054, rel=1e-9)
        assert 0 <= low <= right / n <= high <= 1
        assert (low < 1e-12) == (right == 0) and (high > 1 - 1e-12) == (right == n)


def test_the_interval_of_the_complement_is_the_mirror_image():
    low, high = wilson_interval(3, 10)
    assert wilson_interval(7, 10) == pytest.approx((1 - high, 1 - low), abs=1e-15)


@pytest.mark.parametrize(("right", "n"), [(-1, 4), (5, 4), (0, 0)])
def test_an_impossible_count_has_no_interval(right, n):
    with pytest.raises(ValueError, match=f"got {right} of {n}"):
        wilson_interval(right, n)


# ---- pass@k


@pytest.mark.parametrize(("n", "right", "k", "expected"), [(4, 1, 2, 0.5), (10, 3, 5, 11 / 12), (10, 0, 5, 0.0)])
def test_trap_h3_pass_at_k_is_unbiased(n, right, k, expected):
    assert pass_at_k(n, right, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [5, 100, 0, -1])
def test_trap_h3_pass_at_k_of_more_samples_than_there_are_is_an_error_and_not_1(k):
    for right in (0, 2, 4):
        with pytest.raises(ValueError, match=f"k = {k}, n = 4"):
            pass_at_k(4, right, k)


@pytest.mark.parametrize("right", [-1, 5])
def test_pass_at_k_of_an_impossible_count_is_an_error(right):
    with pytest.raises(ValueError, match=f"right = {right}"):
        pass_at_k(4, right, 2)


def test_pass_at_k_is_the_share_of_all_ways_to_draw_k_samples():
    for n in range(1, 8):
        for right in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([1] * right + [0] * (n - right), k))
                share = Fraction(sum(any(draw) for draw in draws), len(draws))
                assert pass_at_k(n, right, k) == pytest.approx(float(share), abs=1e-15)


# ---- grading and evaluating


class Echo:
    """A task that is solved by repeating the prompt; `doubled` tells whether it was said twice."""

    tokenizer = Tokenizer.characters("abc")
    max_prompt_tokens = 1
    max_new_tokens = 3

    def reward(self, problem: Problem, response: str) -> float:
        return float(response == problem.answer) + 0.25 * (response == "")

    def describe(self, problem: Problem, response: str) -> dict[str, float]:
        return {"doubled": float(response == 2 * problem.prompt), "never": 0.0}


PROBLEMS = [Problem("a", "a"), Problem("b", "bb"), Problem("c", "c")]


def responses(texts: list[list[str]]) -> Rollout:
    """What a sampler returns for one list of texts a problem; a text of three characters was cut off."""
    flat = [text for of_problem in texts for text in of_problem]
    ids = [Echo.tokenizer.encode(t) if len(t) == 3 else Echo.tokenizer.encode_response(t) for t in flat]
    rollout = Rollout.from_responses([[0]] * len(flat), ids)
    rollout.groups = torch.arange(len(texts)).repeat_interleave(len(texts[0]))
    rollout.finish = ["length" if len(text) == 3 else "stop" for text in flat]
    return rollout


def test_grading_matches_each_row_with_the_problem_of_its_group():
    rollout = responses([["a", "b"], ["bb", "b"], ["cc", "a"]])
    rewards, described = grade(Echo(), PROBLEMS, rollout)
    assert rewards == [1, 0, 1, 0, 0, 0]
    assert described == {"doubled": [0, 0, 1, 0, 1, 0], "never": [0] * 6}
    order = [5, 2, 0, 4, 1, 3]
    assert grade(Echo(), PROBLEMS, rollout.select(order))[0] == [rewards[row] for row in order]


def test_grading_reads_a_response_up_to_its_stop_token():
    eos = Echo.tokenizer.eos_id
    rollout = Rollout.from_responses([[0], [0]], [[0, eos, 1, 1], [eos]])
    rollout.groups = torch.tensor([0, 0])
    assert grade(Echo(), PROBLEMS, rollout)[0] == [1, 0.25]


def test_a_sample_line_shows_prompt_response_and_reward():
    rollout = responses([["a", "bc"], ["bb", ""]])
    lines = ["a a   reward 1", "a bc   reward 0", "b bb   reward 1", "b    reward 0.25"]
    assert sample_lines(Echo(), PROBLEMS, rollout, torch.tensor([1.0, 0.0, 1.0, 0.25])) == lines


def test_beside_a_hidden_gold_a_sample_line_calls_the_reward_the_proxy():
    rollout = responses([["a"], ["bb"]])
    lines = ["a a   gold -1  proxy 2.5", "b bb   gold 3  proxy -0.5"]
    assert sample_lines(Echo(), PROBLEMS, rollout, torch.tensor([2.5, -0.5]), [-1.0, 3.0]) == lines


@dataclass
class Recorded:
    """In place of a sampler: says what it is told, and remembers how it was asked."""

    sampled: list[list[str]]
    greedy: list[list[str]]
    asked: list[dict]

    def __call__(self, policy):
        return self

    def generate(self, prompts, **how) -> Rollout:
        self.asked.append({"prompts": prompts} | how)
        return responses(self.greedy if how.get("greedy") else self.sampled)


def evaluate_recorded(monkeypatch, sampled, greedy, samples):
    sampler = Recorded(sampled, greedy, [])
    monkeypatch.setattr(evaluation, "Sampler", sampler)
    return evaluate(None, Echo(), PROBLEMS, 3, samples=samples), sampler.asked


def test_an_evaluation_counts_right(monkeypatch):
    sampled = [
        ["a", "abc", "b", "a"],  # 2 of 4 right, the first of them; one cut off
        ["b", "bb", "b", "b"],  # 1 of 4, not the first, and it says the prompt twice
        ["aa", "aa", "", "abc"],  # none; the empty answer earns a quarter, which is not right
    ]
    result, asked = evaluate_recorded(monkeypatch, sampled, [["a"], ["bb"], ["a"]], samples=4)
    low, high = wilson_interval(1, 3)
    greedy_low, greedy_high = wilson_interval(2, 3)
    lengths = [2, 3, 2, 2, 2, 3, 2, 2, 3, 3, 1, 3]  # tokens, the stop token among them
    assert result == pytest.approx(
        {
            "accuracy": 1 / 3,
            "accuracy_low": low,
            "accuracy_high": high,
            "accuracy_greedy": 2 / 3,
            "accuracy_greedy_low": greedy_low,
            "accuracy_greedy_high": greedy_high,
            "mean_length": sum(lengths) / 12,
            "truncated_share": 2 / 12,
            "problems": 3,
            "doubled": 1 / 12,
            "accuracy_doubled": 1.0,
            "never": 0.0,
            "accuracy_never": None,
            # Of 6 pairs of the first problem's samples 5 hold a right one, of the second's 3, of the third's 0.
            "pass@1": (2 / 4 + 1 / 4 + 0) / 3,
            "pass@2": (5 / 6 + 3 / 6 + 0) / 3,
            "pass@4": 2 / 3,
        }
    )
    for how in asked:
        assert how["prompts"] == [[0], [1], [2]]
        assert how["stop_ids"] == [Echo.tokenizer.eos_id] and how["max_new_tokens"] == 3
        assert how.get("temperature", 1.0) == 1.0 and how["seed"] == evaluation.EVAL_SEED
    assert [(how.get("greedy", False), how.get("samples_per_prompt", 1)) for how in asked] == [(False, 4), (True, 1)]


def test_an_evaluation_with_one_sample_knows_pass_at_1_alone(monkeypatch):
    result, _ = evaluate_recorded(monkeypatch, [["a"], ["bb"], ["c"]], [["b"], ["b"], ["b"]], samples=1)
    assert (result["accuracy"], result["accuracy_greedy"], result["pass@1"]) == (1, 0, 1)
    assert "pass@2" not in result
    assert result["accuracy_high"] == 1 and result["accuracy_low"] < 0.5


def test_a_policy_is_examined_the_same_way_twice_and_nothing_else_changes(tiny_gpt):
    policy = tiny_gpt(vocab_size=Echo.tokenizer.vocab_size, max_context=8)
    weights = {name: value.clone() for name, value in policy.state_dict().items()}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = evaluate(policy, Echo(), PROBLEMS, 3, samples=2)
    torch.manual_seed(2)
    assert evaluate(policy, Echo(), PROBLEMS, 3, samples=2) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    evaluate(policy, Echo(), PROBLEMS, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in policy.state_dict().items())
    assert all(weight.requires_grad and weight.grad is None for weight in policy.parameters())


def test_the_summary_for_the_console_names_before_after_and_the_interval(monkeypatch):
    before, _ = evaluate_recorded(monkeypatch, [["b", "a"]] * 3, [["a"], ["b"], ["b"]], samples=2)
    after, _ = evaluate_recorded(monkeypatch, [["a", "a"], ["bb", "bb"], ["c", "b"]], [["a"], ["bb"], ["b"]], samples=2)
    lines = describe_evaluation(before, after).splitlines()
    assert "3 held-out problems" in lines[0] and "before -> after" in lines[0]
    low, high = wilson_interval(3, 3)
    assert lines[1].split("T = 1")[1].split() == ["0.000", "->", "1.000", f"[{low:.3f},", f"{high:.3f}]"]
    assert "0.333 -> 0.667" in lines[2] and "2.000 -> 2.333" in lines[3]
    assert lines[4].split() == ["pass@1", "0.167", "->", "0.833"] and lines[5].startswith("pass@2")


# ---- where nothing can be verified


def test_gold_its_interval_and_the_proxy_are_means_over_one_response_a_problem(monkeypatch, tiny_gpt):
    """Gold 1, 0 and 1/4: mean 5/12, variance 13/48 (ddof 1), half the interval 1.959964 sqrt(13/48 / 3) = 0.588896."""
    sampler = Recorded([["a"], ["abc"], [""]], [], [])
    monkeypatch.setattr(evaluation, "Sampler", sampler)
    policy = tiny_gpt(vocab_size=4, max_context=8)
    shown = []

    def proxy(rollout):
        shown.append(rollout)
        return torch.tensor([1.0, 2.0, 6.0])

    found = evaluate_preferred(policy, frozen_copy(policy), proxy, Echo(), PROBLEMS, 3)
    assert found == pytest.approx(
        {
            "gold": 5 / 12,
            "gold_low": 5 / 12 - 0.588896,
            "gold_high": 5 / 12 + 0.588896,
            "proxy": 3.0,
            "kl": 0.0,
            "mean_length": (2 + 3 + 1) / 3,
            "truncated_share": 1 / 3,
            "problems": 3,
        },
        abs=1e-6,
    )
    assert found["kl"] == 0  # a policy and its copy: exactly
    assert len(shown) == 1 and shown[0].texts(Echo.tokenizer) == ["a", "abc", ""]
    ((how),) = sampler.asked
    assert how["prompts"] == [[0], [1], [2]] and how["seed"] == evaluation.EVAL_SEED
    assert how.get("temperature", 1.0) == 1.0 and not how.get("greedy", False)
    assert how["stop_ids"] == [Echo.tokenizer.eos_id] and how["max_new_tokens"] == 3


def test_the_kl_of_an_evaluation_is_summed_over_each_response_its_stop_token_included(monkeypatch, table_model):
    """Policy 1/2, 1/4, 1/8, 1/8 (stop), reference 1/4; "aa" 2 log 2 - log 2, "aab" 2 log 2 + 0 (cut off), "" - log 2"""
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    policy, reference = table_model(probabilities.log().expand(8, 4)), table_model(torch.zeros(8, 4).double())
    monkeypatch.setattr(evaluation, "Sampler", Recorded([["aa"], ["aab"], [""]], [], []))
    found = evaluate_preferred(policy, reference, lambda rollout: torch.zeros(3), Echo(), PROBLEMS, 3)
    assert found["kl"] == pytest.approx((1 + 2 - 1) * math.log(2) / 3, abs=1e-9)


def test_a_single_response_has_an_interval_without_bounds(monkeypatch, tiny_gpt):
    monkeypatch.setattr(evaluation, "Sampler", Recorded([["a"]], [], []))
    policy = tiny_gpt(vocab_size=4, max_context=8)
    found = evaluate_preferred(policy, policy, lambda rollout: torch.zeros(1), Echo(), PROBLEMS[:1], 3)
    assert (found["gold"], found["gold_low"], found["gold_high"]) == (1, -math.inf, math.inf)


def test_the_console_shows_gold_proxy_and_kl_before_and_after():
    before = {"gold": -1.0, "gold_low": -1.5, "gold_high": -0.5, "proxy": 0.0, "kl": 0.0, "mean_length": 9.0}
    after = {"gold": 1.25, "gold_low": 1.0, "gold_high": 1.5, "proxy": 2.0, "kl": 7.5, "mean_length": 12.0}
    lines = describe_evaluation(before, after | {"problems": 512}).splitlines()
    assert lines[1].split("(hidden)")[1].split() == ["-1.000", "->", "1.250", "[1.000,", "1.500]"]
    assert "proxy score (learned)       0.000 -> 2.000" in lines[2] and "0.000 -> 7.500" in lines[3]
    assert len(lines) == 5


def test_the_console_calls_the_proxy_of_a_policy_without_a_reward_model_what_it_is():
    """DPO's evaluation: that of the pairs is in it."""
    before = {"gold": -1.0, "proxy": 0.0, "kl": 0.0, "mean_length": 9.0, "pair_accuracy": 0.5, "problems": 512}
    lines = describe_evaluation(before, before | {"proxy": 2.0}).splitlines()
    assert lines[2] == "reward the policy implies   0.000 -> 2.000"


def test_a_mean_that_is_no_number_is_described_as_such_instead_of_ending_the_run_in_an_error():
    """NaN has become None in summary.json, from which the evaluation before training is read."""
    before = {"gold": -1.0, "proxy": None, "kl": 0.0, "mean_length": 9.0}
    after = {"gold": 1.25, "proxy": float("nan"), "kl": None, "mean_length": 12.0, "problems": 2}
    lines = describe_evaluation(before, after).splitlines()
    assert "nan -> nan" in lines[2] and "0.000 -> nan" in lines[3]
