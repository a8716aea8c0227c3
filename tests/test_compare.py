"""Variants against each other: what is run, what is not run again, and what is left to read."""

import inspect
import json
import math
import os
import re
from pathlib import Path

import pytest

import kernels.rows
from nanorl import compare, model, processes, sampler, scorer, sft
from nanorl.compare import Config, command_of, main, make_variant, meaning, split
from nanorl.errors import Interrupted, RunError
from nanorl.tasks import chain

LOSS = """
from nanorl.losses.aggregate import token_mean

def my_loss(logprobs, old_logprobs, advantages, mask, *, scale=1.0, denominator=None):
    return token_mean(-scale * advantages[:, None] * logprobs, mask, denominator), {}
"""
TINY = ["--size", "16", "1", "2", "--warm-start-steps", "2", "--eval-problems", "8"]
TINY += ["--prompts", "2", "--group-size", "4", "--device", "cpu"]


DRAW = compare.draw


@pytest.fixture(autouse=True)
def own_folder_and_no_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "draw", lambda variants, path, caption: path)  # drawing takes a second


@pytest.fixture
def pretend(monkeypatch):
    """In place of the runs: what they would leave. `b`-like variants are 0.1 better. Returns the jobs, as they come."""
    seen = []

    def run_all(jobs, at_once, say):
        for job in jobs:
            job.out.mkdir()
            accuracy = 0.5 + 0.01 * job.seed + (0.1 if "--epochs" in job.arguments else 0)
            line = {"step": 0, "length": 5.0, "entropy": 1.0, "kl_old": 0.0, "eval": {"accuracy": 0.2}}
            (job.out / "metrics.jsonl").write_text(json.dumps(line | {"seconds": {"step": 2.0, "eval": 1.0}}) + "\n")
            summary = {"steps": 1, "eval_after": {"accuracy": accuracy}}
            (job.out / "summary.json").write_text(json.dumps(summary))
        seen.append((list(jobs), at_once))

    monkeypatch.setattr(compare, "run_all", run_all)
    return seen


def names(variants: list[str], **chosen) -> list[str]:
    return [make_variant(label, **({"common": []} | chosen)).name for label in variants]


# ---- what a variant is


