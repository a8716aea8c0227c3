"""Group advantages against TRL's values, numbers worked out by hand, and what no reordering or outlier may change."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanorl.advantages import group_advantages, importance_weights, leave_one_out

STORED = json.loads((Path(__file__).parent / "data" / "advantages.json").read_text())
ORACLE = STORED["cases"]
ONE_GROUP = torch.zeros(4, dtype=torch.long)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_numpy(
    rewards: list[float], groups: list[int], scale: str, ddof: int, eps: float, valid: list[bool]
) -> list[float]:
    """The definition, one row at a time."""
    result = []
    batch = np.array([r for r, v in zip(rewards, valid, strict=True) if v])
    for reward, group, counts in zip(rewards, groups, valid, strict=True):
        rows = zip(rewards, groups, valid, strict=True)
        members = np.array([r for r, g, v in rows if v and g == group])
        if not counts or len(members) == 1 or members.max() == members.min():
            result.append(0.0)
        elif scale == "none":
            result.append(reward - members.mean())
        else:
            result.append((reward - members.mean()) / ((members if scale == "group" else batch).std(ddof=ddof) + eps))
    return result


@pytest.mark.parametrize("case", ORACLE, ids=[case["name"] for case in ORACLE])
def test_advantages_agree_with_trl(case):
    config = case["config"]
    scale = config.get("scale_rewards", "group")
    assert scale in ("group", "none")
    weights = config.get("reward_weights", [1.0] * len(case["rewards_per_func"][0]))
    rewards, valid = [], []
    for row in case["rewards_per_func"]:
        given_rewards = [w * r for w, r in zip(weights, row, strict=True) if r is not None]
        rewards.append(sum(given_rewards))
        valid.append(bool(given_rewards))
    groups = torch.arange(len(rewards)) // config["num_generations"]
    advantages = group_advantages(f64(*rewards), groups, scale=scale, valid=torch.tensor(valid))
    assert advantages.dtype == torch.float64
    torch.testing.assert_close(advantages, f64(*case["advantages"]), rtol=0, atol=1e-10)


def test_the_stored_cases_cover_holes_weights_and_both_scales():
    names = {case["name"] for case in ORACLE}
    assert names >= {"one/group", "one/none", "one/group/G=12", "two/weights", "two/weights/none"}
    assert names >= {"holes/group", "holes/none"}


@pytest.mark.parametrize(
    "ddof,expected",
    [(0, [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]), (1, [1.5, -0.5, -0.5, -0.5])],
    ids=["ddof0", "ddof1"],
)
def test_trap_a3_standard_deviation_of_the_sample_or_of_the_population(ddof, expected):
    advantages = group_advantages(f64(1, 0, 0, 0), ONE_GROUP, ddof=ddof, eps=0.0)
    torch.testing.assert_close(advantages, f64(*expected), rtol=0, atol=1e-14)


def test_trap_a3_the_sample_standard_deviation_and_an_eps_of_1e_minus_4_are_the_default():
    advantages = group_advantages(f64(1, 0, 0, 0), ONE_GROUP)  # mean 0.25, std 0.5
    torch.testing.assert_close(advantages, f64(0.75, -0.25, -0.25, -0.25) / 0.5001, rtol=0, atol=1e-14)


@pytest.mark.filterwarnings("error")  # torch warns of a std that has no degree of freedom
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_trap_a3_a_group_of_one_has_advantage_0(scale, ddof, eps):
    assert group_advantages(f64(1), torch.tensor([7]), scale=scale, ddof=ddof, eps=eps).tolist() == [0.0]
    beside = group_advantages(f64(1, 5, 3), torch.tensor([7, 2, 2]), scale=scale, ddof=ddof, eps=eps)
    assert beside[0].item() == 0.0
    assert beside[1].item() == -beside[2].item() > 0


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_trap_a3_a_broken_reward_is_an_error_that_names_the_row(broken):
    with pytest.raises(ValueError, match=rf"reward of row 1 is {broken}: mend it, or leave it out with `valid`"):
        group_advantages(f64(2, broken, 6), ONE_GROUP[:3])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 1e300, 4.0])
@pytest.mark.parametrize("ddof,expected", [(0, 1.0), (1, math.sqrt(0.5))], ids=["ddof0", "ddof1"])
def test_trap_a3_statistics_are_over_the_valid_members(broken, ddof, expected):
    valid = torch.tensor([True, False, True])
    advantages = group_advantages(f64(2, broken, 6), ONE_GROUP[:3], ddof=ddof, eps=0.0, valid=valid)
    torch.testing.assert_close(advantages, f64(-expected, 0, expected), rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_trap_a3_an_invalid_row_poisons_neither_its_group_nor_the_batch(scale):
    rewards, groups = f64(1, 0, math.nan, 0.5, 1, 1, 0), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    keep = torch.tensor([True, True, False, True, True, True, True])
    advantages = group_advantages(rewards, groups, scale=scale, valid=keep)
    assert advantages[2].item() == 0.0
    alone = group_advantages(rewards[keep], groups[keep], scale=scale)
    torch.testing.assert_close(advantages[keep], alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_trap_a3_a_group_with_one_valid_member_or_none_has_advantage_0(scale, eps):
    rewards, groups = f64(3, math.nan, math.nan, math.nan), torch.tensor([0, 0, 1, 1])
    valid = torch.tensor([True, False, False, False])
    assert group_advantages(rewards, groups, scale=scale, eps=eps, valid=valid).tolist() == [0.0] * 4
    none = group_advantages(rewards, groups, scale=scale, eps=eps, valid=torch.zeros(4, dtype=torch.bool))
    assert none.tolist() == [0.0] * 4


def test_batch_scale_divides_by_the_std_of_all_raw_rewards_and_keeps_the_group_mean():
    rewards, groups = f64(1, 0, 11, 10), torch.tensor([0, 0, 1, 1])
    std = math.sqrt((4.5**2 + 5.5**2) * 2 / 3)  # of the four rewards around their mean 5.5, ddof 1
    advantages = group_advantages(rewards, groups, scale="batch", eps=0.0)
    torch.testing.assert_close(advantages, f64(0.5, -0.5, 0.5, -0.5) / std, rtol=0, atol=1e-14)


def test_scale_none_only_subtracts_the_group_mean():
    rewards, groups = f64(1, 0, 11, 10), torch.tensor([0, 0, 1, 1])
    assert group_advantages(rewards, groups, scale="none").tolist() == [0.5, -0.5, 0.5, -0.5]


ROWS = st.lists(
    st.tuples(st.sampled_from([-3.0, -0.5, 0.0, 0.1, 0.25, 1.0, 7.0]), st.integers(-2, 2), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(rows=ROWS, scale=st.sampled_from(["group", "batch", "none"]), ddof=st.sampled_from([0, 1]))
def test_advantages_equal_the_definition_row_by_row(rows, scale, ddof):
    rewards, groups, valid = map(list, zip(*rows, strict=True))
    advantages = group_advantages(
        f64(*rewards), torch.tensor(groups), scale=scale, ddof=ddof, eps=1e-4, valid=torch.tensor(valid)
    )
    expected = by_numpy(rewards, groups, scale, ddof, 1e-4, valid)
    torch.testing.assert_close(advantages, f64(*expected), rtol=0, atol=1e-12)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(rows=ROWS, scale=st.sampled_from(["group", "batch", "none"]), order=st.randoms(use_true_random=False))
def test_the_order_of_rows_and_the_names_of_groups_change_nothing(rows, scale, order):
    rewards, groups, valid = (torch.tensor(column) for column in zip(*rows, strict=True))
    rewards = rewards.double()
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    straight = group_advantages(rewards, groups, scale=scale, valid=valid)
    renamed = group_advantages(rewards[shuffled], 1000 - 37 * groups[shuffled], scale=scale, valid=valid[shuffled])
    torch.testing.assert_close(renamed, straight[shuffled], rtol=0, atol=1e-12)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(rows=ROWS, scale=st.sampled_from(["group", "batch", "none"]))
def test_advantages_of_each_group_sum_to_0(rows, scale):
    rewards, groups, valid = (torch.tensor(column) for column in zip(*rows, strict=True))
    advantages = group_advantages(rewards.double(), groups, scale=scale, valid=valid)
    for group in groups.unique():
        assert abs(advantages[groups == group].sum().item()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -0.7, 123456.7])
def test_equal_rewards_give_exactly_0(dtype, scale, reward):
    """The mean of seven times 0.1 is not 0.1 to the last bit; with eps 0 the rest would become an advantage of 1."""
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0], dtype=dtype)
    advantages = group_advantages(rewards, torch.tensor([0] * 7 + [1] * 2), scale=scale, eps=0.0)
    assert advantages[:7].tolist() == [0.0] * 7
    assert (advantages[7:] != 0).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_rewards_equal_within_a_millionth_count_as_equal_and_others_do_not(sign):
    groups = torch.zeros(2, dtype=torch.long)
    assert group_advantages(sign * f64(1, 1 + 1e-7), groups, eps=0.0).tolist() == [0.0, 0.0]
    apart = group_advantages(sign * f64(1, 1 + 1e-5), groups, eps=0.0)
    torch.testing.assert_close(apart, sign * f64(-1, 1) * math.sqrt(0.5), rtol=0, atol=1e-9)


def test_small_rewards_are_compared_relative_to_their_own_size():
    advantages = group_advantages(f64(1e-9, 3e-9), torch.zeros(2, dtype=torch.long), eps=0.0)
    torch.testing.assert_close(advantages, f64(-1, 1) * math.sqrt(0.5), rtol=0, atol=1e-9)


def test_a_large_reward_in_another_group_does_not_make_a_group_equal():
    advantages = group_advantages(f64(1, 0, 1e9, 1e9), torch.tensor([0, 0, 1, 1]), scale="none")
    assert advantages.tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_keep_the_type_of_the_rewards(dtype):
    for scale in ("group", "batch", "none"):
        assert group_advantages(torch.tensor([1.0, 0.0], dtype=dtype), ONE_GROUP[:2], scale=scale).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_rewards_are_taken_as_numbers(dtype):
    advantages = group_advantages(torch.tensor([1, 0, 0, 0], dtype=dtype), ONE_GROUP, eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_empty_batch_has_no_advantages(scale):
    assert group_advantages(f64(), ONE_GROUP[:0], scale=scale).shape == (0,)


def test_the_rewards_given_are_left_as_they_were():
    rewards = f64(1, math.nan, 3, 4)
    group_advantages(rewards, ONE_GROUP, valid=torch.tensor([True, False, True, True]))
    assert rewards[[0, 2, 3]].tolist() == [1.0, 3.0, 4.0] and rewards[1].isnan()


@pytest.mark.parametrize(
    "rewards,groups,valid",
    [
        (torch.zeros(2, 2), torch.zeros(2, 2), None),
        (torch.zeros(3), torch.zeros(4), None),
        (torch.zeros(4), torch.zeros(4), torch.ones(1)),
        (torch.zeros(4), torch.zeros(1), None),
    ],
    ids=["rewards", "groups", "valid", "broadcast"],
)
def test_wrong_shapes_are_an_error_that_says_what_was_expected(rewards, groups, valid):
    with pytest.raises(ValueError, match=r"expected rewards, groups \(and valid\) of one shape \(B,\), got"):
        group_advantages(rewards, groups.long(), valid=valid)


def test_an_unknown_scale_is_an_error_that_lists_the_choices():
    with pytest.raises(ValueError, match="unknown scale 'std': choose one of group, batch, none"):
        group_advantages(f64(1, 0), ONE_GROUP[:2], scale="std")


@pytest.mark.parametrize("ddof", [2, -1, 0.5])
def test_another_ddof_is_an_error_that_shows_it(ddof):
    with pytest.raises(ValueError, match=f"ddof must be 0 or 1, not {ddof}"):
        group_advantages(f64(1, 0), ONE_GROUP[:2], ddof=ddof)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0, 6e4])
def test_trap_a3_large_and_tiny_rewards_keep_their_signal(dtype, scale):
    rewards = scale * torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    found = group_advantages(rewards.to(dtype), torch.zeros(4, dtype=torch.long), eps=0.0)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), torch.tensor([1.5, -0.5, -0.5, -0.5]).double(), rtol=0, atol=1e-6)


def test_trap_a3_rewards_at_the_end_of_the_range_never_give_nan():
    for rewards in ([3e38, 3e38, -3e38], [1e20, -1e20, 0.0], [1e-25, 0.0, 0.0]):
        found = group_advantages(torch.tensor(rewards), torch.zeros(3, dtype=torch.long), eps=0.0)
        assert found.isfinite().all() and found.abs().max() > 0.5


@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf])
def test_an_eps_that_would_turn_or_break_the_signs_is_refused(eps):
    with pytest.raises(ValueError, match="eps must be a finite number of at least 0"):
        group_advantages(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long), eps=eps)


# Leave-one-out.

RLOO_LEFT_OUT = {"two/normalize": "whitens over the whole batch"}
RLOO = [case for case in STORED["rloo"]["cases"] if case["name"] not in RLOO_LEFT_OUT]


@pytest.mark.parametrize("case", RLOO, ids=[case["name"] for case in RLOO])
def test_leave_one_out_agrees_with_trl(case):
    """TRL's RLOO clips rewards and takes beta times the KL off them first; both are the caller's business here."""
    config = case["config"]
    weights = config.get("reward_weights", [1.0] * len(case["rewards_per_func"][0]))
    low, high = config.get("reward_clip_range", (-math.inf, math.inf))
    lengths = [len(tokens) for tokens in STORED["completions"]]
    rewards, valid = [], []
    for i, row in enumerate(case["rewards_per_func"]):
        given_rewards = [w * r for w, r in zip(weights, row, strict=True) if r is not None]
        old, ref = (STORED["rloo"][name][i][: lengths[i]] for name in ("old_logps", "ref_logps"))
        reward = min(max(sum(given_rewards), low), high)
        rewards.append(reward - config.get("beta", 0.0) * (sum(old) - sum(ref)))
        valid.append(bool(given_rewards))
    groups = torch.arange(len(rewards)) // config["num_generations"]
    advantages = leave_one_out(f64(*rewards), groups, valid=torch.tensor(valid))
    torch.testing.assert_close(advantages, f64(*case["advantages"]), rtol=0, atol=1e-10)


def test_the_cases_of_leave_one_out_are_all_tried_but_those_named():
    assert {case["name"] for case in RLOO} >= {"one", "one/beta=0.05", "two/clip", "holes"}
    assert {case["name"] for case in STORED["rloo"]["cases"]} == {case["name"] for case in RLOO} | RLOO_LEFT_OUT.keys()


def test_leave_one_out_subtracts_the_mean_of_the_others():
    rewards, groups = f64(1, 0, 5, 2, 2, 8), torch.tensor([0, 0, 1, 0, 1, 2])  # groups of 3, 2 and 1
    expected = f64(1 - 2 / 2, 0 - 3 / 2, 5 - 2, 2 - 1 / 2, 2 - 5, 0)
    torch.testing.assert_close(leave_one_out(rewards, groups), expected, rtol=0, atol=1e-14)


def test_leave_one_out_is_the_distance_to_the_mean_of_all_times_n_over_n_minus_1():
    rewards, groups = f64(1, 0, 0.5, 3, 2, 2), torch.tensor([0, 0, 0, 0, 1, 1])
    plain = group_advantages(rewards, groups, scale="none")
    torch.testing.assert_close(leave_one_out(rewards, groups)[:4], plain[:4] * 4 / 3, rtol=0, atol=1e-14)
    assert leave_one_out(rewards, groups)[4:].tolist() == [0.0, 0.0]


def test_leave_one_out_needs_finite_rewards_or_valid():
    with pytest.raises(ValueError, match="reward of row 1 is nan"):
        leave_one_out(f64(1, math.nan, 3), ONE_GROUP[:3])
    advantages = leave_one_out(f64(1, math.nan, 3), ONE_GROUP[:3], valid=torch.tensor([True, False, True]))
    assert advantages.tolist() == [-2.0, 0.0, 2.0]


# Truncated importance weights.


def test_importance_weights_are_the_ratio_of_old_to_behavior_policy_up_to_the_cap():
    old = torch.tensor([[-1.0, -1.0, -1.0, -3.0]], dtype=torch.float64)
    behavior = torch.tensor([[-1.5, -4.0, -0.5, math.nan]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    weights = importance_weights(old, behavior, mask, cap=2.0)
    expected = [math.exp(0.5), 2.0, math.exp(-0.5), 1.0]
    torch.testing.assert_close(weights[0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert not weights.requires_grad


def test_importance_weights_of_sequences_are_the_geometric_means_of_their_tokens_ratios():
    old = torch.full((3, 3), -1.0, dtype=torch.float64, requires_grad=True)
    rows = [[-1.3, -1.0, math.nan], [-9.0, -9.0, -9.0], [math.nan, math.inf, 0.0]]
    behavior = torch.tensor(rows, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    weights = importance_weights(old, behavior, mask, cap=2.0, level="sequence")
    torch.testing.assert_close(weights, f64(math.exp(0.15), 2.0, 1.0), rtol=0, atol=1e-12)
    assert not weights.requires_grad
    with pytest.raises(ValueError, match="unknown level 'word': choose one of token, sequence"):
        importance_weights(old, behavior, mask, cap=2.0, level="word")


def test_importance_weights_make_the_advantage_of_another_samplers_tokens_unbiased():
    """Expected advantage under the sampler, weighted, is that under the policy (no weight reaches the cap here)."""
    sampler, policy = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    advantages = torch.tensor([1.0, -2.0, 0.5]).double()
    weights = importance_weights(policy.log()[None], sampler.log()[None], torch.ones(1, 3), cap=2.0)[0]
    assert float((sampler * weights * advantages).sum()) == pytest.approx(float((policy * advantages).sum()), abs=1e-12)


def test_a_cap_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="cap must be positive, not 0"):
        importance_weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), cap=0)
