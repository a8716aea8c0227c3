"""Lesson 01: generation with and without a cache is the same, and what the lesson says is so."""

import difflib
import functools
import math
import re
from pathlib import Path

import pytest
import torch

from nanorl.model import GPT, GPTConfig
from nanorl.sampler import Sampler, choose, truncate, uniform

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "01_gpt_and_sampler"
README = (LESSON / "README.md").read_text()
FORMS = {
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "tied": True},
    "qwen3": {"head_width": 10},
}
RAGGED = [[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 3], [19, 0, 19], [9, 9, 9, 9, 9, 9]]
STOP = 2


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


@pytest.fixture
def both(load):
    return [load(name).generate for name in ("without_cache", "with_cache")]


def code(name: str) -> list[str]:
    """The lines of a file behind its docstring."""
    return (LESSON / f"{name}.py").read_text().split('"""\n', 1)[1].splitlines()


def changed_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r"[+-](?![+-]{2})", line)]


# ---- the cache changes nothing


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_with_and_without_cache_and_the_sampler_of_the_library_write_the_same(tiny_gpt, both, form, greedy):
    model = tiny_gpt(dtype=torch.float64, **form)
    numbers = None if greedy else torch.from_numpy(uniform(4, range(6), 60))
    (tokens, logprobs, mask), cached = (generate(model, RAGGED, 60, STOP, numbers) for generate in both)
    lengths = mask.sum(1)
    assert greedy or lengths.unique().numel() > 3  # rows stop at different times
    assert torch.equal(cached[0], tokens) and torch.equal(cached[2], mask)
    torch.testing.assert_close(cached[1], logprobs, rtol=0, atol=1e-10)
    rollout = Sampler(model).generate(RAGGED, max_new_tokens=60, stop_ids=[STOP], greedy=greedy, seed=4)
    assert torch.equal(rollout.tokens, tokens) and torch.equal(rollout.mask, mask)
    torch.testing.assert_close(rollout.behavior_logprobs, logprobs, rtol=0, atol=1e-10)


def test_in_float32_the_log_probs_with_and_without_cache_differ_by_rounding_alone(tiny_gpt, both):
    model = tiny_gpt()
    numbers = torch.from_numpy(uniform(4, range(6), 60))
    (tokens, logprobs, _), cached = (generate(model, RAGGED, 60, -1, numbers) for generate in both)
    assert torch.equal(cached[0], tokens)
    difference = (cached[1] - logprobs).abs().max()
    assert 0 < difference < 1e-5


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("chosen[:, None], torch.ones_like(lengths)", "chosen[:, None], lengths"),  # rows grow by their prompts again
        ("model(tokens, cache, lengths)", "model(tokens, cache)"),  # padding counts as read
        ("hidden[rows, lengths - 1]", "hidden[:, -1]"),  # reads the padding of shorter prompts
        ("open_ & (chosen != stop_id)", "chosen != stop_id"),  # rows wake up
    ],
)
def test_the_proof_of_equality_notices_a_wrong_line(tiny_gpt, both, load, right, wrong):
    source = (LESSON / "with_cache.py").read_text()
    assert source.count(right) == 1
    changed = load("with_cache", source.replace(right, wrong)).generate
    model = tiny_gpt(dtype=torch.float64)
    numbers = torch.from_numpy(uniform(4, range(6), 30))
    expected = both[0](model, RAGGED, 30, STOP, numbers)
    try:
        found = changed(model, RAGGED, 30, STOP, numbers)
    except (IndexError, ValueError):
        return
    same_shape = all(a.shape == b.shape for a, b in zip(expected, found, strict=True))
    assert not (same_shape and all(torch.allclose(a, b) for a, b in zip(expected, found, strict=True)))


def test_the_lesson_shows_the_whole_difference_between_the_two_files_and_it_is_small():
    (shown,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    difference = list(difflib.unified_diff(code("without_cache"), code("with_cache"), lineterm=""))
    assert changed_lines(shown.splitlines()) == changed_lines(difference)
    assert len(changed_lines(difference)) == 8
    lines = code("without_cache") + code("with_cache")
    context = [line[1:] for line in shown.splitlines() if line.startswith(" ")]
    assert context and all(line in lines for line in context)


# ---- counting


@pytest.mark.parametrize("prompt, new", [(8, 504), (12, 25), (4, 300)])
def test_tokens_read_are_those_counted_by_hand(both, prompt, new):
    model = GPT(GPTConfig(vocab_size=3, width=4, layers=1, heads=1, ffn=4, max_context=512))
    counts = []
    model.register_forward_pre_hook(lambda module, args: counts[-1].append(args[0].numel()))
    for generate in both:
        counts.append([])
        generate(model, [[0] * prompt], new, stop_id=-1)
    without, with_cache = counts
    assert without == [prompt + t for t in range(new)]
    assert with_cache == [prompt] + [1] * (new - 1)
    for number in (sum(without), sum(with_cache)):
        assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", README), number


def test_weights_counted_by_hand_are_those_of_the_default_model():
    model = GPT(GPTConfig(vocab_size=17))
    assert sum(weight.numel() for weight in model.parameters()) == 225_024
    parts = [17 * 96, 2 * 4 * 96 * 96, 2 * 3 * 96 * 256, 5 * 96 + 4 * 24, 17 * 96]
    assert sum(parts) == 225_024
    assert "225,024" in README


# ---- numbers in the text


def test_trap_c2_log_probs_at_each_temperature_as_the_lesson_gives_them():
    for temperature, logprob in ((0.5, -0.018150), (1.0, -0.126928), (2.0, -0.313262)):
        logits = torch.tensor([[2.0, 0.0]], dtype=torch.double)
        _, got = choose(logits, torch.zeros(1), temperature, None, None, False)
        assert got.item() == pytest.approx(logprob, abs=5e-7)
        assert f"{logprob:.6f}" in README
    assert math.exp(-0.126928 + 0.018150) == pytest.approx(0.8969, abs=5e-5)


def test_trap_c2_top_p_moves_log_probs_by_log_0_8_as_the_lesson_says():
    full = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.double).log()
    kept = truncate(full, None, 0.75).log_softmax(-1)
    torch.testing.assert_close(kept.exp(), torch.tensor([[0.625, 0.375, 0.0]], dtype=torch.double))
    assert (full - kept)[0, :2].tolist() == pytest.approx([-0.223144] * 2, abs=5e-7)
    for number in (*full[0].tolist(), *kept[0, :2].tolist(), -0.223144):
        assert f"{number:.6f}" in README


