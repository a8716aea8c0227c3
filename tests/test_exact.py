"""In a world where every response can be listed: which estimators are unbiased, what each KL form's gradient is the
gradient of, and where training ends."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from nanorl.advantages import gae, group_advantages, place_rewards
from nanorl.exact import World, policy_gradient, total_variation
from nanorl.kl import exact_kl, kl_estimate
from nanorl.losses import dpo_loss, grpo_loss, ppo_loss
from nanorl.losses.aggregate import constant_mean, token_mean

WORLDS = {"three tokens, always": {}, "up to three tokens": {"stop": 0}}
BETA = 0.3


@pytest.fixture(params=WORLDS)
def world(request) -> World:
    return World(**WORLDS[request.param])


@pytest.fixture
def with_stop() -> World:
    return World(stop=0)


def rewards_of(world: World, seed: int = 2) -> Tensor:
    return torch.rand(len(world.responses), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(value_of, logits: Tensor) -> Tensor:
    """d value_of(logits) / d logits."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(value_of(logits), logits)[0]


def true_gradient(world: World, logits: Tensor, rewards: Tensor) -> Tensor:
    return gradient(lambda z: world.expected_reward(z, rewards), logits)


def assert_equal(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert want.abs().max() > 1e-3  # or there would be nothing to compare
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


# ---- the list is complete, and its numbers are those of the table


def test_every_response_and_every_prefix_is_listed_once():
    world = World()
    assert sorted(world.responses) == list(product(range(3), repeat=3))
    assert sorted(map(len, world.prefixes)) == [0] + [1] * 3 + [2] * 9 and len(set(world.prefixes)) == 13


def test_a_stop_token_ends_a_response(with_stop):
    letters = (1, 2)
    expected = [(0,)] + [(a, 0) for a in letters] + [(a, b, c) for a in letters for b in letters for c in range(3)]
    assert sorted(with_stop.responses) == sorted(expected)
    assert sorted(with_stop.prefixes) == sorted([(), (1,), (2,), *product(letters, repeat=2)])
    assert with_stop.mask.sum(1).tolist() == [len(response) for response in with_stop.responses]


def test_a_responses_probability_is_the_product_of_its_tokens(world):
    logits = world.random_logits(0)
    table = {prefix: row.softmax(0).tolist() for prefix, row in zip(world.prefixes, logits, strict=True)}
    probs = [math.prod(table[y[:t]][y[t]] for t in range(len(y))) for y in world.responses]
    assert world.probs(logits).tolist() == pytest.approx(probs, rel=1e-12)
    assert sum(probs) == pytest.approx(1, abs=1e-12)


def test_how_often_a_prefix_comes_up_is_the_sum_over_responses_that_go_through_it(world):
    logits = world.random_logits(0)
    probs = world.probs(logits).tolist()
    through = [
        sum(
            p
            for p, y in zip(probs, world.responses, strict=True)
            if len(y) > len(prefix) and y[: len(prefix)] == prefix
        )
        for prefix in world.prefixes
    ]
    assert world.visits(logits).tolist() == pytest.approx(through, rel=1e-12)


def test_the_policy_gradient_agrees_with_the_formula_written_out(world):
    """d J / d z[s, v] = sum_y pi(y) R(y) sum_t [s_t = s] ([y_t = v] - pi(v | s))."""
    logits, rewards = world.random_logits(0), rewards_of(world)
    by_hand = torch.zeros_like(logits)
    for y, p, r in zip(world.responses, world.probs(logits), rewards, strict=True):
        for t, token in enumerate(y):
            row = world.prefixes.index(y[:t])
            chosen = torch.nn.functional.one_hot(torch.tensor(token), 3)
            by_hand[row] += p * r * (chosen - logits[row].softmax(0))
    assert_equal(true_gradient(world, logits, rewards), by_hand)


# ---- which estimators of the policy gradient are unbiased


def mean_of_sums(logprobs, old_logprobs, advantages, mask):
    """REINFORCE: the mean over responses of A log pi(y)."""
    return constant_mean(-advantages[:, None] * logprobs, mask, max_length=1), {}


def mean_over_tokens(logprobs, old_logprobs, advantages, mask):
    return token_mean(-advantages[:, None] * logprobs, mask), {}


def minus_group_mean(rewards: Tensor) -> Tensor:
    return group_advantages(rewards, torch.zeros(len(rewards), dtype=torch.long), scale="none")


def z_score(rewards: Tensor) -> Tensor:
    return group_advantages(rewards, torch.zeros(len(rewards), dtype=torch.long), scale="group")


def minus_the_others(rewards: Tensor) -> Tensor:
    """Leave one out: each reward minus the mean of the others."""
    others = [torch.cat([rewards[:i], rewards[i + 1 :]]).mean() for i in range(len(rewards))]
    return rewards - torch.stack(others)


def expected(world: World, logits: Tensor, advantages, loss=mean_of_sums, rewards: Tensor | None = None, **how):
    """The expectation of the gradient of -loss, which should be that of the expected reward."""
    rewards = rewards_of(world) if rewards is None else rewards
    return -gradient(lambda z: world.expected_loss(z, rewards, advantages, loss, **how), logits)


@pytest.mark.parametrize("baseline", [0.0, 10.0])
def test_reinforce_is_unbiased_with_any_constant_baseline(baseline, world):
    logits = world.random_logits(0)
    found = expected(world, logits, lambda rewards: rewards - baseline, size=1)
    assert_equal(found, true_gradient(world, logits, rewards_of(world)), 1e-10)


@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_is_unbiased(size, with_stop):
    logits = with_stop.random_logits(0)
    found = expected(with_stop, logits, minus_the_others, size=size)
    assert_equal(found, true_gradient(with_stop, logits, rewards_of(with_stop)))


@pytest.mark.parametrize("size", [2, 3])
def test_the_group_mean_shrinks_the_gradient_by_exactly_one_part_in_the_group_size(size, with_stop):
    logits = with_stop.random_logits(0)
    found = expected(with_stop, logits, minus_group_mean, size=size)
    assert_equal(found, (size - 1) / size * true_gradient(with_stop, logits, rewards_of(with_stop)))


def test_dividing_by_the_groups_standard_deviation_turns_the_gradient(with_stop):
    logits = with_stop.random_logits(0)
    true = true_gradient(with_stop, logits, rewards_of(with_stop))
    assert cosine(expected(with_stop, logits, minus_group_mean), true) == pytest.approx(1, abs=1e-12)
    assert cosine(expected(with_stop, logits, z_score), true) < 0.995


def test_of_two_rewards_that_are_0_or_1_the_standard_deviation_is_a_constant(with_stop):
    """Groups of two that teach hold one 0 and one 1: the z-score is the centred reward times a constant."""
    logits, rewards = with_stop.random_logits(0), (rewards_of(with_stop) > 0.5).double()
    found = expected(with_stop, logits, z_score, rewards=rewards)
    true = true_gradient(with_stop, logits, rewards)
    assert_equal(found, true / 2 / (math.sqrt(0.5) + 1e-4))


def test_grpos_mean_over_each_responses_tokens_is_unbiased_up_to_a_constant_only_if_lengths_are_equal(with_stop):
    fixed = World(steps=2)
    logits = fixed.random_logits(0)
    found = expected(fixed, logits, minus_group_mean, grpo_loss)
    assert_equal(found, true_gradient(fixed, logits, rewards_of(fixed)) / 2 / 2)  # (G - 1) / G, and 2 tokens each
    logits = with_stop.random_logits(0)
    true = true_gradient(with_stop, logits, rewards_of(with_stop))
    assert cosine(expected(with_stop, logits, minus_group_mean, grpo_loss), true) < 0.99


def test_a_mean_over_the_groups_tokens_is_biased_if_lengths_differ(with_stop):
    logits = with_stop.random_logits(0)
    true = true_gradient(with_stop, logits, rewards_of(with_stop))
    assert cosine(expected(with_stop, logits, minus_group_mean, mean_over_tokens), true) < 0.99


def test_a_constant_divisor_is_unbiased_whatever_the_lengths(with_stop):
    """Dr. GRPO: no standard deviation, no length of its own; the group mean leaves its factor."""

    def dr_grpo(logprobs, old_logprobs, advantages, mask):
        return constant_mean(-advantages[:, None] * (logprobs - old_logprobs).exp(), mask, max_length=3), {}

    logits = with_stop.random_logits(0)
    true = true_gradient(with_stop, logits, rewards_of(with_stop))
    assert_equal(expected(with_stop, logits, minus_group_mean, dr_grpo), true / 2 / 3)


def test_off_policy_the_ratio_of_the_response_is_unbiased_and_that_of_the_token_is_not(with_stop):
    def sequence_ratio(logprobs, old_logprobs, advantages, mask):
        return -(advantages * (logprobs - old_logprobs).sum(1).exp()).mean(), {}

    def token_ratio(logprobs, old_logprobs, advantages, mask):
        return constant_mean(-advantages[:, None] * (logprobs - old_logprobs).exp(), mask, max_length=1), {}

    logits, old = with_stop.random_logits(0), with_stop.random_logits(1)
    true = true_gradient(with_stop, logits, rewards_of(with_stop))
    unchanged = {"size": 1, "old_logits": old}
    assert_equal(expected(with_stop, logits, lambda r: r, sequence_ratio, **unchanged), true)
    assert cosine(expected(with_stop, logits, lambda r: r, token_ratio, **unchanged), true) < 0.98
    assert cosine(expected(with_stop, logits, lambda r: r, mean_of_sums, **unchanged), true) < 0.98


# ---- the KL, and what the gradient of each form is the gradient of


def pathwise(world: World, ref_logits: Tensor, kind: str, level: str):
    """KL in the loss: the expected estimate while what is sampled is held fixed. Per token, summed over a response, or
    of the response as one action."""

    def value(logits: Tensor) -> Tensor:
        logprobs, ref_logprobs = world.logprobs(logits), world.logprobs(ref_logits)  # (N, T)
        if level == "response":
            logprobs, ref_logprobs = logprobs.sum(1, keepdim=True), ref_logprobs.sum(1, keepdim=True)  # (N, 1)
        return (world.probs(logits).detach() * kl_estimate(logprobs, ref_logprobs, kind).sum(1)).sum()

    return value


def in_the_reward(world: World, ref_logits: Tensor):
    """KL in the reward: k1 of the response as a cost, by the score function."""

    def value(logits: Tensor) -> Tensor:
        logprobs = world.logprobs(logits).sum(1)  # (N,)
        k1 = (logprobs - world.logprobs(ref_logits).sum(1)).detach()
        return (world.probs(logits).detach() * k1 * logprobs).sum()

    return value


def reversed_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    return exact_kl(ref_logits, logits)


@pytest.fixture
def pair(world) -> tuple[Tensor, Tensor]:
    return world.random_logits(0), world.random_logits(1)


def test_the_kl_of_responses_is_the_sum_of_the_tokens_kl_over_the_prefixes_the_policy_visits(world, pair):
    logits, ref_logits = pair
    listed = sum(p * math.log(p / q) for p, q in zip(*(world.probs(z).tolist() for z in pair), strict=True))
    assert world.kl(logits, ref_logits).item() == pytest.approx(listed, rel=1e-12)
    assert world.kl_of_tokens(logits, ref_logits).item() == pytest.approx(listed, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "response"])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_trap_a4_k1_and_k3_are_the_true_kl_on_average(kind, level, world, pair):
    logits, ref_logits = pair
    value = pathwise(world, ref_logits, kind, level)(logits)
    assert value.item() == pytest.approx(world.kl(logits, ref_logits).item(), rel=1e-12)


