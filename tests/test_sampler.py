import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nanorl.errors import RunError
from nanorl.sampler import Sampler, choose, truncate, uniform
from nanorl.tokenizer import Tokenizer

both_ways = pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
FORMS = {
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "tied": True},
    "qwen3": {"head_width": 10},
}
RAGGED = [[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 3], [19, 0, 19], [9, 9, 9, 9, 9, 9]]


def responses(rollout) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.lengths.tolist(), strict=True)]


def logprobs(rollout) -> list[torch.Tensor]:
    return [row[:n] for row, n in zip(rollout.behavior_logprobs, rollout.lengths.tolist(), strict=True)]


def assert_same_rows(rollout, others, tolerance):
    """Row i of `rollout` equals the i-th of `others`, each a (Rollout, row)."""
    for i, (other, j) in enumerate(others):
        assert responses(rollout)[i] == responses(other)[j]
        assert rollout.finish[i] == other.finish[j]
        torch.testing.assert_close(logprobs(rollout)[i], logprobs(other)[j], rtol=0, atol=tolerance)


class ForwardCalls:
    """Records the shape (rows, tokens) of what every forward call of a model reads."""

    def __init__(self, model):
        self.shapes = []
        model.register_forward_pre_hook(lambda module, args: self.shapes.append(tuple(args[0].shape)))


# ---- the same sample, however it is computed


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_trap_c6_cached_equals_uncached_for_64_greedy_tokens(tiny_gpt, form):
    model = tiny_gpt(**form)
    options = {"max_new_tokens": 64, "stop_ids": [], "greedy": True}
    cached = Sampler(model).generate(RAGGED, **options)
    uncached = Sampler(model, cached=False).generate(RAGGED, **options)
    assert cached.tokens.shape == (6, 64) and len({tuple(row) for row in cached.tokens.tolist()}) == 6
    assert_same_rows(cached, [(uncached, i) for i in range(6)], 1e-5)


@pytest.mark.parametrize(
    "dtype, std, sharpness, tolerance",
    [
        (torch.float32, 0.2, 1, 1e-5),
        (torch.float64, 0.2, 1, 1e-10),
        (torch.float32, 0.02, 20, 1e-5),  # a fresh head scaled by 20
        (torch.float64, 0.2, 20, 1e-10),  # sharper still: log-probs down to -60
    ],
)
@both_ways
def test_trap_c1_a_sample_is_the_same_alone_in_a_batch_and_in_another_order(
    tiny_gpt, dtype, std, sharpness, tolerance, cached
):
    model = tiny_gpt(dtype=dtype, std=std)
    model.head_weight.data *= sharpness
    sampler = Sampler(model, cached=cached)

    def sample(rows):
        prompts = [RAGGED[row] for row in rows]
        return sampler.generate(
            prompts, max_new_tokens=30, stop_ids=[2, 7, 9], seed=4, sample_ids=[100 + row for row in rows]
        )

    batch = sample(range(6))
    assert len(set(batch.lengths.tolist())) > 2  # rows leave the batch at different times
    assert batch.behavior_logprobs.dtype == dtype and torch.isfinite(batch.behavior_logprobs).all()
    alone = [(sample([row]), 0) for row in range(6)]
    assert_same_rows(batch, alone, tolerance)
    order = [4, 0, 5, 2, 1, 3]
    shuffled = sample(order)
    assert_same_rows(shuffled, [(batch, row) for row in order], tolerance)


def test_trap_c1_a_short_prompt_beside_a_long_one_gives_the_same_greedy_tokens_as_alone(tiny_gpt):
    model = tiny_gpt()
    options = {"max_new_tokens": 20, "stop_ids": [], "greedy": True}
    for cached in (True, False):
        sampler = Sampler(model, cached=cached)
        together = sampler.generate([[5, 6, 7, 8], [9]], **options)
        others = sampler.generate([[9], [0, 2, 0, 2, 0, 2, 0, 2, 0], [5, 6, 7, 8]], **options)
        alone = [(sampler.generate([prompt], **options), 0) for prompt in ([5, 6, 7, 8], [9])]
        assert_same_rows(together, alone, 1e-5)
        assert_same_rows(together, [(others, 2), (others, 0)], 1e-5)


