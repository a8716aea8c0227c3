"""Preference pairs straight to a policy: what reaches the loss, what the run leaves, stopping and going on."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import math
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from script_runs import ctrl_c, digest, equal, metrics, resume, weights
from torch import Tensor

import train_dpo
from nanorl import checkpoint, report, sft
from nanorl.errors import Interrupted, RunError
from nanorl.losses import dpo_loss, ipo_loss
from nanorl.optimizers import Optimizers
from nanorl.options import command_line
from nanorl.preferences import collect_pairs, rows_of_step
from nanorl.rollout import Rollout
from nanorl.tasks.reviews import Reviews

SCRIPT = Path(train_dpo.__file__)
TINY = {
    "size": (16, 1, 2),
    "warm_start_steps": 0,
    "pairs": "24",
    "batch": 8,
    "max_new_tokens": 10,
    "steps": 3,
    "beta": 0.1,
    "save_every": 10,
    "eval_problems": 8,
    "device": "cpu",
}


def quick(patched: pytest.MonkeyPatch) -> None:
    """Leaves out what takes longer than the run."""
    patched.setattr(train_dpo, "HELD_OUT_PAIRS", 20)
    patched.setattr(report, "draw_curves", lambda out: None)
    patched.setattr(report.viewer, "write_run", lambda *_, **__: "")


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch):
    quick(monkeypatch)


@pytest.fixture
def train(tmp_path):
    """Trains in a folder of its own; returns it."""
    count = iter(range(100))

    def train(**chosen) -> Path:
        out = tmp_path / f"run-{next(count)}"
        train_dpo.main(train_dpo.Config(out=str(out), **(TINY | chosen)))
        return out

    return train


def watched(patched: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the losses of the script's updates get from now on, its models and its pairs."""
    seen = SimpleNamespace(calls=[], pairs=[])

    def spy(function):
        def loss(*given, **keywords):
            if "denominator" in keywords:  # not an evaluation
                seen.calls.append(([x.detach().clone() for x in given], keywords))
            return function(*given, **keywords)

        return loss

    def copy(policy, function=train_dpo.frozen_copy):
        seen.policy, seen.reference = policy, function(policy)
        seen.before = digest(policy)
        return seen.reference

    def collect(*given, **keywords):
        seen.pairs.append(collect_pairs(*given, **keywords)[0])
        return collect_pairs(*given, **keywords)

    patched.setattr(train_dpo, "dpo_loss", spy(dpo_loss))
    patched.setattr(train_dpo, "ipo_loss", spy(ipo_loss))
    patched.setattr(train_dpo, "frozen_copy", copy)
    patched.setattr(train_dpo, "collect_pairs", collect)
    return seen