def test_a_variant_is_an_algorithm_or_a_loss_with_options_behind_it(tmp_path):
    (tmp_path / "my_loss.py").write_text(LOSS)
    assert make_variant("grpo", ["--steps", "3"]).arguments == ("--steps", "3", "--algo", "grpo")
    with_options = make_variant("my_loss.py:my_loss --loss-args 'scale=2' --epochs 4", ["--steps", "3"])
    expected = ("--steps", "3", "--loss", "my_loss.py:my_loss", "--loss-args", "scale=2", "--epochs", "4")
    assert with_options.arguments == expected  # its own options last, so that they count


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("gropo", "--algo gropo is unknown: choose one of grpo"),
        ("my_loss.py:my_loss", r"there is no file my_loss\.py"),
        ("grpo 'open", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_a_variant_that_is_not_there_is_an_error_before_anything_runs(label, message, pretend):
    with pytest.raises(RunError, match=message):
        main(Config(["grpo", label]))
    assert not pretend


@pytest.mark.parametrize("options", [["--task", "reviews"], ["--task=reviews"]])
def test_a_task_whose_accuracy_nobody_can_verify_is_an_error_before_anything_runs(options, pretend):
    with pytest.raises(RunError, match=r"the comparison is of accuracy.*see python -m nanorl\.frontier"):
        main(Config(["grpo"]), options)
    assert not pretend


def test_a_changed_line_of_the_loss_is_another_run_and_a_changed_comment_is_not(tmp_path):
    def name(source: str) -> str:
        (tmp_path / "my_loss.py").write_text(source)
        return make_variant("my_loss.py:my_loss", []).name

    before = name(LOSS)
    assert name(LOSS.replace("import token_mean", "import token_mean  # of the whole batch")) == before
    assert name(LOSS.replace("    return", '    """Of the reader."""\n    return')) == before
    assert name(LOSS.replace("-scale", "-2 * scale")) != before
    assert re.fullmatch(r"my_loss\.py_my_loss-[0-9a-f]{8}", before)


def test_other_options_another_algorithm_and_another_loop_are_other_runs(tmp_path, monkeypatch):
    found = names(["grpo", "grpo --epochs 4"]) + names(["grpo"], common=["--steps", "3"])
    script = tmp_path / "train_grpo.py"
    script.write_text(processes.SCRIPT.read_text() + "\nDECAY = 0.5\n")
    assert names(["grpo"]) == found[:1]
    monkeypatch.setattr(compare, "SCRIPT", script)
    assert len({*found, *names(["grpo"])}) == 4


@pytest.mark.parametrize("module", [model, scorer, sft, sampler, kernels.rows, chain])
def test_changed_code_of_the_model_what_scores_samples_or_starts_it_and_the_task_is_another_run(module, monkeypatch):
    before = names(["grpo"])

    def changed(source: str) -> str:
        return meaning(source + ("\nCHANGED = True\n" if source == inspect.getsource(module) else ""))

    monkeypatch.setattr(compare, "meaning", changed)
    assert names(["grpo"]) != before


def test_the_meaning_of_code_leaves_out_comments_docstrings_and_layout():
    assert meaning('def f(x):\n    """Twice x."""\n    return 2 * x  # doubled\n') == meaning(
        "def f(x):\n  return (2 * x)"
    )
    assert meaning("x = 'text'") != meaning("x = 'other text'")


# ---- what is run


def test_every_seed_of_every_variant_is_a_run_and_the_variants_of_a_seed_share_a_folder_of_warm_starts(pretend):
    main(Config(["grpo", "grpo --epochs 4"], seeds=3, processes=2), ["--prompts", "16"])
    ((jobs, at_once),) = pretend
    assert at_once == 2
    assert [str(job) for job in jobs] == [
        f"{label}, seed {s}" for label in ("grpo", "grpo --epochs 4") for s in range(3)
    ]
    assert len({job.out for job in jobs}) == 6 and {job.out.parent for job in jobs} == {Path("runs/compare")}
    assert all(job.arguments[:4] == ("--eval-every", "10", "--prompts", "16") for job in jobs)


def test_the_same_command_finds_the_same_folders(pretend, monkeypatch):
    config = Config(["grpo"], seeds=2)
    main(config)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    main(config)
    assert [job.out for job in pretend[0][0]] == [job.out for job in pretend[1][0]]


def test_quick_is_two_seeds_and_fewer_steps_unless_told_otherwise(pretend):
    main(Config(["grpo"], quick=True))
    main(Config(["grpo"], quick=True, seeds=3, steps=10))
    (quick, _), (chosen, _) = pretend
    assert len(quick) == 2 and quick[0].arguments[:2] == ("--steps", "40")
    assert len(chosen) == 3 and chosen[0].arguments[-4:] == ("--steps", "10", "--algo", "grpo")


def test_there_are_as_many_processes_as_cores_unless_asked_otherwise(pretend, monkeypatch):
    monkeypatch.setattr(compare, "cores", lambda: 8)
    main(Config(["grpo"], out="one"))
    main(Config(["grpo"], out="few", processes=3))
    assert [at_once for _, at_once in pretend] == [8, 3]


def test_warm_starts_of_the_readers_own_runs_are_used(pretend, tmp_path):
    kept = tmp_path / "runs" / "warm_starts" / "0123.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"weights")
    for seeds in (1, 2):  # there already the second time
        main(Config(["grpo"], out="elsewhere", seeds=seeds, steps=seeds))
    assert Path("elsewhere/warm_starts/0123.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config([]), "nothing to compare"),
        (Config(["grpo", "grpo"]), "named twice"),
        (Config(["grpo --seed 7"]), "--seed is given to each run by the comparison"),
        (Config(["grpo --out=elsewhere"]), "--out is given"),
        (Config(["grpo --resume"]), "--resume is given"),
        (Config(["grpo"], seeds=0), "--seeds must be at least 1"),
        (Config(["grpo"], target=math.nan), "--target must be at least 0"),
    ],
)
def test_what_makes_no_sense_is_an_error(config, message, pretend):
    with pytest.raises(RunError, match=message):
        main(config)
    assert not pretend