def test_sampling_from_a_truncated_distribution_gives_a_biased_gradient_without_any_reward():
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.double).log().requires_grad_()
    sampled = truncate(logits.detach()[None].log_softmax(-1), None, 0.75).softmax(-1)[0]
    (gradient,) = torch.autograd.grad((sampled * logits.log_softmax(-1)).sum(), logits)
    assert gradient.tolist() == pytest.approx([0.125, 0.075, -0.2])
    assert "[+0.125, +0.075, -0.2]" in README


def test_uniform_numbers_are_those_in_the_lesson_in_any_batch():
    numbers = uniform(0, [0, 1], 3)
    for sample, row in enumerate(numbers):
        assert f"| sample {sample} | " + " | ".join(f"{number:.6f}" for number in row) + " |" in README
    assert (uniform(0, [7, 1], 3)[1] == numbers[1]).all() and (uniform(0, [1], 2)[0] == numbers[1, :2]).all()
    probs = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.double)
    for number, token in ((0, 0), (0.338, 0), (0.5, 1), (0.62, 1), (0.95, 2)):
        chosen, _ = choose(probs.log(), torch.tensor([number], dtype=torch.double), 1.0, None, None, False)
        assert chosen.item() == token


# ---- exercises


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("response_logprobs", "logits[len(prompt) - 1 : -1]", "logits[len(prompt) :]"),
        ("response_logprobs", "log_softmax(-1)", "softmax(-1).log().detach()"),
        ("response_mask", "stops.cumsum(1) - stops == 0", "stops.cumsum(1) == 0"),
        ("response_mask", "torch.isin(tokens, torch.tensor(stop_ids))", "(tokens == stop_ids[0])"),
        ("tempered_logprobs", "(logits / temperature).log_softmax(-1)", "logits.log_softmax(-1) / temperature"),
        ("tempered_logprobs", "(logits / temperature)", "(logits * temperature)"),
        ("top_p_probs", "before < top_p", "ordered.cumsum(-1) < top_p"),
        ("top_p_probs", "before < top_p", "before <= top_p"),
        ("top_p_probs", "ordered / ordered.sum(-1, keepdim=True)", "ordered"),
        ("top_p_probs", "torch.empty_like(probs).scatter(-1, order, ordered)", "ordered"),
        ("inverse_cdf", ", right=True", ""),
        ("inverse_cdf", " * cdf[:, -1:]", ""),
        ("cached_step", "keys[rows, lengths] = key", "keys[:, int(lengths.max())] = key"),
        ("cached_step", "<= lengths[:, None]", "< lengths[:, None]"),
        ("cached_step", " / math.sqrt(query.shape[-1])", ""),
        ("rotate_new_tokens", "lengths[:, None] * frequencies", "lengths.max() * frequencies"),
        ("rotate_new_tokens", "lengths[:, None] * frequencies", "(lengths[:, None] + 1) * frequencies"),
        ("generate", "open_ & (chosen != stop_id)", "chosen != stop_id"),
        ("generate", "mask.append(open_)", "mask.append(open_ & (chosen != stop_id))"),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)


def test_the_first_silent_bug_spares_rows_of_one_length_and_the_longest_row(load):
    wrong, right = (load(name).rotate_new_tokens for name in ("exercise", "solution"))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(wrong(x, torch.tensor([4, 4, 4])), right(x, torch.tensor([4, 4, 4])))
    difference = (wrong(x, torch.tensor([2, 9, 4])) - right(x, torch.tensor([2, 9, 4]))).abs().amax(1)
    assert difference[1] == 0 and difference[[0, 2]].min() > 0.1


def test_the_second_silent_bug_shows_only_with_several_rows(load):
    wrong = load("exercise").generate
    said = torch.tensor([[7, 2, 5, 5], [8, 8, 8, 2]])
    tokens, mask = wrong(lambda t: said[:1, t], 1, STOP, 4)
    assert tokens.tolist() == [[7, 2]] and mask.tolist() == [[True, True]]
    tokens, _ = wrong(lambda t: said[:, t], 2, STOP, 4)
    assert tokens[0].tolist() == [7, 2, 0, 5]  # text behind the stop token
