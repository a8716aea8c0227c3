from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl.rollout import Rollout, response_mask
from nanorl.tokenizer import Tokenizer

PROMPTS = [[1], [2, 2], [3, 3, 3], [4]]
RESPONSES = [[5, 6], [7], [], [8, 9, 10, 11]]


def full_rollout() -> Rollout:
    """Four rows in which every field is filled, with values that name their row."""
    rollout = Rollout.from_responses(PROMPTS, RESPONSES)
    rollout.groups = torch.tensor([0, 0, 1, 1])
    rollout.finish = ["stop", "length", "length", "stop"]
    per_token = torch.arange(4.0)[:, None] + torch.arange(4) / 10
    rollout.behavior_logprobs, rollout.old_logprobs, rollout.ref_logprobs = per_token, per_token + 10, per_token + 20
    rollout.rewards = torch.arange(4.0) + 30
    rollout.advantages = torch.arange(4.0) + 40
    rollout.temperature = 0.7
    rollout.truncated = True
    return rollout


def test_given_responses_are_padded_on_the_right_and_trainable_in_full():
    rollout = Rollout.from_responses(PROMPTS, RESPONSES)
    assert len(rollout) == 4 and rollout.prompts == PROMPTS
    assert rollout.tokens.shape == rollout.mask.shape == (4, 4)
    assert rollout.mask.long().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert [row[kept].tolist() for row, kept in zip(rollout.tokens, rollout.mask, strict=True)] == RESPONSES
    assert rollout.lengths.tolist() == [2, 1, 0, 4]
    assert rollout.groups.tolist() == [0, 1, 2, 3] and rollout.finish == ["stop"] * 4
    assert (rollout.temperature, rollout.truncated, rollout.behavior_logprobs) == (1.0, False, None)


def test_given_responses_may_be_few_or_empty():
    assert Rollout.from_responses([[1], [2]], [[], []]).tokens.shape == (2, 0)
    assert Rollout.from_responses([], []).tokens.shape == (0, 0)


def test_given_responses_are_copied():
    prompt, response = [1, 2], [3]
    rollout = Rollout.from_responses([prompt], [response])
    prompt.append(9)
    response.append(9)
    assert rollout.prompts == [[1, 2]] and rollout.tokens.tolist() == [[3]]


def rows_of(rollout: Rollout) -> list[tuple]:
    """Each row as plain values, without its padding."""
    lengths = rollout.lengths.tolist()

    def trimmed(field):
        return [row[:n].tolist() for row, n in zip(getattr(rollout, field), lengths, strict=True)]

    per_token = map(trimmed, ("tokens", "mask", "behavior_logprobs", "old_logprobs", "ref_logprobs"))
    per_row = [getattr(rollout, field).tolist() for field in ("groups", "rewards", "advantages")]
    return list(zip(rollout.prompts, lengths, rollout.finish, *per_row, *per_token, strict=True))


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3], [1, 0], [2, 1, 1], [2]])
def test_selecting_rows_keeps_every_field_in_step_and_trims_to_the_longest(rows):
    rollout = full_rollout()
    part = rollout.select(rows)
    assert rows_of(part) == [rows_of(rollout)[row] for row in rows]
    longest = max(len(RESPONSES[row]) for row in rows)
    for field in ("tokens", "mask", "behavior_logprobs", "old_logprobs", "ref_logprobs"):
        assert getattr(part, field).shape == (len(rows), longest), field
    assert (part.temperature, part.truncated) == (0.7, True)


def test_selecting_takes_per_token_advantages_along():
    rollout = full_rollout()
    rollout.advantages = torch.arange(16.0).view(4, 4)
    assert rollout.select([1, 0]).advantages.tolist() == [[4.0, 5.0], [0.0, 1.0]]


def test_selecting_accepts_a_tensor_and_leaves_the_original_alone():
    rollout = full_rollout()
    before = rows_of(rollout)
    part = rollout.select(torch.tensor([3, 1]))
    assert rows_of(part) == [before[3], before[1]]
    part.tokens += 1
    part.rewards += 1
    part.prompts.append([0])
    assert rows_of(rollout) == before


def test_selecting_no_row_gives_an_empty_record():
    part = full_rollout().select([])
    assert len(part) == 0 and part.tokens.shape == (0, 0) and part.finish == []


def test_what_is_not_there_stays_away():
    part = Rollout.from_responses(PROMPTS, RESPONSES).select([1])
    assert part.old_logprobs is part.rewards is part.advantages is None


@settings(derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12), size=st.integers(1, 14)
)
def test_splitting_covers_every_row_exactly_once_and_puts_similar_lengths_together(lengths, size):
    prompts = [[row] * prompt for row, (prompt, _) in enumerate(lengths)]
    rollout = Rollout.from_responses(prompts, [[row] * response for row, (_, response) in enumerate(lengths)])
    parts = list(rollout.split(size))
    rows = [prompt[0] for part in parts for prompt in part.prompts]
    assert sorted(rows) == list(range(len(lengths)))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1) and 1 <= len(parts[-1]) <= size
    totals = [sum(lengths[row]) for row in rows]
    assert totals == sorted(totals)
    for part in parts:
        assert [len(prompt) for prompt in part.prompts] == [lengths[prompt[0]][0] for prompt in part.prompts]
        assert part.lengths.tolist() == [lengths[prompt[0]][1] for prompt in part.prompts]
        assert part.tokens.shape[1] == max(part.lengths.tolist())