def test_trap_a4_k1_in_the_loss_does_nothing_on_average(world, pair):
    logits, ref_logits = pair
    for level in ("token", "response"):
        assert gradient(pathwise(world, ref_logits, "k1", level), logits).abs().max() < 1e-14


def test_trap_a4_k1_in_the_reward_follows_the_gradient_of_kl_policy_to_reference(world, pair):
    logits, ref_logits = pair
    true = gradient(lambda z: world.kl(z, ref_logits), logits)
    assert_equal(gradient(in_the_reward(world, ref_logits), logits), true)


def test_trap_a4_k2_of_the_response_in_the_loss_follows_the_gradient_of_kl_policy_to_reference(world, pair):
    logits, ref_logits = pair
    true = gradient(lambda z: world.kl(z, ref_logits), logits)
    assert_equal(gradient(pathwise(world, ref_logits, "k2", "response"), logits), true)


def test_trap_a4_k3_of_the_response_in_the_loss_follows_the_gradient_of_kl_reference_to_policy(world, pair):
    logits, ref_logits = pair
    reversed_order = gradient(lambda z: world.kl(ref_logits, z), logits)
    assert_equal(gradient(pathwise(world, ref_logits, "k3", "response"), logits), reversed_order)


@pytest.mark.parametrize(("kind", "kl"), [("k2", exact_kl), ("k3", reversed_kl)])
def test_per_token_kl_in_the_loss_leaves_out_that_a_token_decides_what_comes_next(kind, kl, world, pair):
    """It follows the gradient of the tokens' KL with the visited prefixes held fixed, not that of the responses' KL."""
    logits, ref_logits = pair
    found = gradient(pathwise(world, ref_logits, kind, "token"), logits)
    assert_equal(found, gradient(lambda z: world.kl_of_tokens(z, ref_logits, kl), logits))
    assert cosine(found, gradient(lambda z: world.kl(z, ref_logits), logits)) < 0.99