@both_ways
def test_samples_of_a_group_are_those_of_a_prompt_written_several_times(tiny_gpt, cached):
    sampler = Sampler(tiny_gpt(dtype=torch.float64), cached=cached)
    options = {"max_new_tokens": 12, "stop_ids": [2], "seed": 1}
    group = sampler.generate(RAGGED[:3], samples_per_prompt=4, **options)
    apart = sampler.generate([prompt for prompt in RAGGED[:3] for _ in range(4)], **options)
    assert_same_rows(group, [(apart, i) for i in range(12)], 1e-10)
    assert group.groups.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert group.prompts == apart.prompts and apart.groups.tolist() == list(range(12))
    assert len({tuple(response) for response in responses(group)[:4]}) > 1


def test_trap_c6_the_same_seed_gives_the_same_samples_and_another_seed_others(tiny_gpt):
    sampler = Sampler(tiny_gpt())

    def sample(seed):
        return sampler.generate(RAGGED, max_new_tokens=20, stop_ids=[2], seed=seed)

    first, second, other = sample(7), sample(7), sample(8)
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.mask, second.mask)
    assert torch.equal(first.behavior_logprobs, second.behavior_logprobs)
    assert responses(first) != responses(other)


def test_samples_are_numbered_from_zero_unless_named(tiny_gpt):
    sampler = Sampler(tiny_gpt())
    options = {"max_new_tokens": 8, "stop_ids": [], "samples_per_prompt": 2}
    unnamed = sampler.generate(RAGGED, **options)
    assert torch.equal(unnamed.tokens, sampler.generate(RAGGED, sample_ids=range(12), **options).tokens)
    assert not torch.equal(unnamed.tokens, sampler.generate(RAGGED, sample_ids=range(12, 24), **options).tokens)


# ---- stopping


@both_ways
def test_trap_c3_a_row_that_stopped_never_wakes_up(scripted_model, cached):
    eos = 2
    model = scripted_model([6, 7, 8, 9, eos, eos, 5, 5, 5, 5], vocab_size=10)
    # The first row reads up to position 4 and says EOS, EOS, 5, 5, ...; the others need five steps to get there. One
    # row of 17 is too few to leave the batch at once.
    rollout = Sampler(model, cached=cached).generate([[1] * 5] + [[1]] * 16, max_new_tokens=5, stop_ids=[eos])
    assert responses(rollout) == [[eos]] + [[6, 7, 8, 9, eos]] * 16
    assert rollout.mask.long().sum(1).tolist() == rollout.lengths.tolist() == [1] + [5] * 16
    assert (rollout.behavior_logprobs[~rollout.mask] == 0).all()
    assert rollout.finish == ["stop"] * 17


@both_ways
def test_trap_c3_every_stop_token_stops_and_stays_in_the_response(scripted_model, cached):
    model = scripted_model([6, 7, 3, 6, 6, 2, 6, 6, 6], vocab_size=10)
    sampler = Sampler(model, cached=cached)
    rollout = sampler.generate([[1], [1] * 5], max_new_tokens=4, stop_ids=[2, 3])
    assert responses(rollout) == [[6, 7, 3], [6, 2]]
    assert rollout.mask.long().tolist() == [[1, 1, 1], [1, 1, 0]]
    only_first = sampler.generate([[1], [1] * 5], max_new_tokens=4, stop_ids=[2])
    assert responses(only_first) == [[6, 7, 3, 6], [6, 2]] and only_first.finish == ["length", "stop"]
    assert sampler.generate([[1]], max_new_tokens=8, stop_ids=[]).finish == ["length"]