def test_interrupted_it_says_how_to_go_on(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_all", interrupt)
    with pytest.raises(Interrupted, match="the same command goes on"):
        main(Config(["grpo"]))


# ---- what is left to read


def test_numbers_tables_and_picture_say_the_same(pretend, capsys, monkeypatch):
    monkeypatch.setattr(compare, "draw", DRAW)
    result = main(Config(["grpo", "grpo --epochs 4"], seeds=2, target=0.5, out="here"), ["--prompts", "16"])
    written = json.loads(Path("here/compare.json").read_text())
    assert json.loads(json.dumps(result)) == written["variants"]
    command = "python -m nanorl.compare grpo 'grpo --epochs 4' --seeds 2 --target 0.5 --out here -- --prompts 16"
    assert written["command"] == command and written["seeds"] == [0, 1]
    first, second = written["variants"]
    assert (first["label"], second["label"]) == ("grpo", "grpo --epochs 4")
    assert first["final"]["accuracy"]["values"] == [0.5, 0.51]
    assert second["difference"]["accuracy"]["mean"] == pytest.approx(0.1)
    assert second["arguments"][-4:] == ["--algo", "grpo", "--epochs", "4"]
    assert all((Path("here") / run / "summary.json").exists() for run in first["runs"] + second["runs"])
    text = Path("here/compare.md").read_text()
    assert text in capsys.readouterr().out and command in text and "+0.1000 ± 0.0000" in text
    assert Path("here/compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_list_of_numbers_stands_on_one_line(pretend):
    main(Config(["grpo"], seeds=3))
    assert '"seeds": [ 0, 1, 2 ]' in Path("runs/compare/compare.json").read_text()


def test_the_command_that_is_written_leads_to_the_same_configuration():
    assert command_of(Config(["grpo"]), []) == "python -m nanorl.compare grpo"
    config = Config(["grpo", "grpo --epochs 4"], seeds=3, steps=7, quick=True, processes=1)
    assert command_of(config, ["--beta", "0.1"]) == (
        "python -m nanorl.compare grpo 'grpo --epochs 4' --seeds 3 --steps 7 --quick --processes 1 -- --beta 0.1"
    )


def test_what_stands_behind_two_dashes_is_for_the_script():
    assert split(["grpo", "--seeds", "2", "--", "--beta", "0.1", "--", "x"]) == (
        ["grpo", "--seeds", "2"],
        ["--beta", "0.1", "--", "x"],
    )
    assert split(["grpo"]) == (["grpo"], [])


# ---- the real thing


def test_an_own_loss_runs_against_an_algorithm_and_nothing_is_run_twice(tmp_path, capsys):
    (tmp_path / "my_loss.py").write_text(LOSS)
    config = Config(["grpo", "my_loss.py:my_loss --loss-args scale=2"], seeds=1, steps=2, processes=1, out="here")
    first, own = main(config, TINY)
    for variant in (first, own):
        (accuracy,) = variant["final"]["accuracy"]["values"]
        assert 0 <= accuracy <= 1 and variant["curves"]["accuracy"]["steps"]["x"] == [0, 2]
    (run,) = own["runs"]
    options = json.loads((tmp_path / "here" / run / "config.json").read_text())["options"]
    assert (options["loss"], options["loss_args"], options["steps"]) == ("my_loss.py:my_loss", ["scale=2"], 2)
    found = [
        json.loads(Path("here", r, "summary.json").read_text())["warm_start_cached"] for r in (*first["runs"], run)
    ]
    assert found == [False, True] and len(os.listdir("here/warm_starts")) == 1
    capsys.readouterr()
    assert main(config, TINY) == [first, own]
    assert capsys.readouterr().out.startswith("2 of 2 runs are there already")