def test_trap_a4_the_published_numbers_are_those_of_a_world_of_one_step():
    world = World(steps=1)
    logits = torch.tensor([[0.2, -0.1, 0.4]], dtype=torch.float64)
    ref_logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert world.kl(logits, ref_logits).item() == pytest.approx(0.120209, abs=5e-7)
    published = {"k1": [0, 0, 0], "k2": [-0.17318, -0.07557, 0.24875], "k3": [-0.16242, -0.04991, 0.21233]}
    for kind, numbers in published.items():
        for level in ("token", "response"):
            found = gradient(pathwise(world, ref_logits, kind, level), logits)
            assert found[0].tolist() == pytest.approx(numbers, abs=5e-6)
    assert gradient(in_the_reward(world, ref_logits), logits)[0].tolist() == pytest.approx(published["k2"], abs=5e-6)


# ---- the optimum, and the way to it


@pytest.fixture
def problem(world) -> tuple[Tensor, Tensor, Tensor]:
    """Reference, rewards, and the optimum by its formula."""
    ref_logits, rewards = world.random_logits(1), rewards_of(world)
    weights = [q * math.exp(r / BETA) for q, r in zip(world.probs(ref_logits).tolist(), rewards.tolist(), strict=True)]
    optimum = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    torch.testing.assert_close(world.optimum(ref_logits, rewards, BETA), optimum, rtol=1e-12, atol=0)
    assert total_variation(world.probs(ref_logits), optimum) > 0.2
    return ref_logits, rewards, optimum