def test_a_stop_token_at_the_last_place_is_a_stop(scripted_model):
    rollout = Sampler(scripted_model([6, 7, 3, 6], vocab_size=10)).generate([[1]], max_new_tokens=3, stop_ids=[3])
    assert responses(rollout) == [[6, 7, 3]] and rollout.finish == ["stop"]


@both_ways
def test_a_stop_token_in_the_prompt_stops_nothing(scripted_model, cached):
    model = scripted_model([6, 7, 7, 7], vocab_size=10)
    rollout = Sampler(model, cached=cached).generate([[3]], max_new_tokens=3, stop_ids=[3])
    assert responses(rollout) == [[6, 7, 7]]


@both_ways
def test_trap_c4_a_stop_string_is_found_across_tokens(scripted_model, cached):
    pieces = [b"x", b"</an", b"swer>", b"y"]
    tokenizer = Tokenizer({piece: i for i, piece in enumerate(pieces)}, r"(?s).+")
    sampler = Sampler(scripted_model([0, 1, 2, 3, 3, 3], vocab_size=5), tokenizer, cached=cached)
    rollout = sampler.generate([[3]], max_new_tokens=6, stop_ids=[4], stop_strings=["</answer>"])
    assert responses(rollout) == [[0, 1, 2]] and rollout.finish == ["stop"]
    assert rollout.lengths.tolist() == [3] and rollout.mask.sum() == 3 and rollout.behavior_logprobs.shape == (1, 3)
    assert rollout.texts(tokenizer) == ["x</answer>"]


