"""GRPOConfig of TRL 1.16 -> options of train_grpo.py: what is read, what it becomes, and what has no counterpart."""

from __future__ import annotations

import dataclasses
import json

import pytest

import train_grpo
from nanorl.algorithms import ALGORITHMS
from nanorl.errors import RunError
from nanorl.from_trl import Translation, read, translate
from nanorl.options import parse
from nanorl.trl_fields import DEFAULTS, REASONS


def flags(**fields) -> dict:
    return translate(fields).flags


def some(found: dict, **expected) -> bool:
    return expected.items() <= found.items()


# ---- reading

SAME = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "use_vllm": False, "delta": None}
TEXTS = {
    "json": json.dumps(SAME, indent=1),
    "script": """
from trl import GRPOConfig, GRPOTrainer
def settings():
    return trl.GRPOConfig(
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28,  # clip-higher
        beta=0.0, use_vllm=False, delta=None,
    )
""",
    "call": 'GRPOConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, beta=0.0, use_vllm=False, delta=None)',
    "keywords": 'loss_type="dapo", epsilon=0.2, epsilon_high=0.28,\n  beta=0.0, use_vllm=False, delta=None',
    "lines": "# mine\nloss_type=dapo\nepsilon = 0.2\nepsilon_high=0.28,\nbeta=0.0\n\nuse_vllm=false\ndelta=null\n",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_json_a_call_in_python_keywords_and_lines_say_the_same(tmp_path, kind):
    for encoding in ("utf-8", "utf-8-sig"):  # the second as some editors on Windows write it
        (tmp_path / "config").write_text(TEXTS[kind], encoding=encoding)
        assert read(tmp_path / "config") == SAME


def test_values_may_be_lists_negative_numbers_and_texts(tmp_path):
    (tmp_path / "config").write_text('reward_weights=[1.0, 0.25], max_steps=-1, run_name="a, b=c"')
    assert read(tmp_path / "config") == {"reward_weights": [1.0, 0.25], "max_steps": -1, "run_name": "a, b=c"}


@pytest.mark.parametrize(
    "text,message",
    [
        ('epsilon=__import__("os").getpid()', "epsilon must be a plain value, not __import__"),
        ("GRPOConfig(beta=2 * x)", r"beta must be a plain value, not 2 \* x"),
        ("GRPOConfig(**defaults)", "give every field of GRPOConfig by its name"),
        ('GRPOConfig("out")', "give every field of GRPOConfig by its name"),
        ("GRPOConfig(beta=0.1)\nGRPOConfig(beta=0.2)", "GRPOConfig is called 2 times"),
        ("beta=0.1\nbeta=0.2", "gives beta twice"),
        ('{"beta": 0.1, "beta": 0.2}', "gives beta twice"),
        ("for x in y: pass", "line 1 is not key=value"),
        ("import os", "line 1 is not key=value"),
        ('{"beta": 0.1', "neither JSON nor keywords"),
        ("beta 0.1", "neither JSON nor keywords"),
        ("[" * 5000, "neither JSON nor keywords"),
        ("beta={[]: 1}", "beta must be a plain value"),
        ('{"beta": ' + "[" * 100000, "neither JSON nor keywords"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_nothing_of_it_is_run(tmp_path, text, message):
    (tmp_path / "config").write_text(text)
    with pytest.raises(RunError, match=message):
        read(tmp_path / "config")


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "config").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="neither JSON nor keywords"):
        read(tmp_path / "config")


@pytest.mark.parametrize(
    "wrong,near",
    [("epsilom", "epsilon"), ("loss_typ", "loss_type"), ("num_generation", "num_generations"), ("Beta", "beta")],
)
def test_an_unknown_field_is_an_error_that_names_near_ones(tmp_path, wrong, near):
    (tmp_path / "config").write_text(f"{wrong}=1")
    with pytest.raises(RunError, match=rf"GRPOConfig of TRL 1\.16 has no {wrong}: did you mean .*{near}"):
        read(tmp_path / "config")


def test_a_field_like_no_other_is_an_error_too(tmp_path):
    (tmp_path / "config").write_text("qqqq=1")
    with pytest.raises(RunError, match="has no qqqq: look it up in TRL's documentation"):
        read(tmp_path / "config")


@pytest.mark.parametrize(
    "field,value,expected",
    [
        ("loss_type", "ppo", "one of dapo, grpo, dr_grpo, bnpo, cispo, sapo, luspo, vespo"),
        ("importance_sampling_level", "word", "one of token, sequence"),
        ("scale_rewards", "std", "one of group, batch, none"),
        ("scale_rewards", ["group"], "one of group, batch, none"),
        ("epsilon", "0.2", "a number"),
        ("epsilon", None, "a number"),
        ("beta", float("nan"), "a number"),
        ("beta", True, "a number"),
        pytest.param("beta", 10**400, "a number", id="more than a float holds"),
        ("num_generations", 0, "a whole number of at least 1"),
        ("num_iterations", 1.5, "a whole number of at least 1"),
        ("use_vllm", 1, "True or False"),
    ],
)
def test_a_value_that_trl_does_not_take_is_an_error_that_says_what_it_takes(field, value, expected):
    with pytest.raises(RunError, match=f"{field} must be {expected}, not "):
        translate({field: value})


# ---- the algorithm


def test_an_empty_config_is_trls_default_which_is_the_loss_of_dapo_alone():
    assert flags() == {
        "algo": "dapo",
        "extras": "none",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "beta": 0.0,
        "group_size": 8,
        "epochs": 1,
        "updates_per_rollout": 1,
    }
    assert not translate({}).without


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_losses_that_both_have_keep_their_name(loss_type):
    assert flags(loss_type=loss_type, epsilon_high=5.0)["algo"] == loss_type


def test_a_sequence_ratio_is_gspo_with_loss_type_grpo_alone():
    paper = flags(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
    assert some(paper, algo="gspo", clip_low=3e-4, clip_high=4e-4, updates_per_rollout=1)
    for loss_type in ("dapo", "dr_grpo", "bnpo", "cispo"):
        result = translate({"loss_type": loss_type, "importance_sampling_level": "sequence", "epsilon_high": 5.0})
        assert "algo" not in result.flags
        assert {"importance_sampling_level", "loss_type"} & result.without.keys()
    result = translate({"importance_sampling_level": "sequence"})  # under TRL's default loss
    assert "not GSPO: that is loss_type='grpo'" in result.without["importance_sampling_level"]
    assert str(result).startswith("python train_grpo.py --algo CHOOSE ")  # which train_grpo.py refuses, with a list


def test_gspo_with_the_clip_range_of_tokens_is_said_to_clip_nothing():
    wide = translate({"loss_type": "grpo", "importance_sampling_level": "sequence"})
    assert any("3e-4 and 4e-4" in remark for remark in wide.remarks)
    narrow = translate({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4})
    assert not narrow.remarks


@pytest.mark.parametrize("loss_type", ["bnpo", "sapo", "luspo", "vespo"])
def test_a_loss_that_is_not_here_has_no_counterpart(loss_type):
    result = translate({"loss_type": loss_type})
    assert "algo" not in result.flags and "loss_type" in result.without


def test_without_an_algorithm_a_clip_range_has_no_meaning():
    result = translate({"loss_type": "sapo", "epsilon": 0.1, "epsilon_high": 5.0, "mask_truncated_completions": True})
    assert not {"clip_low", "clip_high"} & result.flags.keys() and result.flags["extras"] == "overlong_filtering"
    assert result.without.keys() == {"loss_type", "epsilon", "epsilon_high"}


def test_the_scale_of_advantages_is_the_rows():
    assert "scale_rewards" not in translate({"loss_type": "grpo"}).without
    assert "scale_rewards" not in translate({"loss_type": "grpo", "scale_rewards": True}).without
    assert "scale_rewards" not in translate({"loss_type": "dr_grpo", "scale_rewards": False}).without
    assert "scale_rewards" not in translate({"loss_type": "dr_grpo", "scale_rewards": "none"}).without
    assert "'none'" in translate({"loss_type": "dr_grpo"}).without["scale_rewards"]  # TRL scales it by default
    assert "'batch'" in translate({"loss_type": "grpo", "scale_rewards": "batch"}).without["scale_rewards"]
    for name in ("grpo", "dapo", "dr_grpo", "cispo"):
        scale = ALGORITHMS[name].advantage_scale
        assert "scale_rewards" not in translate({"loss_type": name, "scale_rewards": scale}).without


def test_masked_truncated_responses_are_overlong_filtering():
    assert some(flags(mask_truncated_completions=True), algo="dapo", extras="overlong_filtering")
    assert some(flags(loss_type="grpo", mask_truncated_completions=True), extras="overlong_filtering")
    assert "extras" not in flags(loss_type="grpo")
    remarks = translate({"loss_type": "grpo", "mask_truncated_completions": True}).remarks
    assert any("here those are in no mean" in remark for remark in remarks)


# ---- clipping and KL


def test_epsilon_stands_for_both_sides_until_epsilon_high_is_given():
    assert some(flags(epsilon=0.1), clip_low=0.1, clip_high=0.1)
    assert some(flags(epsilon_high=0.28), clip_low=0.2, clip_high=0.28)


def test_a_low_epsilon_above_1_clips_nothing_below():
    assert some(flags(epsilon=2.0), clip_low=1, clip_high=2.0)


def test_cispos_epsilon_high_is_the_cap_itself():
    result = translate({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.2})
    assert result.flags["clip_high"] == 4.0 and "clip_low" not in result.flags
    assert "no lower bound" in result.without["epsilon"]
    assert flags(loss_type="cispo", epsilon_high=1.2)["clip_high"] == 0.2


@pytest.mark.parametrize("fields,name", [({}, "epsilon"), ({"epsilon_high": 0.28}, "epsilon_high")])
def test_a_cispo_cap_below_1_has_no_counterpart(fields, name):
    result = translate({"loss_type": "cispo"} | fields)
    assert "clip_high" not in result.flags
    assert "caps every weight at 0.2" in result.without[name]


def test_delta_has_no_option():
    assert "dual_clip" in translate({"delta": 4.0}).without["delta"]
    assert "delta" not in translate({"delta": None}).without


def test_a_kl_term_that_trl_multiplies_by_the_ratio_is_said_to_differ():
    plain = translate({"beta": 0.04, "use_bias_correction_kl": False})
    assert plain.flags["beta"] == 0.04 and not plain.without
    assert "multiplies the KL term by the ratio" in translate({"beta": 0.04}).without["use_bias_correction_kl"]
    assert not translate({"use_bias_correction_kl": True}).without  # without effect: beta is 0


# ---- batches and updates


def sizes(**fields) -> dict:
    return flags(per_device_train_batch_size=8, num_generations=4, **fields)


def test_updates_per_rollout_are_steps_per_generation_over_accumulation():
    assert some(sizes(), updates_per_rollout=1, prompts=2, micro_batch=8, group_size=4)
    assert some(sizes(gradient_accumulation_steps=4), updates_per_rollout=1, prompts=8)
    assert some(sizes(steps_per_generation=16, gradient_accumulation_steps=4), updates_per_rollout=4, prompts=32)
    assert some(sizes(steps_per_generation=4), updates_per_rollout=4, prompts=8)
    assert some(sizes(generation_batch_size=64), updates_per_rollout=8, prompts=16)


def test_a_rollout_smaller_than_an_update_makes_one_larger_rollout():
    assert some(sizes(steps_per_generation=1, gradient_accumulation_steps=4), updates_per_rollout=1, prompts=8)


@pytest.mark.parametrize(
    "fields",
    [
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "num_iterations": 2},
    ],
)
def test_updates_that_straddle_rollouts_have_no_counterpart(fields):
    result = translate(fields)
    assert "updates_per_rollout" not in result.flags
    assert "updates straddle rollouts" in result.without["steps_per_generation"]


def test_updates_on_parts_of_a_group_have_no_counterpart():
    result = translate({"per_device_train_batch_size": 8, "steps_per_generation": 4, "num_generations": 32})
    assert result.flags["prompts"] == 1 and "updates_per_rollout" not in result.flags
    assert "steps_per_generation" in result.without


def test_rows_that_are_no_whole_groups_leave_prompts_open():
    result = translate({"per_device_train_batch_size": 2, "num_generations": 8})  # on several processes it may be right
    assert "prompts" not in result.flags
    assert any("no whole groups of 8" in remark for remark in result.remarks)


def test_without_sizes_the_prompts_stay_ours():
    assert "prompts" not in flags(num_generations=16) and flags(num_generations=16)["group_size"] == 16


def test_iterations_are_epochs_and_steps_count_rollouts():
    result = translate({"num_iterations": 2, "steps_per_generation": 4, "max_steps": 100})
    assert some(result.flags, epochs=2, updates_per_rollout=4, steps=13)  # 8 updates a rollout
    assert any("a step here is a rollout with its 8 updates" in remark for remark in result.remarks)
    assert flags(max_steps=100)["steps"] == 100
    assert "steps" not in flags(max_steps=-1)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"steps_per_generation": 2, "generation_batch_size": 16}, "exclude each other"),
        ({"generation_batch_size": 12}, "12 is no multiple of per_device_train_batch_size 8"),
    ],
)
def test_sizes_that_trl_refuses_are_an_error(fields, message):
    with pytest.raises(RunError, match=message):
        translate(fields)