def test_no_policy_beats_the_optimum_and_it_is_worth_beta_log_z(world, problem):
    ref_logits, rewards, optimum = problem
    reference = world.probs(ref_logits)
    best = (optimum * rewards).sum() - BETA * (optimum * (optimum / reference).log()).sum()
    assert best.item() == pytest.approx(BETA * (reference * (rewards / BETA).exp()).sum().log().item(), rel=1e-12)
    for seed in range(20):
        logits = world.random_logits(seed)
        assert world.expected_reward(logits, rewards) - BETA * world.kl(logits, ref_logits) < best


def test_the_true_policy_gradient_with_kl_converges_to_the_optimum(world, problem):
    ref_logits, rewards, optimum = problem
    logits = policy_gradient(world, ref_logits, rewards, BETA, updates=300, learning_rate=10)
    assert total_variation(world.probs(logits), optimum) < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_the_policy_gradient_from_samples_with_kl_in_the_reward_converges_to_the_optimum(seed, world, problem):
    ref_logits, rewards, optimum = problem
    logits = policy_gradient(world, ref_logits, rewards, BETA, updates=300, learning_rate=10, samples=32, seed=seed)
    assert total_variation(world.probs(logits), optimum) < 0.01


@pytest.mark.parametrize(
    ("kind", "level", "reached"),
    [("k2", "response", True), ("k2", "token", False), ("k3", "token", False), ("k3", "response", False)],
)
def test_of_the_kl_forms_in_the_loss_k2_of_the_whole_response_alone_converges_to_the_optimum(
    kind, level, reached, world, problem
):
    ref_logits, rewards, optimum = problem
    penalty = pathwise(world, ref_logits, kind, level)
    logits = ref_logits
    for _ in range(1000):
        logits = logits + 10 * gradient(lambda z: world.expected_reward(z, rewards) - BETA * penalty(z), logits)
    distance = total_variation(world.probs(logits), optimum)
    assert distance < 0.001 if reached else distance > 0.03