def test_splitting_without_a_size_gives_all_rows_at_once():
    (part,) = full_rollout().split(None)
    assert sorted(rows_of(part)) == sorted(rows_of(full_rollout()))
    assert list(Rollout.from_responses([], []).split(None)) == []


@pytest.mark.parametrize("size", [0, -1])
def test_a_micro_batch_without_rows_is_an_error_that_names_the_size(size):
    with pytest.raises(ValueError, match=f"not {size}"):
        list(full_rollout().split(size))


def test_moving_to_a_device_moves_every_tensor_and_nothing_else():
    rollout = full_rollout()
    moved = rollout.to("meta")  # a device that every machine has
    for field in (
        "tokens",
        "mask",
        "lengths",
        "groups",
        "behavior_logprobs",
        "old_logprobs",
        "ref_logprobs",
        "rewards",
    ):
        assert getattr(moved, field).device.type == "meta", field
        assert getattr(rollout, field).device.type == "cpu", field
    assert moved.advantages.device.type == "meta"
    assert (moved.prompts, moved.finish, moved.temperature) == (rollout.prompts, rollout.finish, 0.7)
    assert rows_of(rollout.to("cpu")) == rows_of(rollout)


def test_trap_c4_a_text_ends_at_its_first_stop_token_and_leaves_it_out():
    tokenizer = Tokenizer.characters("abc")  # <eos> is 3
    rollout = Rollout.from_responses([[0]] * 4, [[0, 1, 3], [0, 3, 2, 3], [3], [1, 2]])
    assert rollout.texts(tokenizer) == ["ab", "a", "", "bc"]


def test_a_text_never_includes_padding():
    tokenizer = Tokenizer.characters("abc")  # padding is id 0, which is "a"
    assert Rollout.from_responses([[0]] * 3, [[1], [0, 0, 0, 0], []]).texts(tokenizer) == ["b", "aaaa", ""]


@pytest.mark.parametrize(
    "tokens, mask",
    [
        ([7, 8, 2, 2, 2], [1, 1, 1, 0, 0]),
        ([7, 8, 9, 7, 8], [1, 1, 1, 1, 1]),
        ([2, 2, 2, 2, 2], [1, 0, 0, 0, 0]),
        ([7, 8, 9, 7, 2], [1, 1, 1, 1, 1]),
        ([7, 2, 8, 8, 2], [1, 1, 0, 0, 0]),
    ],
)
def test_trap_c3_the_first_stop_token_is_trained_and_all_behind_it_is_not(tokens, mask):
    assert response_mask(torch.tensor([tokens]), [2]).long().tolist() == [mask]


def test_trap_c3_every_stop_token_ends_the_mask():
    tokens = torch.tensor([[7, 3, 2, 7], [7, 2, 3, 7], [7, 7, 7, 3], [7, 4, 7, 7]])
    mask = response_mask(tokens, [2, 3])
    assert mask.dtype == torch.bool
    assert mask.long().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert response_mask(tokens, []).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompts": [[1]]}, r"B = 1 prompts, got \(2, 3\)"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, r"got \(2, 3\) and \(2, 2\)"),
        ({"tokens": torch.zeros(2, dtype=torch.long)}, r"tokens and mask \(B, T\).*got \(2,\)"),
        ({"mask": torch.ones(2, 3)}, "boolean mask, got torch.float32"),
        ({"prompts": [[1], []]}, "prompt 1 is empty.*<bos>"),
    ],
)
def test_a_record_whose_parts_do_not_fit_is_an_error_that_says_how(change, message):
    fields = {
        "prompts": [[1], [2]],
        "tokens": torch.zeros(2, 3, dtype=torch.long),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "lengths": torch.tensor([3, 3]),
        "finish": ["stop"] * 2,
        "groups": torch.arange(2),
    }
    Rollout(**fields)
    with pytest.raises(ValueError, match=message):
        Rollout(**fields | change)


def test_prompts_and_responses_of_different_number_are_an_error_that_names_both():
    with pytest.raises(ValueError, match="2 prompts but 1 responses"):
        Rollout.from_responses([[1], [2]], [[3]])


def test_split_groups_gives_disjoint_parts_of_whole_groups():
    rollout = full_rollout()
    first, second = rollout.split_groups(2)
    assert first.groups.tolist() == [0, 0] and second.groups.tolist() == [1, 1]
    assert first.prompts + second.prompts == rollout.prompts
    assert rollout.split_groups(1) == [rollout] and len(rollout.split_groups(5)) == 2


def test_joined_rollouts_keep_their_rows_and_number_their_groups_on():
    rollout = full_rollout()
    short = rollout.select([1, 0])  # of at most 2 tokens
    both = short.join(rollout)
    assert both.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert both.prompts == short.prompts + rollout.prompts and both.finish == short.finish + rollout.finish
    assert both.tokens.shape == both.mask.shape == both.old_logprobs.shape == (6, 4)
    assert torch.equal(both.tokens[2:], rollout.tokens) and torch.equal(both.tokens[:2, :2], short.tokens)
    assert not both.mask[:2, 2:].any() and both.lengths.tolist() == [1, 2, 2, 1, 0, 4]
    assert torch.equal(both.rewards, torch.cat([short.rewards, rollout.rewards]))
    assert both.temperature == 0.7 and both.truncated


def test_rollouts_of_two_temperatures_are_never_joined():
    cool = Rollout.from_responses([[1]], [[2, 3]])
    with pytest.raises(ValueError, match=r"temperature 1\.0, the other at 0\.5"):
        cool.join(replace(cool, temperature=0.5))
    with pytest.raises(ValueError, match="top-k or top-p"):
        cool.join(replace(cool, truncated=True))