# ---- the rest


def test_importance_weights_of_tokens_are_the_importance_cap():
    mode = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
    assert flags(**mode)["importance_cap"] == 3.0
    assert flags(**mode, vllm_importance_sampling_clip_max=2.0)["importance_cap"] == 2.0
    assert flags(**mode, vllm_importance_sampling_cap=4.0)["importance_cap"] == 4.0


@pytest.mark.parametrize(
    "fields",
    [
        {},  # TRL's default: sequences beyond the bound are masked
        {"vllm_importance_sampling_mode": "token_mask"},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
        {
            "vllm_importance_sampling_mode": "token_truncate",
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
        },
    ],
)
def test_other_corrections_of_the_sampler_have_no_counterpart(fields):
    result = translate({"use_vllm": True} | fields)
    assert "importance_cap" not in result.flags
    assert "vllm_importance_sampling_correction" in result.without


def test_without_vllm_its_correction_is_without_effect():
    result = translate({"vllm_importance_sampling_mode": "token_truncate"})
    assert "importance_cap" not in result.flags
    assert "without effect" in result.without["vllm_importance_sampling_mode"]


def test_what_both_call_differently_is_renamed_where_it_is_given():
    given = {
        "max_completion_length": 64,
        "temperature": 0.7,
        "learning_rate": 1e-6,
        "seed": 3,
        "output_dir": "runs/a b",
        "save_steps": 50,
        "eval_steps": 10,
        "bf16": True,
        "use_cpu": True,
    }
    result = translate(given)
    assert some(
        result.flags,
        max_new_tokens=64,
        temperature=0.7,
        learning_rate=1e-6,
        seed=3,
        out="runs/a b",
        save_every=50,
        eval_every=10,
        dtype="bfloat16",
        device="cpu",
    )
    assert "--out 'runs/a b'" in str(result)
    assert any("Muon" in remark for remark in result.remarks)
    assert not flags().keys() & {"max_new_tokens", "learning_rate", "seed", "dtype", "device", "save_every"}