@pytest.fixture
def seen(monkeypatch):
    return watched(monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> SimpleNamespace:
    """A whole run, with its pictures."""
    out, console = tmp_path_factory.mktemp("contract") / "run", io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(console):
        patched.setattr(train_dpo, "HELD_OUT_PAIRS", 20)
        seen = watched(patched)
        options = TINY | {"warm_start_steps": 2, "dtype": "float64", "eval_every": 2, "learning_rate": 0.01}
        train_dpo.main(train_dpo.Config(out=str(out), **options))
    seen.out, seen.console = out, console.getvalue()
    return seen


# ---- the run contract


def test_a_run_leaves_the_files_of_the_contract(finished):
    names = {path.name for path in finished.out.iterdir()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "curves.png",
        "samples.html",
        "pairs.json",
        "checkpoint",
        "summary.json",
        "lock",
    }
    saved = {path.name for path in checkpoint.latest(finished.out / "checkpoint").iterdir()}
    models = ("policy", "reference")
    assert saved == {f"{name}.{end}" for name in models for end in ("safetensors", "json")} | {"training.pt"}
    page = json.loads(re.search(r'id="data">(.*?)</script>', (finished.out / "samples.html").read_text())[1])
    assert {tuple(r["scores"]) for problem in page["problems"] for r in problem["after"]} == {("gold",)}
    assert page["result"].startswith("gold ") and "proxy" not in page["result"]
    assert "proxy" not in finished.console and "reward the policy implies   0.000 -> " in finished.console
    for line in ("warm start: 2 steps", "memory: policy ", "pairs; dropped: ", "on 8 held-out problems"):
        assert line in finished.console


EVALUATION = {"gold", "gold_low", "gold_high", "proxy", "kl", "mean_length", "truncated_share", "problems"}
EVALUATION |= {"pair_accuracy"}
LOGGED = {"step", "loss", "accuracy", "margin", "grad_norm", "learning_rate", "skipped_updates"}
LOGGED |= {f"{which}_{what}" for which in ("chosen", "rejected") for what in ("reward", "logprob")}


def test_the_summary_holds_evaluations_before_and_after_and_counts_the_pairs(finished):
    summary = json.loads((finished.out / "summary.json").read_text())
    for name in ("eval_before", "eval_after"):
        assert summary[name].keys() == EVALUATION and summary[name]["problems"] == 8
    before, after = summary["eval_before"], summary["eval_after"]
    assert before["kl"] == before["proxy"] == before["pair_accuracy"] == 0
    # What the policy implies as a reward is beta times what its log-probs have moved.
    assert after["proxy"] == pytest.approx(0.1 * after["kl"], rel=1e-9) and after["kl"] != 0
    trained_on, fresh = finished.pairs
    assert summary["pairs"]["trained_on"] == len(trained_on) == 24 - sum(summary["pairs"]["dropped"].values())
    assert summary["pairs"]["held_out"] == len(fresh)
    held_out = {tuple(Reviews.tokenizer.encode_prompt(prompt)) for prompt in Reviews().prompts[True]}
    assert [{tuple(pair.prompt) in held_out for pair in pairs} for pairs in finished.pairs] == [{False}, {True}]


def test_trap_h3_every_step_logs_what_tells_learning_from_not_learning(finished):
    lines = metrics(finished.out)
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line.keys() - {"eval"} == LOGGED and ("eval" in line) == (line["step"] % 2 == 0)
        assert all(math.isfinite(line[name]) for name in LOGGED) and line["grad_norm"] > 0
        assert line["margin"] == pytest.approx(line["chosen_reward"] - line["rejected_reward"], abs=1e-12)
    first, *later = lines
    assert first["loss"] == pytest.approx(0.693147, abs=1e-6) and first["margin"] == pytest.approx(0, abs=1e-12)
    assert all(abs(line["margin"]) > 1e-6 for line in later)


def test_the_page_on_metrics_explains_each_logged_number(finished):
    explained = set(re.findall(r"`([\w.@]+)`", (SCRIPT.parent / "docs" / "metrics.md").read_text()))
    summary = json.loads((finished.out / "summary.json").read_text())
    logged = LOGGED | {f"eval.{name}" for name in EVALUATION - {"gold_low", "gold_high"}} | {*summary["pairs"]}
    assert logged <= explained, logged - explained


# ---- what reaches the loss


@torch.no_grad()
def by_hand(model, prompt: list[int], response: list[int]) -> float:
    """log pi(response | prompt), by one forward pass over one unpadded row."""
    hidden = model(torch.tensor([prompt + response]))[0, len(prompt) - 1 : -1]
    return (hidden @ model.head.T).log_softmax(-1)[torch.arange(len(response)), response].sum().item()


@pytest.mark.parametrize("length_normalized", [False, True])
def test_log_probs_are_those_of_whole_responses_their_stop_token_included(length_normalized, train, seen):
    train(dtype="float64", steps=2, length_normalized=length_normalized, learning_rate=0.02)
    pairs = seen.pairs[0]
    for step, ((chosen, _, ref_chosen, ref_rejected), keywords) in enumerate(seen.calls):
        rows = rows_of_step(step, len(pairs), 8, 0)
        assert keywords["denominator"] == 8 == len(chosen) and keywords["beta"] == 0.1
        for i, row in enumerate(rows):
            for response, found in ((pairs[row].chosen, ref_chosen), (pairs[row].rejected, ref_rejected)):
                scale = len(response) if length_normalized else 1
                expected = by_hand(seen.reference, pairs[row].prompt, response) / scale
                assert found[i].item() == pytest.approx(expected, abs=1e-10)
    (chosen, rejected, ref_chosen, ref_rejected), _ = seen.calls[0]
    torch.testing.assert_close(chosen, ref_chosen, rtol=0, atol=1e-10)
    torch.testing.assert_close(rejected, ref_rejected, rtol=0, atol=1e-10)
    (chosen, _, ref_chosen, _), _ = seen.calls[1]
    assert (chosen - ref_chosen).abs().max() > 1e-3  # the policy has moved, the reference has not


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ({}, {"beta": 0.1, "label_smoothing": 0.0, "robust": False}),
        ({"label_smoothing": 0.1, "beta": 0.5}, {"beta": 0.5, "label_smoothing": 0.1, "robust": False}),
        ({"label_smoothing": 0.1, "robust": True}, {"beta": 0.1, "label_smoothing": 0.1, "robust": True}),
        ({"loss": "ipo"}, {"beta": 0.1}),
    ],
    ids=["dpo", "cdpo", "robust", "ipo"],
)
def test_every_form_trains_with_the_keywords_of_its_loss(options, keywords, train, seen):
    out = train(**options)
    assert all(given == keywords | {"denominator": 8} for _, given in seen.calls) and len(seen.calls) == 3
    assert all(math.isfinite(line["loss"]) for line in metrics(out))
    if options.get("loss") == "ipo":
        assert metrics(out)[0]["loss"] == pytest.approx((1 / (2 * 0.1)) ** 2, rel=1e-5)
    assert not equal(weights(out), weights(out, "reference"))


