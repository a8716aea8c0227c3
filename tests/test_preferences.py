"""Preference pairs: from samples and from files, what is dropped, and in which order they are taken."""

import json
from collections import Counter

import pytest
import torch

from nanorl import preferences
from nanorl import reward_model as rewarding
from nanorl.errors import RunError
from nanorl.model import GPT, GPTConfig
from nanorl.preferences import Pair, batch_of, collect_pairs, describe_dropped, read_pairs, rows_of_step, usable
from nanorl.reward_model import RewardModel, train_reward_model
from nanorl.rollout import Rollout
from nanorl.tasks.reviews import Reviews
from nanorl.tokenizer import Tokenizer

WORDS = Tokenizer.words(["the", "plot", "was", "dull", "good", "."])
EOS = WORDS.eos_id
CONTEXT = 12


def row(**changes) -> str:
    """A line of a file; a field that is ... is left away."""
    fields = {"prompt": " the plot", "chosen": " was good .", "rejected": " was dull ."} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


@pytest.fixture
def file(tmp_path):
    def write(*lines: str | bytes, name: str = "pairs.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
        return path

    return write


# ---- files


def test_a_file_holds_prompt_chosen_rejected_and_perhaps_a_margin_on_each_line(file):
    path = file(row(), "", row(margin=1.5), row(prompt=" was", margin=None), row(margin=2), row(more="is passed over"))
    pairs, dropped = read_pairs(path, WORDS, CONTEXT)
    first = Pair([0, 1], [2, 4, 5, EOS], [2, 3, 5, EOS])
    assert pairs[0] == first and dropped == {}
    assert [pair.margin for pair in pairs] == [None, 1.5, None, 2, None]
    assert pairs[2].prompt == [2]
    assert read_pairs(str(path), WORDS, CONTEXT) == (pairs, dropped)


def test_the_last_line_needs_no_end_and_lines_may_end_as_on_windows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(f"{row()}\r\n{row()}".encode())
    assert len(read_pairs(tmp_path / "a.jsonl", WORDS, CONTEXT)[0]) == 2


def test_a_file_may_begin_with_the_mark_that_windows_puts_there(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{row()}\r\n".encode())
    assert len(read_pairs(tmp_path / "a.jsonl", WORDS, CONTEXT)[0]) == 1


def test_a_text_may_hold_characters_that_python_takes_for_ends_of_lines(tmp_path):
    path, text = tmp_path / "a.jsonl", "one\u2028two\u0085three"
    pair = {"prompt": "p", "chosen": text, "rejected": "no"}
    path.write_text(json.dumps(pair, ensure_ascii=False) + "\n", encoding="utf-8")
    ((read,), _) = read_pairs(path, Tokenizer.bytes(), 64)
    assert Tokenizer.bytes().decode(read.chosen) == text + "<eos>"


BAD_LINES = {
    "not JSON": ("{prompt: 1}", r"not JSON"),
    "a word": ("good", r"not JSON"),
    "cut off": (row()[:-5], r"not JSON"),
    "nested too deep": ("[" * 100_000, r"not JSON"),
    "a list": ('["a", "b"]', r"expected an object with prompt, chosen and rejected, got \[\"a\", \"b\"\]"),
    "a number": ("3", r"expected an object .* got 3"),
    "null": ("null", r"expected an object .* got null"),
    "no prompt": (row(prompt=...), r"prompt must be a text, got None"),
    "no chosen": (row(chosen=...), r"chosen must be a text, got None"),
    "no rejected": (row(rejected=...), r"rejected must be a text, got None"),
    "a number instead of a text": (row(chosen=3), r"chosen must be a text, got 3"),
    "a list instead of a text": (row(rejected=[" was"]), r"rejected must be a text, got \[' was'\]"),
    "a margin that is a text": (row(margin="1"), r"margin must be a number, got '1'"),
    "a margin that is true": (row(margin=True), r"margin must be a number, got True"),
    "a margin that is NaN": (row(margin=float("nan")), r"margin must be a number, got nan"),
    "a margin that is infinite": (row(margin=float("inf")), r"margin must be a number, got inf"),
    "an unknown word": (row(rejected=" was boring ."), r"no token for \[' boring'\] in ' was boring \.'"),
    "an unknown word in the prompt": (row(prompt="the plot"), r"no token for \['the'\]"),
    "two blanks": (row(chosen=" was  good"), r"no token for"),
    "an empty prompt": (row(prompt=""), r"prompt is empty"),
    "half a character": (row().replace("good", r"good\ud800"), r".*surrogates not allowed"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_an_error_with_its_number(name, file):
    line, message = BAD_LINES[name]
    path = file(row(), "", line, row())
    with pytest.raises(RunError, match=rf"pairs\.jsonl, line 3: {message}"):
        read_pairs(path, WORDS, CONTEXT)


@pytest.mark.parametrize("margin", [10**1000, -(10**1000), 1e7], ids=["huge", "-huge", "1e7"])
def test_a_margin_whose_sum_over_a_batch_could_be_infinite_is_an_error(margin, file):
    pairs, _ = read_pairs(file(row(margin=10**6)), WORDS, CONTEXT)
    assert batch_of(pairs)[1].tolist() == [1e6]
    with pytest.raises(RunError, match="line 1: margin must be a number"):
        read_pairs(file(row(margin=margin)), WORDS, CONTEXT)


def test_a_file_that_is_not_utf_8_or_not_there_is_an_error(file, tmp_path):
    with pytest.raises(RunError, match=r"pairs\.jsonl cannot be read: .*utf-8"):
        read_pairs(file(row(), b'{"prompt": "\xff"}'), WORDS, CONTEXT)
    with pytest.raises(RunError, match=r"nofile\.jsonl cannot be read: .*No such file"):
        read_pairs(tmp_path / "nofile.jsonl", WORDS, CONTEXT)


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_an_empty_file_is_an_error(lines, file):
    with pytest.raises(RunError, match=r"holds no usable pair \(of 0 read; dropped: none\)"):
        read_pairs(file(*lines), WORDS, CONTEXT)


def test_a_file_of_which_every_pair_is_dropped_is_an_error_that_counts_them(file):
    with pytest.raises(RunError, match=r"no usable pair \(of 2 read; dropped: 2 \(the same response twice\)\)"):
        read_pairs(file(*[row(rejected=" was good .")] * 2), WORDS, CONTEXT)


# ---- what is dropped


def test_dropped_pairs_are_counted_by_their_reason(file):
    fits = " was" * (CONTEXT - 3)  # with the prompt's two tokens and the stop token
    lines = [
        row(chosen=fits),
        row(chosen=fits + " was"),
        row(rejected=fits + " was"),
        row(chosen=""),
        row(rejected=""),
        row(chosen="", rejected=""),
        row(rejected=" was good ."),
    ]
    pairs, dropped = read_pairs(file(*lines), WORDS, CONTEXT)
    assert len(pairs) == 1 and len(pairs[0].prompt + pairs[0].chosen) == CONTEXT
    assert dropped == {"too long for the context": 2, "a response is empty": 3, "the same response twice": 1}
    assert describe_dropped(dropped) == (
        "2 (too long for the context), 3 (a response is empty), 1 (the same response twice)"
    )


def test_a_pair_whose_response_was_cut_away_is_dropped_and_counted_never_averaged_in_as_0_693():
    """Of two pairs one has nothing left. Scores 2 and 0: the loss is that of the other pair alone."""
    left, cut_away = Pair([0], [1, EOS], [2, EOS]), Pair([0], [], [])
    pairs, dropped = usable([left, cut_away, Pair([0], [1], []), Pair([0], [], [1])], CONTEXT)
    assert pairs == [left] and dropped == {"a response is empty": 3}
    scores = {1: 2.0, 2: 0.0}
    chosen, rejected = (torch.tensor([scores[getattr(p, side)[0]] for p in pairs]) for side in ("chosen", "rejected"))
    loss, _ = rewarding.bradley_terry_loss(chosen, rejected)
    assert loss.item() == pytest.approx(0.126928, abs=1e-6)  # averaged in it would be (0.126928 + 0.693147) / 2
    model = RewardModel(GPTConfig(WORDS.vocab_size, width=8, layers=1, heads=2))
    with pytest.raises(ValueError, match="response 1 has no token that could be scored"):
        model.outcomes(batch_of([left, cut_away])[0])


def test_a_response_that_does_not_fit_is_never_cut():
    pair = Pair([0] * 4, [1] * 9, [2])
    assert usable([pair], 13) == ([pair], {})
    assert usable([pair], 12) == ([], {"too long for the context": 1})


# ---- in training


def test_a_batch_holds_the_chosen_ones_then_the_rejected_ones_and_margins_where_any_is_given():
    pairs = [Pair([0, 1], [2, EOS], [3, 4, EOS]), Pair([5], [4, 4, 4], [EOS], 0.5)]
    rollout, margins = batch_of(pairs)
    assert rollout.prompts == [[0, 1], [5]] * 2
    assert rollout.tokens.tolist() == [[2, EOS, 0], [4, 4, 4], [3, 4, EOS], [EOS, 0, 0]]
    assert rollout.lengths.tolist() == [2, 3, 3, 1] and margins.tolist() == [0.0, 0.5]
    assert batch_of(pairs[:1])[1] is None
    assert batch_of([Pair([0], [1], [2], 0.0)])[1] is None


def test_trap_g2_both_responses_of_a_pair_stand_behind_the_same_prompt_and_end_with_one_eos_inside_the_mask(file):
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)} | {b" $": 256}, r"(?s).+", bos=True)
    line = json.dumps({"prompt": "p: ", "chosen": "$5", "rejected": "5"})
    pairs, _ = read_pairs(file(line), tokenizer, CONTEXT)
    rollout, _ = batch_of(pairs)
    assert rollout.prompts == [[tokenizer.bos_id, *b"p: "]] * 2  # " $" would be one token across the boundary
    for prompt, tokens, mask, text in zip(rollout.prompts, rollout.tokens, rollout.mask, ["$5", "5"], strict=True):
        trained = tokens[mask].tolist()
        assert tokenizer.decode(trained) == text + "<eos>"
        row = prompt + trained
        assert [i for i, token in enumerate(row) if token == tokenizer.bos_id] == [0]
        assert [i for i, token in enumerate(row) if token == tokenizer.eos_id] == [len(row) - 1]


def test_margins_of_a_file_reach_the_bradley_terry_loss(file, monkeypatch):
    seen, loss = [], rewarding.bradley_terry_loss

    def spy(chosen, rejected, *, margin=None):
        seen.append(margin)
        return loss(chosen, rejected, margin=margin)

    monkeypatch.setattr(rewarding, "bradley_terry_loss", spy)
    for lines, expected in (([row(), row(margin=1.5)], {0.0, 1.5}), ([row(), row()], None)):
        pairs, _ = read_pairs(file(*lines), WORDS, CONTEXT)
        losses = []
        model = RewardModel(GPTConfig(WORDS.vocab_size, width=8, layers=1, heads=2, max_context=CONTEXT))
        train_reward_model(model, pairs, steps=1, seed=0, report=lambda step, loss: losses.append(loss))  # noqa: B023
        margin = seen.pop()
        assert margin is None if expected is None else set(margin.tolist()) == expected
        # All scores are 0 at first: log 2, and with a margin of 1.5 log(1 + e^1.5) = 1.701413
        assert losses == pytest.approx([0.693147 if expected is None else (0.693147 + 1.701413) / 2], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_margin_has_the_digits_of_the_scores(dtype, monkeypatch):
    seen, loss = [], rewarding.bradley_terry_loss

    def spy(chosen, rejected, *, margin):
        seen.append(margin)
        return loss(chosen, rejected, margin=margin)

    monkeypatch.setattr(rewarding, "bradley_terry_loss", spy)
    model = RewardModel(GPTConfig(WORDS.vocab_size, width=8, layers=1, heads=2, max_context=CONTEXT)).to(dtype)
    train_reward_model(model, [Pair([1], [2, EOS], [3, EOS], 0.1)], steps=1, seed=0)
    assert torch.equal(seen[0], torch.tensor([0.1], dtype=dtype))


@pytest.mark.parametrize(("n", "batch"), [(10, 3), (10, 4), (7, 7), (6, 1), (5, 8), (1, 1), (3, 7)])
def test_every_pair_is_taken_once_in_each_pass(n, batch):
    taken = [place for step in range(6 * n) for place in rows_of_step(step, n, batch, seed=4)]
    assert len(taken) == 6 * n * batch
    for start in range(0, len(taken), n):
        assert sorted(taken[start : start + n]) == list(range(n))


def test_the_order_of_the_pairs_is_a_function_of_step_and_seed_and_another_in_each_pass():
    passes = [rows_of_step(step, 20, 20, seed=0) for step in range(4)]
    assert passes[2] == rows_of_step(2, 20, 20, seed=0)
    assert len({tuple(order) for order in passes}) == 4
    assert rows_of_step(0, 20, 20, seed=1) != passes[0]
    assert rows_of_step(1, 20, 8, seed=0) == passes[0][8:16]  # whatever the batch size: the same order
    assert rows_of_step(2, 20, 8, seed=0) == passes[0][16:] + passes[1][:4]


# ---- samples


@pytest.fixture(scope="module")
def policy() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(Reviews.tokenizer.vocab_size, width=8, layers=1, heads=2, max_context=13))


ASKED = {"seed": 3, "labeller": "gold", "max_new_tokens": 8}


def test_pairs_are_two_samples_of_the_policy_and_what_the_labeller_said(policy, monkeypatch):
    said, prefers = [], Reviews.prefers

    def spy(self, problem, a, b, key, labeller):
        said.append((problem, a, b, labeller, answer := prefers(self, problem, a, b, key, labeller)))
        return answer

    monkeypatch.setattr(Reviews, "prefers", spy)
    pairs, dropped = collect_pairs(policy, Reviews(), 60, **ASKED)
    tokenizer, decided = Reviews.tokenizer, [answer for answer in said if answer[-1] is not None]
    assert len(decided) == len(pairs) and 0 < sum(dropped.values()) == 60 - len(pairs)
    for (problem, a, b, labeller, first_is_better), pair in zip(decided, pairs, strict=True):
        assert labeller == "gold" and tokenizer.decode(pair.prompt) == problem.prompt
        texts = [tokenizer.decode(ids).removesuffix("<eos>") for ids in (pair.chosen, pair.rejected)]
        assert texts == ([a, b] if first_is_better else [b, a])
    cut_off = [ids for pair in pairs for ids in (pair.chosen, pair.rejected) if tokenizer.eos_id not in ids]
    assert cut_off and all(len(ids) == 8 for ids in cut_off)  # as they were sampled: no stop token is made up
    assert {answer[-1] for answer in decided} == {True, False}


def test_pairs_of_samples_are_a_function_of_the_arguments(policy):
    first = collect_pairs(policy, Reviews(), 30, **ASKED)
    torch.manual_seed(5)
    assert collect_pairs(policy, Reviews(), 30, **ASKED) == first
    others = [ASKED | {"seed": 4}, ASKED | {"labeller": "length"}, ASKED | {"held_out": True}]
    for other in others:
        assert collect_pairs(policy, Reviews(), 30, **other)[0] != first[0]


def test_fresh_pairs_are_about_held_out_prompts(policy):
    held_out = {tuple(Reviews.tokenizer.encode_prompt(prompt)) for prompt in Reviews().prompts[True]}
    for asked_held_out in (True, False):
        pairs, _ = collect_pairs(policy, Reviews(), 40, **ASKED, held_out=asked_held_out)
        assert {tuple(pair.prompt) in held_out for pair in pairs} == {asked_held_out}


def test_a_tie_is_dropped_and_counted_and_so_is_a_response_sampled_twice(policy, monkeypatch):
    asked = iter(range(1000))
    monkeypatch.setattr(Reviews, "prefers", lambda *_: None if next(asked) % 2 else True)
    sampled = {}

    def generate(self, prompts, **how):
        responses = [[1, 2]] * 6 + [
            [1, i] for i in range(2 * len(prompts) - 6)
        ]  # the first three pairs: twice the same
        sampled.update(how, prompts=prompts)
        return Rollout.from_responses([p for p in prompts for _ in range(2)], responses)

    monkeypatch.setattr(preferences.Sampler, "generate", generate)
    pairs, dropped = collect_pairs(policy, Reviews(), 13, **ASKED)
    assert len(pairs) == 5 and dropped == {"the same response twice": 3, "equally good": 5}
    assert len(sampled["prompts"]) == 13 and sampled["samples_per_prompt"] == 2
    assert sampled.get("temperature", 1.0) == 1.0 and sampled["max_new_tokens"] == 8
    assert next(asked) == 10  # of two equal responses nobody is asked


def test_where_no_pair_is_left_the_error_says_why(policy, monkeypatch):
    monkeypatch.setattr(Reviews, "prefers", lambda *_: None)
    with pytest.raises(RunError, match=r"of 4 pairs none can be learned from \(dropped: 4 \(equally good\)\): ask for"):
        collect_pairs(policy, Reviews(), 4, **ASKED)


@pytest.mark.parametrize("pairs", ["0", "000"])
def test_the_number_of_pairs_asked_about_is_at_least_1(pairs):
    with pytest.raises(RunError, match=f"--pairs must be at least 1, not {pairs}"):
        preferences.from_option(pairs, WORDS, CONTEXT)


def test_the_option_is_a_number_or_a_file(file):
    assert preferences.from_option("3", WORDS, CONTEXT) is None
    path = file(row())
    assert preferences.from_option(str(path), WORDS, CONTEXT) == read_pairs(path, WORDS, CONTEXT)
    with pytest.raises(RunError, match=r"-5 cannot be read"):
        preferences.from_option("-5", WORDS, CONTEXT)


def test_the_most_common_first_responses_come_from_different_random_numbers(policy):
    """Pairs and held-out pairs of one seed: their samples are not each other's."""
    ids = Counter()
    for held_out in (True, False):
        pairs, _ = collect_pairs(policy, Reviews(), 40, **ASKED, held_out=held_out)
        ids.update({tuple(pair.chosen) for pair in pairs if len(pair.chosen) > 5})
    assert max(ids.values()) == 1