def test_a_share_of_the_steps_is_no_number_of_steps():
    result = translate({"save_steps": 0.1})
    assert "save_every" not in result.flags and "save_steps" in result.without


def test_without_a_longest_response_the_tasks_is_taken():
    result = translate({"max_completion_length": None})
    assert "max_new_tokens" not in result.flags and "limit" in result.without["max_completion_length"]


def test_fields_without_counterpart_are_listed_with_their_reason():
    given = {"top_p": 0.9, "optim": "adamw_torch", "report_to": "none", "top_entropy_quantile": 0.2}
    without = translate(given).without
    assert without.keys() == given.keys()
    assert "whole distribution" in without["top_p"] and "Muon" in without["optim"]
    text = str(translate(given))
    assert all(f"  {name}: {reason}" in text for name, reason in without.items())


def test_every_option_it_can_say_is_one_of_the_script_or_of_a_row():
    said = set()
    for fields in (
        {"per_device_train_batch_size": 8, "max_steps": 5, "output_dir": "x", "use_cpu": True, "bf16": False},
        {"loss_type": "cispo", "epsilon_high": 5.0, "max_completion_length": 9, "learning_rate": 1e-3, "seed": 0},
        {"mask_truncated_completions": True, "temperature": 1.0, "save_steps": 5, "eval_steps": 5},
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
    ):
        said |= flags(**fields).keys()
    options = {option.name for option in dataclasses.fields(train_grpo.Config)}
    assert said <= options | {option.name for option in dataclasses.fields(ALGORITHMS["grpo"])}
    assert len(said) > 20


def test_a_translation_to_options_of_today_is_taken_by_the_script():
    result = Translation({name: value for name, value in flags(loss_type="grpo", epsilon=0.1, seed=3).items()})
    del result.flags["updates_per_rollout"]  # 1
    _, _, *argv = str(result).split()
    config = parse(train_grpo.Config, None, argv)
    assert (config.algo, config.clip_low, config.clip_high, config.seed) == ("grpo", 0.1, 0.1, 3)


def test_the_fields_and_their_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl", minversion="1.16")
    if not trl.__version__.startswith("1.16."):
        pytest.skip("another version of TRL")
    fields = {option.name: option.default for option in dataclasses.fields(trl.GRPOConfig)}
    assert fields.keys() == DEFAULTS.keys() | REASONS.keys()
    assert not DEFAULTS.keys() & REASONS.keys()
    assert {name: fields[name] for name in DEFAULTS} == DEFAULTS
