"""Advantages from a critic: where the reward goes, GAE against its definition, and whitening."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanorl.advantages import gae, place_rewards, whiten

properties = settings(derandomize=True, deadline=None, max_examples=40)
BROKEN = [7.0, math.nan, math.inf, -math.inf]


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(found: Tensor, expected: list, tolerance: float = 1e-14) -> None:
    torch.testing.assert_close(found, f64(expected), rtol=0, atol=tolerance)


# ---- trap B.1


@pytest.mark.parametrize("pad", BROKEN)
def test_trap_b1_neither_the_value_nor_the_reward_of_a_pad_leaks_into_gae(pad):
    advantages, returns = gae(f64([[0, 1, pad]]), f64([[0.5, 0.5, pad]]), f64([[1, 1, 0]]), gamma=1.0, lam=0.95)
    assert_equal(advantages, [[0.475, 0.5, 0.0]])
    assert_equal(returns, [[0.975, 1.0, 0.0]])


@pytest.mark.parametrize("pad", BROKEN)
def test_trap_b1_whitening_sees_trainable_tokens_alone_and_pads_stay_0(pad):
    mask = f64([[1, 1, 1, 0, 0]])
    assert_equal(whiten(f64([[1, 2, 3, pad, pad]]), mask, eps=0.0), [[-1, 0, 1, 0, 0]])
    assert_equal(whiten(f64([[1, 2, 3, pad, pad]]), mask), [[-1, 0, 1, 0, 0]], 1e-8)


@pytest.mark.parametrize("pad", BROKEN)
def test_trap_b1_a_single_token_or_none_is_whitened_to_0(pad):
    assert whiten(f64([[5, pad]]), f64([[1, 0]])).tolist() == [[0, 0]]
    assert whiten(f64([[pad, pad]]), f64([[0, 0]])).tolist() == [[0, 0]]
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


def test_trap_b1_the_variance_is_the_samples_and_1e_minus_8_is_added_to_it():
    assert_equal(whiten(f64([[1, 3]]), f64([[1, 1]]), eps=2.0), [[-0.5, 0.5]])  # -1 / sqrt(2 + 2)
    tiny = whiten(f64([[0.0, 2e-4]]), f64([[1, 1]]))  # variance 2e-8: 1e-4 / sqrt(3e-8)
    assert_equal(tiny, [[-1 / math.sqrt(3), 1 / math.sqrt(3)]], 1e-12)


def test_trap_b1_whitening_advantages_leaves_the_returns_as_they_were():
    rewards, values, mask = f64([[0, 1, 0]]), f64([[0.5, 0.5, 7]]), f64([[1, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    before = returns.clone()
    assert_equal(whiten(advantages, mask), [[-math.sqrt(0.5), math.sqrt(0.5), 0.0]], 1e-4)
    assert torch.equal(returns, before)
    assert_equal(advantages, [[0.475, 0.5, 0.0]])


@properties
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_whitened_tokens_have_mean_0_and_sample_variance_1(seed, lengths, dtype):
    batch = random_batch(seed, lengths, holes=0.3)
    mask = batch["mask"]
    found = whiten(1000 + batch["values"].to(dtype), mask)
    assert found.dtype == dtype and (found[~mask] == 0).all()
    if mask.sum() > 1:
        assert found[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
        assert found[mask].var(correction=1).item() == pytest.approx(1.0, abs=1e-3)


def test_equal_values_are_whitened_to_0_in_single_precision_too():
    assert whiten(torch.full((3, 7), 0.1), torch.ones(3, 7)).abs().max() < 1e-8


def test_a_nan_on_a_trainable_token_is_not_hidden_by_whitening():
    assert whiten(f64([[1, math.nan, 3]]), f64([[1, 1, 1]])).isnan().all()


# ---- trap B.2


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_trap_b2_the_score_lands_on_the_stop_token_or_the_last_one_and_nowhere_for_an_empty_response(kind):
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]).to(kind)
    placed = place_rewards(f64([1.0, 2.0, 9.0, -3.0]), mask)
    assert placed.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [0, 0, 0, 0, 0], [-3, 0, 0, 0, 0]]
    assert placed.dtype == torch.float64


def test_trap_b2_tokens_an_environment_inserted_do_not_get_the_score():
    assert place_rewards(f64([5.0]), torch.tensor([[1, 0, 1, 1, 0, 0]])).tolist() == [[0, 0, 0, 5, 0, 0]]
    assert place_rewards(f64([5.0]), torch.tensor([[0, 0, 1, 0, 0, 0]])).tolist() == [[0, 0, 5, 0, 0, 0]]


def test_trap_b2_the_score_of_an_empty_response_is_not_even_looked_at_and_a_broken_one_is_not_hidden():
    assert place_rewards(f64([math.nan, 1.0]), torch.tensor([[0, 0], [1, 0]])).tolist() == [[0, 0], [1, 0]]
    placed = place_rewards(f64([math.nan]), torch.tensor([[1, 1]]))
    assert placed[0, 1].isnan() and placed[0, 0] == 0


@properties
@given(seed=st.integers(0, 2**31), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_trap_b2_placed_rewards_add_up_to_the_scores_of_responses_that_are_not_empty(seed, lengths):
    batch = random_batch(seed, lengths, holes=0.3)
    scores, mask = batch["rewards"][:, 0], batch["mask"]
    placed = place_rewards(scores, mask)
    assert torch.equal(placed.sum(1), torch.where(mask.any(1), scores, 0.0))
    assert (placed[~mask] == 0).all() and ((placed != 0).sum(1) <= 1).all()


@pytest.mark.parametrize("scores,mask", [((3,), (2, 4)), ((2, 1), (2, 4)), ((), (2, 4)), ((2,), (2,))])
def test_scores_of_a_wrong_shape_are_an_error_that_shows_it(scores, mask):
    with pytest.raises(ValueError, match=r"expected scores \(B,\) and a mask \(B, T\)"):
        place_rewards(torch.zeros(scores), torch.ones(mask))


# ---- GAE


def random_batch(seed: int, lengths: list[int], holes: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(*lengths, 1)
    rewards, values = torch.randn(2, B, T, generator=generator, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    mask &= torch.rand(B, T, generator=generator) >= holes
    return {"rewards": rewards, "values": values, "mask": mask}


def by_definition(rewards, values, mask, *, gamma, lam, bootstrap) -> tuple[list, list]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, a row and a token at a time, in Python's own floats."""
    advantages, returns = ([[0.0] * mask.shape[1] for _ in mask] for _ in range(2))
    for b, row in enumerate(mask.tolist()):
        where = [t for t, chosen in enumerate(row) if chosen]
        r, v = rewards[b, where].tolist(), [*values[b, where].tolist(), bootstrap[b].item()]
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(where))]
        for i, t in enumerate(where):
            advantages[b][t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(where)))
            returns[b][t] = advantages[b][t] + v[i]
    return advantages, returns