def test_the_policy_learns_to_prefer_what_was_chosen(train):
    lines = metrics(train(steps=30, learning_rate=0.01, eval_every=100))
    assert sum(line["accuracy"] for line in lines[-5:]) / 5 > 0.9 and lines[-1]["loss"] < 0.6
    assert lines[-1]["chosen_reward"] > lines[-1]["rejected_reward"]


def gradients_of_each_step(train, monkeypatch, **chosen) -> list[list[Tensor]]:
    """As they reach the optimizer, the weights staying as they are."""
    kept = []

    def keep(self, rate=1.0):
        kept.append([weight.grad.clone() for weight in self.weights])

    with monkeypatch.context() as patched:
        patched.setattr(Optimizers, "step", keep)
        train(dtype="float64", steps=2, **chosen)
    return kept


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_the_micro_batch_size_never_changes_a_gradient(loss, train, monkeypatch):
    whole = gradients_of_each_step(train, monkeypatch, loss=loss)
    assert len(whole) == 2 and all(gradient.abs().max() > 0 for step in whole for gradient in step)
    for micro_batch in (1, 3, 100):
        parts = gradients_of_each_step(train, monkeypatch, loss=loss, micro_batch=micro_batch)
        for step, expected in zip(parts, whole, strict=True):
            for gradient, all_at_once in zip(step, expected, strict=True):
                torch.testing.assert_close(gradient, all_at_once, rtol=0, atol=1e-10)


def test_the_micro_batch_size_never_changes_metrics(train):
    whole, parts = (metrics(train(dtype="float64", micro_batch=size)) for size in (None, 3))
    for line, expected in zip(parts, whole, strict=True):
        for name in LOGGED:
            assert line[name] == pytest.approx(expected[name], rel=1e-7, abs=1e-10), name


def test_trap_f4_the_reference_is_a_copy_that_stays_as_it_is(finished):
    assert digest(finished.reference) == finished.before != digest(finished.policy)
    assert all(not weight.requires_grad and weight.grad is None for weight in finished.reference.parameters())
    own = {weight.untyped_storage().data_ptr() for weight in finished.policy.parameters()}
    assert not own & {weight.untyped_storage().data_ptr() for weight in finished.reference.parameters()}


def test_evaluating_and_saving_more_often_never_changes_the_weights(train):
    assert equal(weights(train()), weights(train(eval_every=1, save_every=1, eval_problems=3)))


def test_the_learning_rate_rises_over_a_tenth_of_the_steps_and_then_falls(train):
    rates = [line["learning_rate"] for line in metrics(train(steps=20, learning_rate=0.01, eval_every=100))]
    assert rates[:3] == pytest.approx([0.005, 0.0095, 0.009], rel=1e-9) and rates[-1] == pytest.approx(0.0005)