@pytest.mark.parametrize(
    "written, stop_strings, response",
    [
        ("aaab", ["aab"], "aaab"),  # a beginning that turns out to be none, overlapping the one that is
        ("abababc", ["ababc"], "abababc"),
        ("abcabc", ["bc", "abcab"], "abc"),
        ("abcabc", ["abcab", "ca"], "abca"),
        ("abcabc", ["a"], "a"),
        ("abcabc", ["acb"], "abcabc"),
        ("éaé", ["é"], "é"),  # two bytes
        ("cab", ["cab"], "cab"),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(scripted_model, written, stop_strings, response):
    tokenizer = Tokenizer.bytes()
    script = tokenizer.encode(written)
    sampler = Sampler(scripted_model([*script, 0], vocab_size=257), tokenizer)
    rollout = sampler.generate([[1]], max_new_tokens=len(script), stop_ids=[256], stop_strings=stop_strings)
    assert rollout.texts(tokenizer) == [response]
    assert rollout.finish == ["stop" if any(stop in written for stop in stop_strings) else "length"]


def test_a_stop_string_that_ends_inside_a_token_keeps_the_whole_token(scripted_model):
    tokenizer = Tokenizer({b"x": 0, b"</answer": 1, b">\n\n": 2}, r"(?s).+")
    sampler = Sampler(scripted_model([0, 1, 2, 0, 0], vocab_size=4), tokenizer)
    rollout = sampler.generate([[0]], max_new_tokens=5, stop_ids=[3], stop_strings=["</answer>"])
    assert responses(rollout) == [[0, 1, 2]]  # the sampled ids are the truth: no token is cut


def test_a_stop_string_is_not_looked_for_in_the_prompt(scripted_model):
    tokenizer = Tokenizer.characters("abc")
    sampler = Sampler(scripted_model([0, 0, 2, 0, 0, 0], vocab_size=4), tokenizer)
    # Prompt and response together say "cabcaa".
    rollout = sampler.generate([[2, 0, 1]], max_new_tokens=3, stop_ids=[3], stop_strings=["abc"])
    assert rollout.texts(tokenizer) == ["caa"] and rollout.finish == ["length"]


@both_ways
def test_each_row_has_a_stop_string_search_of_its_own(scripted_model, cached):
    tokenizer = Tokenizer.characters("abcx")
    sampler = Sampler(scripted_model([0, 1, 2, 3, 0, 1, 2, 3], vocab_size=5), tokenizer, cached=cached)
    # Behind prompts of different lengths "abc" comes at different times, and behind the last one not before its end.
    prompts = [[3], [3] * 2, [3] * 5, [3] * 6]
    rollout = sampler.generate(prompts, max_new_tokens=6, stop_ids=[4], stop_strings=["abc"])
    assert rollout.texts(tokenizer) == ["abc", "bcxabc", "abc", "bc"]
    assert rollout.finish == ["stop", "stop", "stop", "length"]


# ---- limits


@both_ways
def test_trap_c5_a_response_ends_where_the_context_ends(tiny_gpt, cached):
    sampler = Sampler(tiny_gpt(max_context=16), cached=cached)

    def sample(length):
        return sampler.generate([[7] * length], max_new_tokens=10, stop_ids=[])

    for _ in range(2):  # the second time nothing is left of the first
        rollout = sample(14)
        assert rollout.lengths.tolist() == [2] and rollout.finish == ["length"]
        assert rollout.mask.tolist() == [[True, True]]
        assert sample(15).lengths.tolist() == [1] and sample(6).lengths.tolist() == [10]
        empty = sample(16)
        assert empty.tokens.shape == (1, 0) and empty.finish == ["length"] and empty.lengths.tolist() == [0]
        with pytest.raises(ValueError, match="prompt 0 has 17 tokens, the model's context holds 16"):
            sample(17)


@both_ways
@pytest.mark.parametrize("short_rows", [1, 20])  # of 21 rows a single one that has ended stays in the batch
def test_trap_c5_rows_that_reach_the_context_do_not_disturb_the_others(tiny_gpt, cached, short_rows):
    sampler = Sampler(tiny_gpt(dtype=torch.float64, max_context=16), cached=cached)
    short = [[row % 20, 5] for row in range(short_rows)]
    for length in (10, 15, 16):
        prompts = [[3] * length, *short]
        ids = list(range(len(prompts)))
        options = {"max_new_tokens": 100, "stop_ids": [], "seed": 2}
        together = sampler.generate(prompts, sample_ids=ids, **options)
        assert together.lengths.tolist() == [16 - length] + [14] * short_rows
        others = sampler.generate(short, sample_ids=ids[1:], **options)
        alone = sampler.generate(prompts[:1], sample_ids=[0], **options)
        assert_same_rows(together, [(alone, 0)] + [(others, i) for i in range(short_rows)], 1e-10)


def test_trap_c5_two_calls_in_a_row_share_nothing(tiny_gpt):
    sampler = Sampler(tiny_gpt())
    options = {"max_new_tokens": 10, "stop_ids": [], "greedy": True}
    before = sampler.generate(RAGGED[:2], **options)
    sampler.generate(RAGGED[2:], max_new_tokens=60, stop_ids=[])
    assert torch.equal(before.tokens, sampler.generate(RAGGED[:2], **options).tokens)


@both_ways
def test_an_empty_response_beside_others_takes_no_part(tiny_gpt, cached):
    rollout = Sampler(tiny_gpt(max_context=8), cached=cached).generate(
        [[1] * 8, [1] * 7], samples_per_prompt=2, max_new_tokens=3, stop_ids=[]
    )
    assert rollout.lengths.tolist() == [0, 0, 1, 1]
    assert rollout.mask.tolist() == [[False], [False], [True], [True]]
    assert (rollout.behavior_logprobs[:2] == 0).all() and (rollout.tokens[:2] == 0).all()


# ---- probabilities


def test_trap_c2_log_probs_are_those_of_the_tempered_distribution():
    # softmax([2, 0] / 0.5): token 0 has log-prob -log(1 + exp(-4)); untempered it would be -0.126928.
    token, logprob = choose(torch.tensor([[2.0, 0.0]]), torch.tensor([0.5]), 0.5, None, None, False)
    assert token.item() == 0 and logprob.item() == pytest.approx(-0.018150, abs=5e-7)


def test_trap_c2_log_probs_are_renormalised_over_the_kept_tokens():
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    for top_k, top_p, expected in ((None, 0.75, -0.470004), (2, None, -0.470004), (None, None, -0.693147)):
        token, logprob = choose(logits, torch.tensor([0.0]).double(), 1.0, top_k, top_p, False)
        assert token.item() == 0 and logprob.item() == pytest.approx(expected, abs=5e-7)


def test_trap_c2_a_rollout_says_how_it_was_sampled(tiny_gpt):
    sampler = Sampler(tiny_gpt())

    def sample(**how):
        rollout = sampler.generate([[1]], max_new_tokens=3, stop_ids=[], **how)
        return rollout.temperature, rollout.truncated

    assert sample() == (1.0, False)  # nothing is cut or tempered unless asked for
    assert sample(temperature=0.7) == (0.7, False)
    assert sample(top_k=5) == (1.0, True) and sample(top_p=0.9, temperature=0.7) == (0.7, True)
    assert sample(greedy=True) == (1.0, False)


def test_trap_c2_a_greedy_tokens_log_prob_is_that_of_temperature_1(table_model):
    logits = torch.tensor([[0.0, 2.0]] * 4)
    rollout = Sampler(table_model(logits)).generate([[0]], max_new_tokens=3, stop_ids=[], greedy=True)
    assert responses(rollout) == [[1, 1, 1]]
    torch.testing.assert_close(rollout.behavior_logprobs, torch.full((1, 3), -0.126928), rtol=0, atol=5e-7)


def kept_probabilities(logits, temperature, top_k, top_p):
    """The probabilities that are sampled from, one row at a time, in plain numpy."""
    probs = np.exp(logits / temperature)
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k is not None:
        order = order[:top_k]
    if top_p is not None:
        total = sum(probs[i] for i in order)
        kept, mass = [], 0.0
        for i in order:
            kept.append(i)
            mass += probs[i] / total
            if mass >= top_p:
                break
        order = kept
    result = np.zeros(len(probs))
    result[order] = probs[order] / probs[order].sum()
    return result


SETTINGS = [*itertools.product([0.7, 1.0, 2.5], [None, 1, 3, 50], [None, 0.05, 0.6, 0.93, 1.0])]


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_sampling_is_the_inverse_of_the_cumulative_distribution(temperature, top_k, top_p):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 9)) * 2
    logits[:10, 4] = logits[:10, 2]  # equally likely tokens: the first is kept
    uniforms = rng.random(40)
    tokens, logprob = choose(torch.tensor(logits), torch.tensor(uniforms), temperature, top_k, top_p, False)
    for row in range(40):
        probs = kept_probabilities(logits[row], temperature, top_k, top_p)
        cdf = np.cumsum(probs)
        expected = next(i for i in range(9) if cdf[i] > uniforms[row] or i == 8)
        assert tokens[row] == expected
        assert logprob[row].item() == pytest.approx(np.log(probs[expected]), abs=1e-12)