BATCHES = {
    "seed": st.integers(0, 2**31),
    "lengths": st.lists(st.integers(0, 6), min_size=1, max_size=5),
    "holes": st.sampled_from([0.0, 0.4]),
    "gamma": st.sampled_from([1.0, 0.9, 0.0]),
}


@properties
@given(**BATCHES, lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]), truncated=st.booleans())
def test_gae_is_the_discounted_sum_of_one_step_errors(seed, lengths, holes, gamma, lam, truncated):
    batch = random_batch(seed, lengths, holes)
    bootstrap = torch.linspace(-1, 2, len(lengths), dtype=torch.float64) if truncated else None
    advantages, returns = gae(**batch, gamma=gamma, lam=lam, bootstrap=bootstrap)
    ended = bootstrap if truncated else torch.zeros(len(lengths))
    expected = by_definition(**batch, gamma=gamma, lam=lam, bootstrap=ended)
    assert_equal(advantages, expected[0], 1e-12)
    assert_equal(returns, expected[1], 1e-12)


@properties
@given(seed=BATCHES["seed"], length=st.integers(1, 6), gamma=BATCHES["gamma"])
def test_lambda_0_is_the_one_step_error_and_lambda_1_the_monte_carlo_return_minus_the_value(seed, length, gamma):
    batch = random_batch(seed, [length])
    r, v = batch["rewards"][0].tolist(), [*batch["values"][0].tolist(), 0.0]
    advantages, _ = gae(**batch, gamma=gamma, lam=0.0)
    assert_equal(advantages, [[r[t] + gamma * v[t + 1] - v[t] for t in range(length)]])
    advantages, returns = gae(**batch, gamma=gamma, lam=1.0)
    monte_carlo = [sum(gamma ** (k - t) * r[k] for k in range(t, length)) for t in range(length)]
    assert_equal(returns, [monte_carlo], 1e-12)
    assert_equal(advantages, [[monte_carlo[t] - v[t] for t in range(length)]], 1e-12)


@properties
@given(**BATCHES, pads=st.randoms(use_true_random=False))
def test_tokens_inserted_anywhere_by_an_environment_change_nothing(seed, lengths, holes, gamma, pads):
    batch = random_batch(seed, lengths, holes)
    width = batch["mask"].shape[1]
    columns = sorted(pads.sample(range(width + 4), width))  # where the old columns are now
    wide = {}
    for name, old in batch.items():
        new = torch.zeros(len(lengths), width + 4, dtype=old.dtype)
        if name != "mask":
            new = f64([[pads.choice(BROKEN) for _ in range(width + 4)] for _ in lengths])
        new[:, columns] = old
        wide[name] = new
    for found, expected in zip(gae(**wide, gamma=gamma, lam=0.9), gae(**batch, gamma=gamma, lam=0.9), strict=True):
        assert torch.equal(found[:, columns], expected)
        assert (found[~wide["mask"]] == 0).all()