def test_pairs_of_a_file_are_trained_on_and_their_dropped_ones_are_counted(train, tmp_path, seen):
    path = tmp_path / "pairs.jsonl"
    row = {"prompt": " the plot was dull", "chosen": " .", "rejected": " but the acting was superb ."}
    path.write_text("".join(json.dumps(line) + "\n" for line in (row, row | {"rejected": ""}, row)))
    out = train(pairs=str(path), batch=2, steps=1)
    counts = json.loads((out / "summary.json").read_text())["pairs"]
    expected = {"trained_on": 2, "dropped": {"a response is empty": 1}, "held_out": len(seen.pairs[0])}
    assert {name: counts[name] for name in expected} == expected
    (chosen, _, _, _), _ = seen.calls[0]
    assert len(chosen) == 2 and chosen[0].item() == pytest.approx(chosen[1].item())


def test_margins_of_a_file_are_said_to_be_unused(train, tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    row = {"prompt": " the plot was dull", "chosen": " .", "rejected": " dull ."}
    for margin, said in ((0, False), (0.5, True)):
        path.write_text(json.dumps(row | {"margin": margin}))
        train(pairs=str(path), batch=1, steps=1)
        assert ("the pairs' margins are not used" in capsys.readouterr().out) is said


def test_a_resumed_run_goes_on_with_its_own_pairs_whatever_became_of_the_file(train, tmp_path, seen):
    path = tmp_path / "pairs.jsonl"
    row = {"prompt": " the plot was dull", "chosen": " .", "rejected": " dull ."}
    path.write_text(json.dumps(row))
    out = train(pairs=str(path), batch=1, steps=1)
    path.write_text(json.dumps(row | {"chosen": " dull .", "rejected": " ."}))
    resume(train_dpo, out, "--steps", "2")
    path.unlink()
    resume(train_dpo, out, "--steps", "3")
    references = [(chosen.item(), rejected.item()) for (_, _, chosen, rejected), _ in seen.calls]
    assert references[0] == references[1] == references[2] and references[0][0] != references[0][1]
    (out / "pairs.json").write_text("{")
    with pytest.raises(RunError, match=r"pairs\.json is damaged"):
        resume(train_dpo, out, "--steps", "4")


@pytest.mark.parametrize("length_normalized", [False, True])
def test_the_proxy_is_the_reward_that_the_loss_compares(length_normalized, train, monkeypatch):
    """beta log(pi / pi_ref), of the whole response or a token."""
    found = []

    def spy(policy, reference, proxy, *_):
        rollout = Rollout.from_responses([[3]] * 2, [[4, 5, 2], [6, 2]])
        ratios = [by_hand(policy, [3], ids) - by_hand(reference, [3], ids) for ids in ([4, 5, 2], [6, 2])]
        found.append((proxy(rollout).tolist(), ratios))
        return {"gold": 0.0, "gold_low": 0.0, "gold_high": 0.0, "proxy": 0.0, "kl": 0.0, "mean_length": 0.0}

    monkeypatch.setattr(train_dpo, "evaluate_preferred", spy)
    monkeypatch.setattr(report, "describe_evaluation", lambda *_: "")
    train(dtype="float64", length_normalized=length_normalized, learning_rate=0.02)
    proxies, ratios = found[-1]
    lengths = (3, 2) if length_normalized else (1, 1)
    assert proxies == pytest.approx([0.1 * r / n for r, n in zip(ratios, lengths, strict=True)], abs=1e-10)
    assert min(map(abs, ratios)) > 1e-3


def test_the_labeller_of_the_option_is_the_one_who_is_asked(train, monkeypatch):
    asked, prefers = set(), Reviews.prefers

    def spy(self, problem, a, b, key, labeller):
        asked.add(labeller)
        return prefers(self, problem, a, b, key, labeller)

    monkeypatch.setattr(Reviews, "prefers", spy)
    train(labeller="length", steps=1)
    assert asked == {"length"}


# ---- stopping and going on


WHOLE = {"warm_start_steps": 2, "steps": 4, "save_every": 3, "eval_every": 2}
STOPS = {  # what is called there, and the message
    "warm start": (sft, "demonstrations", lambda task, n, key: key.endswith(" 1"), "stopped in the warm start, which"),
    "pairs": (train_dpo, "collect_pairs", lambda *_, **__: True, "saved at step 1 of 4"),
    "steps": (train_dpo, "rows_of_step", lambda step, *_: step == 1, "saved at step 2 of 4"),
}


@pytest.mark.parametrize("where", STOPS)
def test_trap_f1_interrupted_and_resumed_the_run_ends_bit_by_bit_where_it_would_have(where, train, tmp_path):
    place, name, when, message = STOPS[where]
    out = tmp_path / "stopped" / "run"  # beside no warm start of the other
    with ctrl_c(place, name, when), pytest.raises(Interrupted, match=message):
        train_dpo.main(train_dpo.Config(out=str(out), **(TINY | WHOLE)))
    resume(train_dpo, out)
    ends = []
    for run in (out, train(**WHOLE)):
        newest = checkpoint.latest(run / "checkpoint")
        training = torch.load(newest / "training.pt", weights_only=True)
        summary = json.loads((run / "summary.json").read_text())
        for dictionary in (training, summary, training["results"]):
            dictionary.pop("seconds", None)
        assert all(part["state"] for optimizer in training["optimizers"] for part in optimizer["parts"])
        ends.append([newest.name, weights(run), weights(run, "reference"), training, metrics(run), summary])
    assert all(equal(found, expected) for found, expected in zip(*ends, strict=True))


def test_a_bfloat16_run_resumes_bit_by_bit(train):
    chosen = {"dtype": "bfloat16", "steps": 2, "save_every": 1}
    whole, cut = train(**chosen), train(**chosen)
    shutil.rmtree(cut / "checkpoint" / "step_000002")
    resume(train_dpo, cut)
    assert equal(weights(cut), weights(whole))
    assert {value.dtype for value in weights(cut).values()} == {torch.bfloat16}


# ---- options


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs train_dpo.py with the given options in an empty folder; returns exit status, output and errors."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", ["train_dpo.py"])

    def command(arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            command_line(train_dpo.Config, train_dpo.__doc__, train_dpo.main, shlex.split(arguments))
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--loss xyz", "--loss xyz is unknown: choose one of dpo, ipo"),
        ("--loss ipo --label-smoothing 0.1", "--loss ipo knows neither --label-smoothing nor --robust"),
        ("--loss ipo --robust", "--loss ipo knows neither --label-smoothing nor --robust"),
        ("--label-smoothing 0.6", "label_smoothing must be at least 0 and at most 0.5"),
        ("--label-smoothing -0.1", "--label-smoothing must be at least 0"),
        ("--robust --label-smoothing 0.5", "label_smoothing must be at least 0 and below 0.5"),
        ("--robust", "--robust corrects for a share of wrong labels: say which with --label-smoothing"),
        ("--beta 0", "--beta must be at least 1e-06, not 0"),
        ("--beta nan", "--beta must be at least 1e-06, not nan"),
        ("--labeller nobody", "--labeller nobody is unknown: choose one of gold, length"),
        ("--task chain", "--task chain is unknown: choose one of reviews"),
        ("--pairs nofile.jsonl", "nofile.jsonl cannot be read"),
        ("--pairs ../bad.jsonl", "bad.jsonl, line 1: chosen must be a text, got 3"),
        ("--pairs 0", "--pairs must be at least 1, not 0"),
        ("--learning-rate 2", "--learning-rate must be at most 1.0, not 2.0"),
        ("--batch 0", "--batch must be at least 1"),
        ("--micro-batch 0", "--micro-batch must be at least 1"),
        ("--size 0 2 4", "width must be at least 1, not 0"),
        ("--dtype float16", "--dtype float16 is unknown"),
        ("--steps 0", "--steps must be at least 1"),
        ("--learning-rate inf", "--learning-rate must be at least 0, not inf"),
        ("--eval-problems 1", "--eval-problems must be at least 2"),
        ("--resume", "nothing to resume"),
    ],
)
def test_a_bad_option_is_an_error_in_one_line_before_any_work(arguments, message, command, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": " the", "chosen": 3, "rejected": " ."}\n')
    status, output, errors = command(arguments)
    assert status == 1
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1
    assert output == "" and list(Path.cwd().iterdir()) == []


def test_fewer_pairs_than_a_batch_are_a_batch_and_the_run_says_so(train, capsys):
    assert equal(weights(train(pairs="24", batch=200)), weights(train(pairs="24", batch=201)))
    assert "fewer pairs than --batch 200: each step takes all of them" in capsys.readouterr().out


def test_every_option_is_explained_and_there_are_at_most_30():
    (config,) = (n for n in ast.parse(SCRIPT.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Config")
    explained = {
        field.target.id
        for field, below in zip(config.body, config.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and below.value.value
    }
    names = {field.name for field in dataclasses.fields(train_dpo.Config)}
    assert names == explained and len(names) <= 30