def test_greedy_takes_the_likeliest_token_and_of_equals_the_first():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-5.0, -6.0, -7.0, -4.0]])
    tokens, _ = choose(logits, torch.tensor([0.99, 0.0]), 1.0, None, None, True)
    assert tokens.tolist() == [1, 3]


def test_top_p_of_1_keeps_every_token_of_a_large_vocabulary():
    logits = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0)) * 3
    everything = choose(logits, torch.tensor([0.3, 0.9999999]), 1.0, None, None, False)
    kept = choose(logits, torch.tensor([0.3, 0.9999999]), 1.0, None, 1.0, False)
    assert torch.equal(everything[0], kept[0])
    torch.testing.assert_close(everything[1], kept[1], rtol=0, atol=1e-6)
    assert (truncate(logits.log_softmax(-1), None, 1.0) > -torch.inf).sum() > 2 * 99_900


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_probability_zero_is_never_drawn(dtype):
    never = -1e9
    logits = torch.tensor([[never, 0.0, never, never, 1.0, never]], dtype=dtype)
    largest = 1 - 2.0**-40  # of the uniform numbers
    edges = torch.tensor([0.0, 2.0**-40, 0.26894142, 0.26894143, 0.5, largest], dtype=torch.float64)
    tokens, logprob = choose(logits.expand(6, 6), edges, 1.0, None, None, False)
    assert tokens.tolist() == [1, 1, 1, 4, 4, 4]
    assert torch.isfinite(logprob).all()
    for top_k, top_p in ((1, None), (None, 0.5), (3, 0.9)):  # nor one that was cut away, next to it or at the end
        tokens, logprob = choose(logits.expand(6, 6), edges, 1.0, top_k, top_p, False)
        assert set(tokens.tolist()) <= {1, 4} and torch.isfinite(logprob).all()