def test_total_variation_is_the_largest_difference_of_any_events_probability():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    events = [[bool(i >> k & 1) for k in range(3)] for i in range(8)]
    assert total_variation(p, q) == pytest.approx(max(abs(p[e].sum() - q[e].sum()).item() for e in events))
    assert total_variation(p, p) == 0


# ---- a critic that is right, and preferences that are exact


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_with_a_critic_that_is_right_gae_gives_the_true_policy_gradient_for_any_lambda(world, lam):
    logits, rewards = world.random_logits(0), rewards_of(world)
    reached = (world.probs(logits) * rewards)[:, None].expand_as(world.states)[world.mask]
    values = torch.zeros(len(world.prefixes), dtype=torch.float64).index_add(0, world.states[world.mask], reached)
    values = (values / world.visits(logits))[world.states]  # (N, T): the expected reward before each token
    advantages, _ = gae(place_rewards(rewards, world.mask), values, world.mask, gamma=1.0, lam=lam)
    probs = world.probs(logits).detach()

    def objective(z: Tensor) -> Tensor:  # each response as often as it is sampled; a token counts 1
        logprobs = world.logprobs(z)
        loss, _ = ppo_loss(logprobs, logprobs.detach(), advantages * probs[:, None], world.mask, denominator=1)
        return -loss

    assert_equal(gradient(objective, logits), true_gradient(world, logits, rewards))


def test_dpo_on_exact_preferences_ends_at_the_best_policy_for_their_rewards(world):
    """Preferences without end, as counts: of 60 answers about a pair of weights 1, 2 or 3, exp(reward), each response
    wins its share, a whole number."""
    count = len(world.responses)
    weights = 1 + torch.arange(count) % 3
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    wins = [60 * weights[i].item() // (weights[i] + weights[j]).item() for i, j in pairs]
    chosen, rejected = torch.tensor(pairs).repeat_interleave(torch.tensor(wins), 0).unbind(1)
    ref_logits = world.random_logits(1)
    ref = world.logprobs(ref_logits).sum(1)
    logits = ref_logits.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logprobs = world.logprobs(logits).sum(1)
        value, _ = dpo_loss(logprobs[chosen], logprobs[rejected], ref[chosen], ref[rejected], beta=BETA)
        value.backward()
        return value

    best = world.optimum(ref_logits, weights.double().log(), BETA)
    assert total_variation(world.probs(ref_logits), best) > 0.2
    optimizer.step(loss)
    assert total_variation(world.probs(logits.detach()), best) < 0.01