def test_the_bootstrap_is_the_next_value_of_a_row_that_was_cut_off():
    rewards, values, mask = f64([[0, 1], [0, 1]]), f64([[0.5, 0.25], [0.5, 0.25]]), torch.tensor([[1, 1], [1, 1]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5, bootstrap=f64([0.0, 2.0]))
    # Cut off: delta_1 = 1 + 0.5 x 2 - 0.25 = 1.75; delta_0 = 0.5 x 0.25 - 0.5 = -0.375; A_0 = -0.375 + 0.25 x 1.75
    assert_equal(advantages, [[-0.375 + 0.25 * 0.75, 0.75], [0.0625, 1.75]])
    assert_equal(returns, [[0.3125, 1.0], [0.5625, 2.0]])
    without, _ = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert torch.equal(without[0], advantages[0]) and torch.equal(without[1], advantages[0])  # a stop token ends it all


def test_a_row_cut_off_earns_what_the_whole_one_does_where_the_critic_is_right_about_the_rest():
    batch = random_batch(1, [6])
    batch["values"][0, 4:] = batch["rewards"][0, 4:].flip(0).cumsum(0).flip(0)  # the true returns of the last two
    whole, _ = gae(**batch, gamma=1.0, lam=0.8)
    cut = {name: values[:, :4] for name, values in batch.items()}
    part, _ = gae(**cut, gamma=1.0, lam=0.8, bootstrap=batch["values"][:, 4])
    torch.testing.assert_close(part, whole[:, :4], rtol=0, atol=1e-14)


def test_an_empty_row_has_no_advantage_whatever_its_bootstrap():
    zeros, mask = torch.zeros(2, 3), torch.tensor([[0, 0, 0], [1, 0, 0]])
    advantages, returns = gae(zeros, zeros, mask, gamma=1.0, lam=1.0, bootstrap=torch.tensor([math.nan, 3.0]))
    assert advantages.tolist() == returns.tolist() == [[0, 0, 0], [3, 0, 0]]
    empty = torch.zeros(2, 0)
    assert gae(empty, empty, empty, gamma=1.0, lam=1.0)[0].shape == (2, 0)


@pytest.mark.parametrize("where", ["rewards", "values"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_number_on_a_trainable_token_is_not_hidden(where, broken):
    batch = random_batch(0, [3, 3])
    batch[where][0, 2] = broken
    advantages, _ = gae(**batch, gamma=1.0, lam=0.95)
    assert not advantages[0].isfinite().any() and advantages[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_and_returns_keep_the_type_and_carry_no_gradient(dtype):
    batch = random_batch(0, [3, 2])
    values = batch["values"].to(dtype).requires_grad_()
    for found in gae(batch["rewards"].to(dtype), values, batch["mask"], gamma=1.0, lam=0.9, bootstrap=values[:, 0]):
        assert found.dtype == dtype and not found.requires_grad


@pytest.mark.parametrize("where", ["rewards", "values", "mask"])
@pytest.mark.parametrize("shape", [(2, 4), (1, 3), (2,), (2, 3, 1)])
def test_a_wrong_shape_is_an_error_that_shows_it(where, shape):
    with pytest.raises(ValueError, match=r"of one shape \(B, T\)"):
        gae(**random_batch(0, [3, 3]) | {where: torch.ones(shape)}, gamma=1.0, lam=1.0)


@pytest.mark.parametrize("shape", [(2, 1), (3,), (), (2, 3)])
def test_a_bootstrap_that_is_not_one_value_a_row_is_an_error(shape):
    with pytest.raises(ValueError, match=r"expected bootstrap \(B,\) = \(2,\)"):
        gae(**random_batch(0, [3, 3]), gamma=1.0, lam=1.0, bootstrap=torch.ones(shape))


@pytest.mark.parametrize("gamma,lam", [(1.1, 0.9), (-0.1, 0.9), (0.9, 1.5), (math.nan, 0.9)])
def test_a_gamma_or_lambda_outside_0_and_1_is_an_error(gamma, lam):
    with pytest.raises(ValueError, match="gamma and lam must be between 0 and 1"):
        gae(**random_batch(0, [3]), gamma=gamma, lam=lam)


def test_whole_numbers_which_would_round_what_is_computed_from_them_are_an_error():
    whole, mask = torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"expected rewards and values in floating point, got torch\.int64"):
        gae(whole, whole, mask, gamma=0.5, lam=0.5)
    with pytest.raises(ValueError, match=r"expected values in floating point, got torch\.int64"):
        whiten(whole, mask)