def test_tokens_come_as_often_as_they_are_likely(table_model):
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0, -30.0, 0.5]])
    n = 20_000
    rollout = Sampler(table_model(logits.expand(4, 6))).generate(
        [[0]], samples_per_prompt=n, max_new_tokens=2, stop_ids=[], temperature=1.3, seed=3
    )
    probs = kept_probabilities(logits[0].double().numpy(), 1.3, None, None)
    seen = rollout.tokens.numpy()  # (n, 2)
    for t in range(2):
        counts = np.bincount(seen[:, t], minlength=6)
        assert counts[4] == 0  # probability 5e-11
        likely = probs > 1e-6
        chi_square = ((counts - n * probs)[likely] ** 2 / (n * probs[likely])).sum()
        assert chi_square < 18.5  # 4 degrees of freedom: 1 in 1000 by chance
    # The two positions are independent: joint counts, 16 degrees of freedom.
    joint = np.bincount(seen[:, 0] * 6 + seen[:, 1], minlength=36).reshape(6, 6)
    expected = n * np.outer(probs, probs)
    likely = expected > 1
    assert ((joint - expected)[likely] ** 2 / expected[likely]).sum() < 39.3  # 1 in 1000


# ---- uniform numbers


def splitmix64(x: int) -> int:
    """The finaliser of Steele, Lea & Flood 2014 in Python's integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 10**9, 2**63 - 1, -(2**63)])
def test_uniform_numbers_are_a_function_of_seed_sample_and_position(seed):
    golden = 0x9E3779B97F4A7C15
    assert splitmix64(golden) == 0xE220A8397B1DCDAF  # the published first number of the stream with seed 0
    samples = [0, 5, -3, 2**62, 5]
    numbers = uniform(seed, samples, 7)
    assert numbers.shape == (5, 7) and numbers.dtype == np.float64
    for row, sample in enumerate(samples):
        key = splitmix64(splitmix64((seed + golden) % 2**64) ^ (sample % 2**64)) + golden
        expected = [(splitmix64((key + golden * t) % 2**64) >> 24) / 2**40 for t in range(7)]
        assert numbers[row].tolist() == expected
    assert np.array_equal(uniform(seed, samples[1:3], 3), numbers[1:3, :3])


def test_uniform_numbers_are_uniform_and_independent():
    n, length = 4000, 50
    numbers = uniform(0, range(n), length)
    assert numbers.min() >= 0 and numbers.max() < 1
    total = numbers.size  # bounds: five standard deviations of the estimate
    assert abs(numbers.mean() - 1 / 2) < 5 * (1 / 12 / total) ** 0.5
    assert abs(numbers.var() - 1 / 12) < 5 * (1 / 180 / total) ** 0.5
    bins = np.bincount((numbers * 100).astype(int).ravel(), minlength=100)
    assert ((bins - total / 100) ** 2 / (total / 100)).sum() < 148.2  # 99 degrees of freedom: 1 in 1000
    others = {
        "the next position": (numbers[:, :-1], numbers[:, 1:]),
        "the next sample": (numbers[:-1], numbers[1:]),
        "sample and position exchanged": (numbers[:50], numbers[:50].T),
        "the next seed": (numbers, uniform(1, range(n), length)),
        "seed and sample exchanged": (numbers[1:2], uniform(1, [0], length)),
    }
    for what, (a, b) in others.items():
        different = a != b if what == "sample and position exchanged" else np.ones(a.shape, bool)
        correlation = np.corrcoef(a[different], b[different])[0, 1]
        assert abs(correlation) < 5 / different.sum() ** 0.5, what
    assert len(np.unique(numbers)) == total  # 40 bits: two of 200,000 numbers meet once in 55 tries


# ---- work


def test_trap_h2_a_prompt_is_read_once_for_its_group_and_then_one_token_a_row_and_step(tiny_gpt):
    model = tiny_gpt()
    calls = ForwardCalls(model)
    Sampler(model).generate([[1, 2, 3], [4, 5, 6, 7, 8]], samples_per_prompt=4, max_new_tokens=32, stop_ids=[])
    assert calls.shapes == [(2, 5)] + [(8, 1)] * 31  # at the last position as at the first; the last token is not read


def test_trap_h2_the_uncached_path_shows_what_the_cache_saves(tiny_gpt):
    model = tiny_gpt()
    calls = ForwardCalls(model)
    Sampler(model, cached=False).generate([[1, 2, 3], [4, 5, 6, 7, 8]], max_new_tokens=32, stop_ids=[])
    assert calls.shapes == [(2, 5 + t) for t in range(32)]


@both_ways
def test_trap_h2_finished_rows_leave_the_batch_and_the_last_one_ends_it(table_model, cached):
    # Token i is followed by i - 1; 0 is the stop token: the prompt [i] has a response of i tokens.
    table = torch.full((7, 7), -1e9)
    table[torch.arange(1, 7), torch.arange(6)] = 0.0
    model = table_model(table, by_token=True)
    calls = ForwardCalls(model)
    rollout = Sampler(model, cached=cached).generate([[3], [1], [6], [3]], max_new_tokens=50, stop_ids=[0])
    assert rollout.lengths.tolist() == [3, 1, 6, 3]
    assert [rows for rows, _ in calls.shapes] == [4, 3, 3, 1, 1, 1]
    assert sum(rows for rows, _ in calls.shapes) == rollout.lengths.sum()
    if cached:
        assert {tokens for _, tokens in calls.shapes} == {1}


def test_trap_h2_most_of_the_work_in_a_large_batch_is_for_open_rows(table_model):
    table = torch.full((65, 65), -1e9)  # as above
    table[torch.arange(1, 65), torch.arange(64)] = 0.0
    model = table_model(table, by_token=True, max_context=80)
    calls = ForwardCalls(model)
    rollout = Sampler(model).generate([[i] for i in range(1, 65)], max_new_tokens=64, stop_ids=[0])
    assert rollout.lengths.tolist() == list(range(1, 65)) and len(calls.shapes) == 64
    read, open_rows = sum(rows for rows, _ in calls.shapes), int(rollout.lengths.sum())
    assert open_rows <= read <= open_rows * 8 / 7  # of the rows read, at most one in eight has ended


@both_ways
def test_trap_h2_a_rollout_carries_no_gradient(tiny_gpt, cached):
    model = tiny_gpt()
    rollout = Sampler(model, cached=cached).generate([[1, 2]], max_new_tokens=5, stop_ids=[])
    for tensor in (rollout.tokens, rollout.mask, rollout.behavior_logprobs, rollout.lengths):
        assert not tensor.requires_grad
        assert not tensor.is_inference()  # an inference tensor could not enter the loss
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    (model.head.sum() * rollout.behavior_logprobs.sum()).backward()


NO_TRITON_NO_GPU = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # importing it now raises ImportError
import nanorl, kernels, train_grpo
for package in (nanorl, kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import torch
assert not torch.cuda.is_available()
from nanorl.errors import RunError
from nanorl.model import GPT, GPTConfig
from nanorl.sampler import Sampler
from nanorl.scorer import score
model = GPT(GPTConfig(20))
rollout = Sampler(model).generate([[1, 2], [3]], max_new_tokens=4, stop_ids=[0])
logprobs, entropy = score(model, rollout)
(logprobs.sum() + entropy.sum()).backward()
print("done")
"""


