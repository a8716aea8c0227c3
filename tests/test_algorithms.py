"""The table of algorithms: its rows against the papers, what a loss gets of the options, and what is printed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nanorl.algorithms import ALGORITHMS, EXTRAS, Algorithm, Config, choose_extras, main, table
from nanorl.errors import RunError
from nanorl.losses import cispo_loss, dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss, reinforce_loss
from nanorl.options import command_line

ROWS = {  # name -> loss, advantage's scale, what the denominator counts, whose the ratio is, updates a rollout
    "grpo": (grpo_loss, "group", "sequences", "token", 1),
    "dr_grpo": (dr_grpo_loss, "none", "sequences", "token", 1),
    "dapo": (dapo_loss, "group", "tokens", "token", 1),
    "gspo": (gspo_loss, "group", "sequences", "sequence", 4),
    "gspo_token": (gspo_loss, "group", "sequences", "sequence", 4),
    "reinforce": (reinforce_loss, "none", "tokens", "token", 1),
    "cispo": (cispo_loss, "group", "tokens", "token", 1),
}
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


def test_the_rows_are_those_of_the_papers():
    assert ALGORITHMS.keys() == ROWS.keys()
    for name, row in ALGORITHMS.items():
        assert (row.loss, row.advantage_scale, row.mean_over, row.level, row.updates_per_rollout) == ROWS[name], name
        assert row.epochs == 1 and row.note
        assert row.extras == (tuple(EXTRAS) if name == "dapo" else ())
        assert row.loss_options == ({"token_level": True} if name == "gspo_token" else {})


def test_gspo_alone_takes_four_updates_a_rollout_by_default():
    assert {name for name, row in ALGORITHMS.items() if row.updates_per_rollout != 1} == {"gspo", "gspo_token"}


def test_dapo_alone_samples_dynamically_and_minds_overlong_responses_by_default():
    assert {name for name, row in ALGORITHMS.items() if row.extras} == {"dapo"}
    assert set(ALGORITHMS["dapo"].extras) == {"dynamic_sampling", "overlong_penalty", "overlong_filtering"}


def test_each_extra_can_be_switched_off_alone_and_none_means_none():
    dapo = ALGORITHMS["dapo"]
    assert choose_extras(None, dapo) == dapo.extras and choose_extras(None, ALGORITHMS["grpo"]) == ()
    assert choose_extras(["none"], dapo) == ()
    for left_out in EXTRAS:
        rest = [name for name in EXTRAS if name != left_out]
        assert choose_extras(rest, dapo) == tuple(rest)


@pytest.mark.parametrize("given", [["dynamic"], ["overlong_penalty", "none"]])
def test_an_unknown_extra_is_an_error_that_lists_them(given):
    with pytest.raises(RunError, match=r"dynamic_sampling.*overlong_penalty.*overlong_filtering"):
        choose_extras(given, ALGORITHMS["dapo"])


@pytest.mark.parametrize("name,count", [(name, 4 if row[2] == "tokens" else 2) for name, row in ROWS.items()])
def test_the_denominator_counts_what_the_loss_is_a_mean_over(name, count):
    algorithm = ALGORITHMS[name]
    assert algorithm.denominator(MASK) == count
    assert algorithm.denominator(0 * MASK) == 1  # a batch without trainable tokens has loss 0, not 0 / 0
    zeros, ratio_1 = torch.zeros(3, 3), algorithm.chosen(denominator=count, max_length=5)
    whole = algorithm.chosen(max_length=5)
    values = [algorithm.loss(zeros - 1, zeros - 1, torch.ones(3), MASK, **options)[0] for options in (ratio_1, whole)]
    assert values[0] == values[1] != 0


@pytest.mark.parametrize("name,weight", [(name, 2 if row[3] == "sequence" else 4) for name, row in ROWS.items()])
def test_the_metrics_of_a_micro_batch_weigh_what_they_are_means_over(name, weight):
    algorithm = ALGORITHMS[name]
    assert algorithm.weight(MASK) == weight and algorithm.weight(0 * MASK) == 0
    generator = torch.Generator().manual_seed(0)
    logprobs, old = torch.randn(3, 3, generator=generator).double(), torch.randn(3, 3, generator=generator).double()

    def metrics(rows: slice) -> dict:
        options = algorithm.chosen(max_length=5, ref_logprobs=old[rows] + 0.1)
        return algorithm.loss(logprobs[rows], old[rows], torch.ones(3)[rows], MASK[rows], **options)[1]

    parts = [slice(0, 1), slice(1, 3)]
    for key, value in metrics(slice(0, 3)).items():
        combined = sum(metrics(rows)[key] * algorithm.weight(MASK[rows]) for rows in parts) / weight
        torch.testing.assert_close(combined, value, rtol=0, atol=1e-12)


def own(logprobs, old_logprobs, advantages, mask, *, strength=1.0, denominator=None):
    raise AssertionError("not reached")


def test_a_loss_gets_of_the_options_those_it_names_and_that_are_set():
    offered = {"ref_logprobs": "r", "denominator": 3, "max_length": 9}
    assert ALGORITHMS["grpo"].chosen(**offered, beta=0.1, clip_low=None) == {
        "ref_logprobs": "r",
        "denominator": 3,
        "beta": 0.1,
    }
    assert ALGORITHMS["dr_grpo"].chosen(**offered) == offered
    assert Algorithm(own, "group", "tokens").chosen(**offered) == {"denominator": 3}
    assert ALGORITHMS["gspo_token"].chosen(denominator=3) == {"token_level": True, "denominator": 3}
    assert ALGORITHMS["gspo"].chosen() == {}


@pytest.mark.parametrize(
    "name,option",
    [("cispo", "clip_low"), ("reinforce", "clip_high"), ("reinforce", "clip_low"), ("cispo", "dual_clip")],
)
def test_an_option_that_the_loss_does_not_have_is_an_error_that_names_both(name, option):
    with pytest.raises(ValueError, match=f"{name}_loss has no {option}: leave it away"):
        ALGORITHMS[name].chosen(**{option: 0.2})


def test_a_value_of_ones_own_goes_before_that_of_the_row():
    assert ALGORITHMS["gspo_token"].chosen(token_level=False) == {"token_level": False}
    strong = dataclasses.replace(ALGORITHMS["grpo"], loss=own, loss_options={"strength": 2.0})
    assert strong.chosen() == {"strength": 2.0}


def cells() -> dict[str, dict[str, str]]:
    """The printed table: method -> column -> cell."""
    header, rule, *lines = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table().splitlines())
    assert all(set(cell) == {"-"} for cell in rule)
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines}


def test_the_table_has_every_algorithm_beside_ppo_and_dpo():
    rows = cells()
    assert rows.keys() == {*ALGORITHMS, "ppo", "dpo"}
    columns = ["method", "reward source", "critic", "ratio and clipping level", "mean over", "KL", "note"]
    assert all(list(row) == columns and all(row.values()) for row in rows.values())


@pytest.mark.parametrize(
    "name,ratio,mean",
    [
        ("grpo", "token, 0.2 / 0.2", "tokens of each sequence, then sequences"),
        ("dr_grpo", "token, 0.2 / 0.2", "sequences x max_length"),
        ("dapo", "token, 0.2 / 0.28", "tokens"),
        ("gspo", "sequence, 0.0003 / 0.0004", "sequences"),
        ("gspo_token", "sequence, 0.0003 / 0.0004", "sequences"),
        ("reinforce", "no ratio", "tokens"),
        ("cispo", "token, weight at most 5", "tokens"),
        ("ppo", "token, 0.2 / 0.2", "tokens"),
        ("dpo", "pair against reference, no clipping", "pairs"),
    ],
)
def test_the_table_says_at_which_level_a_ratio_is_clipped_and_what_the_mean_is_over(name, ratio, mean):
    row = cells()[name]
    assert (row["ratio and clipping level"], row["mean over"]) == (ratio, mean)
    assert row["critic"] == ("yes" if name == "ppo" else "no")


def test_the_module_prints_the_table_or_a_translation(capsys, tmp_path):
    main(Config())
    assert capsys.readouterr().out == table() + "\n"
    (tmp_path / "config.json").write_text('{"loss_type": "dr_grpo", "scale_rewards": false}')
    command_line(Config, None, main, ["--from-trl", str(tmp_path / "config.json")])
    assert capsys.readouterr().out.startswith("python train_grpo.py --algo dr_grpo --clip-low 0.2 --clip-high 0.2")


def test_a_file_that_cannot_be_translated_is_a_message_and_an_exit_status(capsys, tmp_path):
    (tmp_path / "config.txt").write_text("loss_typ=dapo")
    for path, message in ((tmp_path / "config.txt", "did you mean loss_type"), (tmp_path / "none", "No such file")):
        with pytest.raises(SystemExit) as stopped:
            command_line(Config, None, main, ["--from-trl", str(path)])
        assert stopped.value.code == 1
        assert message in capsys.readouterr().err