def test_trap_h2_everything_imports_and_works_without_triton_and_without_a_gpu():
    root = Path(__file__).parent.parent
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root), "MPLBACKEND": "agg"}
    result = subprocess.run(
        [sys.executable, "-c", NO_TRITON_NO_GPU], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0 and result.stdout.strip() == "done", result.stderr


# ---- wrong arguments


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"prompts": []}, "no prompts"),
        ({"prompts": [[1], []]}, "prompt 1 is empty.*<bos>"),
        ({"prompts": [[1], [2] * 17]}, "prompt 1 has 17 tokens, the model's context holds 16"),
        ({"prompts": [[1, 20]]}, r"\[0, 20\), got 1 to 20"),
        ({"prompts": [[-1]]}, r"\[0, 20\), got -1 to 1"),
        ({"stop_ids": [1, 20]}, r"\[0, 20\), got 1 to 20"),
        ({"stop_ids": [-1]}, "got -1 to 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"samples_per_prompt": 0}, "samples_per_prompt must be at least 1, not 0"),
        ({"temperature": 0.0}, "temperature must be positive, not 0.0.*greedy=True"),
        ({"temperature": -1.0}, "temperature must be positive, not -1.0"),
        ({"temperature": float("nan")}, "temperature must be positive, not nan"),
        ({"top_k": 0}, "top_k must be at least 1, not 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], not 0.0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], not 1.1"),
        ({"top_p": float("nan")}, r"top_p must lie in \(0, 1\], not nan"),
        ({"greedy": True, "temperature": 0.5}, "greedy"),
        ({"greedy": True, "top_k": 5}, "greedy"),
        ({"greedy": True, "top_p": 0.5}, "greedy"),
        ({"stop_strings": ["</answer>"]}, r"stop_strings need a tokenizer: Sampler\(model, tokenizer\)"),
        ({"sample_ids": [1, 2]}, "expected 1 sample_ids, one a response, got 2"),
        ({"sample_ids": [1], "samples_per_prompt": 3}, "expected 3 sample_ids, one a response, got 1"),
    ],
)
@both_ways
def test_a_wrong_argument_is_an_error_that_names_the_value_before_any_work_is_done(tiny_gpt, wrong, message, cached):
    model = tiny_gpt(max_context=16)
    calls = ForwardCalls(model)
    arguments = {"prompts": [[1]], "max_new_tokens": 3, "stop_ids": [1]} | wrong
    with pytest.raises(ValueError, match=message):
        Sampler(model, cached=cached).generate(**arguments)
    assert calls.shapes == []


def test_an_empty_stop_string_is_an_error(tiny_gpt):
    sampler = Sampler(tiny_gpt(), Tokenizer.characters("ab"))
    with pytest.raises(ValueError, match="empty stop string"):
        sampler.generate([[1]], max_new_tokens=3, stop_ids=[2], stop_strings=["a", ""])


@pytest.mark.parametrize("how", [{}, {"greedy": True}, {"top_p": 0.9}])
def test_weights_that_have_diverged_are_an_error_that_says_so(tiny_gpt, how):
    model = tiny_gpt()
    model.head_weight.data.fill_(torch.nan)
    with pytest.raises(RunError, match="not finite: the weights have diverged"):
        Sampler(model).generate([[1, 2]], max_new_tokens=3, stop_ids=[], **how)
