"""RLHF whole: four models and who of them learns, what is paid for where, stopping and going on, what a run leaves."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from script_runs import ctrl_c, digest, equal, metrics, resume, weights
from torch import Tensor

import train_ppo
from nanorl import checkpoint, report, sft
from nanorl import reward_model as rewarding
from nanorl.errors import Interrupted, RunError
from nanorl.losses import ppo_loss
from nanorl.model import GPTConfig
from nanorl.optimizers import Optimizers
from nanorl.options import command_line, parse
from nanorl.reward_model import RewardModel
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.tasks.reviews import Reviews, gold

SCRIPT = Path(train_ppo.__file__)
TINY = {
    "size": (16, 1, 2),
    "warm_start_steps": 2,
    "prompts": 8,
    "epochs": 2,
    "mini_batches": 2,
    "max_new_tokens": 10,  # so that some responses are cut off
    "steps": 3,
    "save_every": 10,
    "eval_problems": 8,
    "device": "cpu",
}
LEARNED = {"pairs": "30", "reward_model_steps": 3}  # for a run that trains its reward model


def quick(patched: pytest.MonkeyPatch) -> None:
    """Leaves out what takes longer than the run."""
    patched.setattr(train_ppo, "FRESH_PAIRS", 20)
    patched.setattr(report, "draw_curves", lambda out: None)
    patched.setattr(report.viewer, "write_run", lambda *_, **__: "")


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch):
    quick(monkeypatch)


@pytest.fixture
def train(tmp_path, finished):
    """Trains in a folder of its own, on the reward model of the finished run unless told whom to ask; returns it."""
    count = iter(range(100))

    def train(**chosen) -> Path:
        out = tmp_path / f"run-{next(count)}"
        reward = {} if "pairs" in chosen or "labeller" in chosen else {"reward": f"rm:{finished.out}"}
        options = (TINY if reward else LEARNED | TINY) | {"warm_start_steps": 0} | reward | chosen
        train_ppo.main(train_ppo.Config(out=str(out), **options))
        return out

    return train


# ---- looking over the script's shoulder

MODELS = ("policy", "reference", "critic", "reward_model")


def watched(patched: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the script hands to the losses and to GAE from now on, its four models, and their digests at the start."""
    seen = SimpleNamespace(calls=defaultdict(list), rollouts=[], digests={})

    def spy(name, function):
        def call(*given, **keywords):
            result = function(*given, **keywords)
            seen.calls[name].append(([x.detach().clone() for x in given], keywords, result))
            return result

        patched.setattr(train_ppo, name, call)

    for name in ("ppo_loss", "value_loss", "gae"):
        spy(name, getattr(train_ppo, name))

    def copy(policy, function=train_ppo.frozen_copy):
        seen.policy, seen.reference = policy, function(policy)
        return seen.reference

    def critic_from(reward_model, function=rewarding.critic_from):
        seen.reward_model, seen.critic = reward_model, function(reward_model)
        seen.digests.update({name: digest(getattr(seen, name)) for name in MODELS})
        return seen.critic

    def generate(self, prompts, function=Sampler.generate, **how):
        rollout = function(self, prompts, **how)
        if "sample_ids" in how and "samples_per_prompt" not in how:  # neither an evaluation nor pairs
            seen.rollouts.append(rollout)
        return rollout

    patched.setattr(train_ppo, "frozen_copy", copy)
    patched.setattr(rewarding, "critic_from", critic_from)
    patched.setattr(Sampler, "generate", generate)
    return seen


@pytest.fixture
def seen(monkeypatch):
    return watched(monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> SimpleNamespace:
    """A whole run, with its pictures: its folder, what it said, and all that was watched."""
    out, console = tmp_path_factory.mktemp("contract") / "run", io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(console):
        patched.setattr(train_ppo, "FRESH_PAIRS", 20)
        seen = watched(patched)
        options = LEARNED | TINY | {"dtype": "float64", "eval_every": 2, "learning_rate": 0.01}
        train_ppo.main(train_ppo.Config(out=str(out), **options))
    seen.out, seen.console = out, console.getvalue()
    return seen


def cut_off(rollout) -> list[bool]:
    """Rows in which no stop token was seen."""
    eos = Reviews.tokenizer.eos_id
    return [eos not in row[:n].tolist() for row, n in zip(rollout.tokens, rollout.lengths.tolist(), strict=True)]


# ---- the run contract


def test_a_run_leaves_the_files_of_the_contract(finished):
    names = {path.name for path in finished.out.iterdir()}
    files = {"config.json", "metrics.jsonl", "samples.txt", "curves.png", "samples.html", "summary.json", "lock"}
    assert names == files | {"checkpoint", "reward_model", "pairs.json"}
    saved = {path.name for path in checkpoint.latest(finished.out / "checkpoint").iterdir()}
    models = ("policy", "reference", "critic")
    assert saved == {f"{name}.{end}" for name in models for end in ("safetensors", "json")} | {"training.pt"}
    assert (finished.out / "curves.png").read_bytes().startswith(b"\x89PNG")


EVALUATION = {"gold", "gold_low", "gold_high", "proxy", "kl", "mean_length", "truncated_share", "problems"}
LOGGED = {
    "step",
    "proxy",
    "gold",
    "kl",
    "length",
    "truncated_share",
    "entropy",
    "mismatch",
    "explained_variance",
    "clip_fraction_low",
    "clip_fraction_high",
    "ratio",
    "kl_old",
    "kl_ref",
    "value_clip_fraction",
    "policy_loss",
    "value_loss",
    "grad_norm",
    "critic_grad_norm",
    "updates",
    "learning_rate",
    "skipped_updates",
}


def test_the_summary_holds_evaluations_before_and_after_the_best_one_and_the_reward_models_report(finished):
    summary = json.loads((finished.out / "summary.json").read_text())
    for name in ("eval_before", "eval_after"):
        assert summary[name].keys() == EVALUATION and summary[name]["problems"] == 8
    assert summary["eval_before"]["kl"] == 0 != summary["eval_after"]["kl"]
    assert summary["best"].keys() == {"step", "gold", "gold_low", "proxy"}
    report = summary["reward_model"]
    assert {"accuracy", "calibration", "calibration_error", "length_correlation"} <= report.keys()
    assert report["trained_on"] + sum(report["dropped"].values()) == 30
    assert min(summary["seconds"][name] for name in ("warm_start", "reward_model", "train", "eval", "total")) > 0


def test_trap_h3_every_step_logs_what_tells_learning_from_not_learning(finished):
    lines = metrics(finished.out)
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line.keys() - {"eval"} == LOGGED and ("eval" in line) == (line["step"] % 2 == 0)
        assert all(math.isfinite(line[name]) for name in LOGGED)
        assert line["updates"] == 4 and line["grad_norm"] > 0 and line["critic_grad_norm"] > 0
        assert line["mismatch"] < 1e-12


def test_what_is_logged_of_scores_lengths_and_kl_agrees_with_counting(finished):
    for line, rollout in zip(metrics(finished.out), finished.rollouts, strict=True):
        texts, prompts = rollout.texts(Reviews.tokenizer), [Reviews.tokenizer.decode(p) for p in rollout.prompts]
        scores = finished.reward_model.outcomes(rollout).tolist()
        kl = [(rollout.old_logprobs - rollout.ref_logprobs)[row, :n].sum() for row, n in enumerate(rollout.lengths)]
        expected = {
            "gold": sum(map(gold, prompts, texts)) / 8,
            "proxy": sum(scores) / 8,
            "length": rollout.lengths.tolist(),
            "kl": float(sum(kl)) / 8,
            "truncated_share": sum(cut_off(rollout)) / 8,
        }
        expected["length"] = sum(expected["length"]) / 8
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert 0 < sum(cut_off(rollout)) < 8  # else the tests below would prove less


def test_console_and_samples_show_the_course_and_what_each_model_takes(finished):
    console = finished.console
    for line in ("warm start: 2 steps", "reward model: 3 steps", "reward model: accuracy ", "on 8 held-out problems"):
        assert line in console
    weights = sum(w.numel() for w in finished.policy.parameters()) * 8 / 1e6
    assert f"memory: policy {4 * weights:.1f} MB ({weights:.1f} of weights, with gradients and moments)" in console
    assert re.search(r"critic [\d.]+ MB \(.*\), reference [\d.]+ MB, reward model [\d.]+ MB\n", console)
    blocks = (finished.out / "samples.txt").read_text().split("--- after ")[1:]
    assert [block.split()[0] for block in blocks] == ["0", "2"]


def test_samples_on_the_console_in_the_file_and_on_the_page_have_gold_and_proxy_under_their_names(finished):
    """The proxy is the reward model's score: what a response loses by being cut off is no part of it."""
    blocks = (finished.out / "samples.txt").read_text().split("--- after ")[1:]
    for block, step in zip(blocks, (0, 2), strict=True):
        lines, rollout, logged = block.splitlines()[1:], finished.rollouts[step], metrics(finished.out)[step]
        scores = [re.fullmatch(r".*   gold (\S+)  proxy (\S+)", line).groups() for line in lines]
        golds, proxies = ([float(x) for x in column] for column in zip(*scores, strict=True))
        texts = zip(rollout.prompts, rollout.texts(Reviews.tokenizer), strict=True)
        assert golds == [gold(Reviews.tokenizer.decode(prompt), text) for prompt, text in texts]
        assert sum(proxies) / 8 == pytest.approx(logged["proxy"], abs=1e-5) and any(cut_off(rollout))
        assert sum(line in finished.console for line in lines) >= 2
    assert "reward " not in "".join(blocks)
    page = json.loads(re.search(r'id="data">(.*?)</script>', (finished.out / "samples.html").read_text())[1])
    before, after = (
        json.loads((finished.out / "summary.json").read_text())[f"eval_{when}"] for when in ("before", "after")
    )
    for name in ("gold", "proxy"):
        assert f"{name} {before[name]:.3f} → {after[name]:.3f}" in page["result"]
    responses = [(problem, response) for problem in page["problems"] for response in problem["after"]]
    assert len(responses) == 8 * train_ppo.SHOWN_SAMPLES
    tokenizer = Reviews.tokenizer
    prompts, ids = [tokenizer.encode(problem["prompt"]) for problem, _ in responses], [r["ids"] for _, r in responses]
    proxies = finished.reward_model.outcomes(Rollout.from_responses(prompts, ids)).tolist()
    assert [response["scores"]["proxy"] for _, response in responses] == pytest.approx(proxies, rel=1e-4)


def test_the_reward_model_is_found_in_the_runs_folder_and_in_its_own(finished):
    for folder in (finished.out, finished.out / "reward_model"):
        model, report = rewarding.from_option(f"rm:{folder}", finished.policy.config)
        assert digest(model) == digest(finished.reward_model) and report["pairs"] > 0
    pairs_scores = model.gain, model.bias
    assert all(value.isfinite() for value in pairs_scores) and model.gain > 0


def test_the_page_on_metrics_explains_each_logged_number(finished):
    explained = set(re.findall(r"`([\w.@]+)`", (SCRIPT.parent / "docs" / "metrics.md").read_text()))
    summary = json.loads((finished.out / "summary.json").read_text())
    logged = LOGGED | {f"eval.{name}" for name in EVALUATION - {"gold_low", "gold_high"}} | {"over_optimized", "best"}
    logged |= {f"reward_model.{name}" for name in summary["reward_model"]}
    assert logged <= explained, logged - explained


# ---- trap F.4: who learns


def test_trap_f4_no_two_of_the_four_models_share_storage(finished):
    stored = [
        {value.untyped_storage().data_ptr() for value in getattr(finished, name).state_dict().values()}
        for name in MODELS
    ]
    assert len(set().union(*stored)) == sum(map(len, stored))


def test_trap_f4_reference_and_reward_model_stay_as_they_are_and_get_no_gradient(finished):
    after = {name: digest(getattr(finished, name)) for name in MODELS}
    assert {name for name in MODELS if after[name] != finished.digests[name]} == {"policy", "critic"}
    for model in (finished.reference, finished.reward_model):
        assert all(not weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert finished.digests["critic"] == finished.digests["reward_model"]  # where the critic starts
    assert finished.digests["policy"] == finished.digests["reference"]


def test_trap_f4_the_kl_is_exactly_0_before_the_first_update_and_positive_after_it(finished):
    first, *later = finished.rollouts
    assert torch.equal(first.old_logprobs, first.ref_logprobs) and metrics(finished.out)[0]["kl"] == 0
    for rollout in later:
        d = (rollout.ref_logprobs - rollout.old_logprobs)[rollout.mask]
        assert (d.exp() - d - 1).mean() > 0
    assert all(line["kl"] != 0 and line["kl_ref"] > 0 for line in metrics(finished.out)[1:])


# ---- trap A.4: the KL is paid for once


def rewards_by_hand(rollout, scores: Tensor, beta: float, penalty: float) -> Tensor:
    expected = torch.zeros_like(rollout.old_logprobs)
    for row, (n, cut) in enumerate(zip(rollout.lengths.tolist(), cut_off(rollout), strict=True)):
        for t in range(n):
            expected[row, t] = -beta * (rollout.old_logprobs[row, t] - rollout.ref_logprobs[row, t])
        expected[row, n - 1] += scores[row] - penalty * cut
    return expected


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_trap_a4_the_kl_is_in_the_reward_or_in_the_loss_and_never_in_both(kl_in, train, seen):
    train(kl_in=kl_in, beta=0.3, dtype="float64", learning_rate=0.02, missing_eos_penalty=0.7)
    in_reward = 0.3 if kl_in == "reward" else 0.0
    assert {keywords["beta"] for _, keywords, _ in seen.calls["ppo_loss"]} == {0.3 - in_reward}
    assert len(seen.calls["gae"]) == len(seen.rollouts) == 3
    for ((rewards, *_), _, _), rollout in zip(seen.calls["gae"], seen.rollouts, strict=True):
        expected = rewards_by_hand(rollout, seen.reward_model.outcomes(rollout), in_reward, penalty=0.7)
        torch.testing.assert_close(rewards, expected, rtol=0, atol=1e-12)
        assert (rewards[~rollout.mask] == 0).all()
    kl = (seen.rollouts[-1].old_logprobs - seen.rollouts[-1].ref_logprobs).abs()
    assert kl.max() > 1e-3  # else neither way could be told from the other


def test_trap_a4_the_penalty_in_the_loss_is_k3_of_policy_and_reference(train, seen):
    """The policy loss with beta less that without is beta k3, whose gradient is not 0 on average as k1's would be."""
    train(kl_in="loss", beta=0.3, dtype="float64", learning_rate=0.02)
    (logprobs, old, advantages, mask), keywords, _ = seen.calls["ppo_loss"][-1]
    d = (keywords["ref_logprobs"] - logprobs)[mask]
    k3 = (d.exp() - d - 1).sum() / keywords["denominator"]
    with_it, without = (
        ppo_loss(logprobs, old, advantages, mask, **keywords | {"beta": beta})[0] for beta in (0.3, 0.0)
    )
    difference = with_it - without
    assert k3 > 0 and difference.item() == pytest.approx(0.3 * k3.item(), rel=1e-9)


# ---- rewards, advantages, returns


def test_the_score_lands_on_the_last_token_and_the_penalty_falls_on_cut_off_rows_alone(train, seen):
    train(beta=0, missing_eos_penalty=5.0, dtype="float64", steps=1)
    ((rewards, *_), _, _), rollout = seen.calls["gae"][0], seen.rollouts[0]
    scores, cut = seen.reward_model.outcomes(rollout), cut_off(rollout)
    assert 0 < sum(cut) < 8
    for row, n in enumerate(rollout.lengths.tolist()):
        assert rewards[row, n - 1].item() == pytest.approx(scores[row].item() - 5 * cut[row], abs=1e-12)
        assert rewards[row].count_nonzero() == 1


def test_a_score_is_received_once_also_by_a_response_that_was_cut_off(train, seen):
    """The critic starts as the reward model: its value behind the last token is the score over again."""
    train(beta=0, missing_eos_penalty=0.0, lam=1.0, dtype="float64", steps=1)
    (_, keywords, (_, returns)), rollout = seen.calls["gae"][0], seen.rollouts[0]
    assert 0 < sum(cut_off(rollout)) < 8 and (keywords["gamma"], keywords["lam"]) == (1.0, 1.0)
    scores = seen.reward_model.outcomes(rollout)
    for row, n in enumerate(rollout.lengths.tolist()):
        assert returns[row, :n].tolist() == pytest.approx([scores[row].item()] * n, abs=1e-12)


def test_gamma_lam_and_clip_are_those_of_the_options(finished, train, seen):
    assert {(keywords["gamma"], keywords["lam"]) for _, keywords, _ in finished.calls["gae"]} == {(1.0, 0.95)}
    assert {(keywords["clip_low"], keywords["clip_high"]) for _, keywords, _ in finished.calls["ppo_loss"]} == {
        (0.2, 0.2)
    }
    train(gamma=0.9, lam=0.5, clip=0.3, steps=1)
    assert {(keywords["gamma"], keywords["lam"]) for _, keywords, _ in seen.calls["gae"]} == {(0.9, 0.5)}
    assert {(keywords["clip_low"], keywords["clip_high"]) for _, keywords, _ in seen.calls["ppo_loss"]} == {(0.3, 0.3)}


def test_values_are_those_of_the_critic_before_any_update_on_the_batch(finished):
    values = rewarding.critic_from(finished.reward_model).values(finished.rollouts[0])
    ((_, first, *_), _, _), (((_, second, *_)), _, _) = finished.calls["gae"][:2]
    torch.testing.assert_close(first, values.detach(), rtol=0, atol=1e-12)
    again = rewarding.critic_from(finished.reward_model).values(finished.rollouts[1])
    assert (second - again).abs().max() > 1e-3  # by then it has learned


def by_token(rollouts_or_calls, where: int) -> list[float]:
    """All trainable tokens of several calls, in order of size."""
    return sorted(value for given, *_ in rollouts_or_calls for value in given[where][given[3]].tolist())


def test_trap_b1_advantages_are_whitened_over_the_batch_and_returns_are_not(finished):
    for step, rollout in enumerate(finished.rollouts):
        (_, values, mask), _, (advantages, returns) = finished.calls["gae"][step]
        torch.testing.assert_close(returns[mask], (advantages + values)[mask], rtol=0, atol=1e-12)
        of_policy = finished.calls["ppo_loss"][4 * step : 4 * step + 2]  # the first epoch
        of_critic = finished.calls["value_loss"][4 * step : 4 * step + 2]
        given = torch.tensor(by_token(of_policy, 2), dtype=torch.float64)
        assert given.mean().item() == pytest.approx(0, abs=1e-12) and given.std().item() == pytest.approx(1, abs=1e-6)
        raw = advantages[mask]
        expected = ((raw - raw.mean()) / raw.std()).sort().values
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)
        assert by_token(of_critic, 2) == pytest.approx(sorted(returns[mask].tolist()), abs=1e-12)
        assert abs(returns[mask].std().item() - 1) > 1e-3 and torch.equal(rollout.returns, returns)


# ---- updates


def test_every_response_is_in_one_mini_batch_of_each_epoch_with_the_tokens_of_it_as_denominator(finished):
    for name in ("ppo_loss", "value_loss"):
        calls = finished.calls[name]
        assert len(calls) == 3 * 2 * 2
        for step, rollout in enumerate(finished.rollouts):
            for epoch in range(2):
                parts = calls[4 * step + 2 * epoch :][:2]
                assert [len(given[3]) for given, *_ in parts] == [4, 4]
                assert [keywords["denominator"] for _, keywords, _ in parts] == [
                    int(given[3].sum()) for given, *_ in parts
                ]
                old, all_old = (1, rollout.old_logprobs if name == "ppo_loss" else rollout.values)
                assert by_token(parts, old) == sorted(all_old[rollout.mask].tolist())


@pytest.mark.parametrize(("n", "parts"), [(8, 2), (7, 3), (5, 5), (4, 1)])
def test_each_epoch_deals_all_rows_out_in_an_order_of_its_own(n, parts):
    first, second = (train_ppo.shuffled(n, parts, f"0 0 {epoch}") for epoch in range(2))
    for dealt in (first, second):
        assert sorted(row for rows in dealt for row in rows) == list(range(n)) and len(dealt) == parts
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert first != second and first == train_ppo.shuffled(n, parts, "0 0 0")


def test_a_score_that_is_no_number_ends_the_run_in_a_message(train, monkeypatch):
    outcomes = RewardModel.outcomes

    def broken(self, rollout, **keywords):
        return outcomes(self, rollout, **keywords) * (math.nan if len(rollout) == TINY["prompts"] else 1)

    monkeypatch.setattr(RewardModel, "outcomes", broken)
    with pytest.raises(RunError, match="a score in step 0 is not a finite number: the reward model is broken"):
        train(eval_problems=4)


def test_old_log_probs_and_old_values_are_those_of_before_the_first_update(finished):
    ratios = [(given[0] - given[1]).abs().max().item() for given, *_ in finished.calls["ppo_loss"][:4]]
    values = [(given[0] - given[1]).abs().max().item() for given, *_ in finished.calls["value_loss"][:4]]
    for distances in (ratios, values):
        assert distances[0] < 1e-12 and min(distances[1:]) > 1e-4


AT_ONCE = {"epochs": 1, "mini_batches": 1}


def test_a_single_update_scores_the_rollouts_once_and_in_micro_batches_again(train, monkeypatch):
    for micro_batch, expected in ((None, 1), (4, 1 + 2)):
        policies = []
        with monkeypatch.context() as patched:

            def score(model, rollout, function=train_ppo.score, policies=policies):
                policies.append(any(weight.requires_grad for weight in model.parameters()))
                return function(model, rollout)

            patched.setattr(train_ppo, "score", score)
            train(steps=1, micro_batch=micro_batch, **AT_ONCE)
        assert sum(policies) == expected


def gradients_of_each_update(train, monkeypatch, **chosen) -> list[list[Tensor]]:
    """As they reach the optimizers, policy's and critic's in turn, the weights staying as they are."""
    kept = []

    def keep(self, rate=1.0):
        kept.append([weight.grad.clone() for weight in self.weights])

    with monkeypatch.context() as patched:
        patched.setattr(Optimizers, "step", keep)
        train(dtype="float64", steps=1, **chosen)
    return kept


@pytest.mark.parametrize(
    "chosen", [{"kl_in": "reward"}, {"kl_in": "loss"}, AT_ONCE], ids=["in reward", "in loss", "one update"]
)
def test_the_micro_batch_size_never_changes_a_gradient_of_policy_or_critic(chosen, train, monkeypatch):
    whole = gradients_of_each_update(train, monkeypatch, **chosen)
    assert len(whole) == (2 if chosen == AT_ONCE else 2 * 4)
    assert all(gradient.abs().max() > 0 for update in whole for gradient in update)
    for micro_batch in (1, 3):
        parts = gradients_of_each_update(train, monkeypatch, **chosen, micro_batch=micro_batch)
        for update, expected in zip(parts, whole, strict=True):
            for gradient, all_at_once in zip(update, expected, strict=True):
                torch.testing.assert_close(gradient, all_at_once, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chosen", [{}, AT_ONCE], ids=["four updates", "one update"])
def test_the_micro_batch_size_never_changes_metrics(chosen, train):
    whole, parts = (metrics(train(dtype="float64", steps=2, micro_batch=size, **chosen)) for size in (None, 3))
    for line, expected in zip(parts, whole, strict=True):
        for name in LOGGED:
            assert line[name] == pytest.approx(expected[name], rel=1e-7, abs=1e-10), name


def test_the_learning_rate_rises_over_a_tenth_of_the_steps_and_falls_over_the_last_half(train):
    rates = [line["learning_rate"] for line in metrics(train(steps=20, learning_rate=0.01, eval_every=100, prompts=4))]
    assert rates[:3] == pytest.approx([0.005, 0.01, 0.01], rel=1e-9)
    assert rates[9:12] == pytest.approx([0.01, 0.01, 0.009], rel=1e-9) and rates[-1] == pytest.approx(0.001)


def test_target_kl_stops_the_updates_on_a_batch_and_the_next_batch_starts_anew(train, seen):
    lines = metrics(train(target_kl=1e-9, dtype="float64", learning_rate=0.02))
    assert [line["updates"] for line in lines] == [1, 1, 1]
    assert len(seen.calls["ppo_loss"]) == 6  # the second update of each batch was looked at and not taken
    unstopped = metrics(train(target_kl=100, dtype="float64", learning_rate=0.02))
    assert [line["updates"] for line in unstopped] == [4, 4, 4]


def test_an_update_beyond_target_kl_moves_neither_policy_nor_critic(train, monkeypatch):
    once = gradients_of_each_update(train, monkeypatch, epochs=1, mini_batches=1)
    assert len(once) == 2
    stopped = train(target_kl=1e-9, dtype="float64", steps=1, epochs=5, mini_batches=1)
    single = train(dtype="float64", steps=1, epochs=1, mini_batches=1, micro_batch=TINY["prompts"])  # the same sums
    for model in ("policy", "critic"):
        assert equal(weights(stopped, model), weights(single, model))


def test_the_first_update_on_a_batch_is_always_taken_however_it_is_split(train, monkeypatch):
    """The log-probs of a part may differ from those of the whole in their last bits: a KL of 1e-15, above 0."""

    def rounded(model, rollout, score=train_ppo.score):
        logprobs, entropy = score(model, rollout)
        return logprobs + (1e-4 if torch.is_grad_enabled() else 0.0), entropy

    monkeypatch.setattr(train_ppo, "score", rounded)
    assert [line["updates"] for line in metrics(train(target_kl=0.0))] == [1, 1, 1]


@pytest.mark.parametrize(("value_clip", "handed_over"), [(0.0, None), (0.3, 0.3)])
def test_a_value_clip_of_0_is_none(value_clip, handed_over, train, seen):
    train(value_clip=value_clip, steps=1)
    assert {keywords["clip"] for _, keywords, _ in seen.calls["value_loss"]} == {handed_over}
    assert {(k["clip_low"], k["clip_high"]) for _, k, _ in seen.calls["ppo_loss"]} == {(0.2, 0.2)}  # a range of its own


def test_the_policy_learns_to_please_the_reward_model(train):
    """From scratch: the proxy is what is trained on."""
    lines = metrics(train(steps=20, prompts=24, learning_rate=0.02, beta=0.0, missing_eos_penalty=0.0, eval_every=100))
    early, late = (sum(line["proxy"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert late > early + 0.5


def test_evaluating_and_saving_more_often_never_changes_the_weights(train):
    assert equal(weights(train()), weights(train(eval_every=1, save_every=1, eval_problems=3)))


def test_every_step_samples_new_prompts_with_random_numbers_of_its_own(train, monkeypatch):
    asked, generate = [], Sampler.generate

    def keep(self, prompts, **how):
        if "sample_ids" in how:
            asked.append((tuple(map(tuple, prompts)), tuple(how["sample_ids"])))
        return generate(self, prompts, **how)

    monkeypatch.setattr(Sampler, "generate", keep)
    train()
    assert len({prompts for prompts, _ in asked}) == 3
    assert [i for _, ids in asked for i in ids] == list(range(24))


# ---- over-optimization


def watching(*evaluations: tuple[float, float, float]) -> tuple[dict, list[str]]:
    """The warning over evaluations (gold, half its interval, proxy), ten steps from each other."""
    said = []
    run = SimpleNamespace(results={}, say=said.append)
    for number, (score, half, proxy) in enumerate(evaluations):
        now = {"gold": score, "gold_low": score - half, "gold_high": score + half, "proxy": proxy}
        report.warn_if_over_optimized(run, 10 * number, now)
    return run.results, said


def test_over_optimization_is_gold_below_the_best_beyond_both_intervals_while_the_proxy_rose():
    results, said = watching((0.0, 0.25, 0.0), (1.0, 0.25, 1.0), (0.25, 0.25, 2.0))
    assert results["over_optimized"] is True and len(said) == 1
    assert results["best"] == {"step": 10, "gold": 1.0, "gold_low": 0.75, "proxy": 1.0}
    assert "gold 0.25 is below the 1.00 of step 10, while the proxy rose from 1.00 to 2.00" in said[0]


@pytest.mark.parametrize(
    "last",
    [(0.5, 0.25, 2.0), (0.25, 0.5, 2.0), (0.25, 0.25, 1.0), (0.25, 0.25, 0.5), (1.0, 0.25, 2.0), (1.5, 0.1, 2.0)],
    ids=["intervals touch", "its own is wide", "proxy stays", "proxy falls", "gold stays", "gold rises"],
)
def test_anything_less_is_no_over_optimization(last):
    results, said = watching((0.0, 0.25, 0.0), (1.0, 0.25, 1.0), last)
    assert said == [] and "over_optimized" not in results
    assert results["best"]["gold"] == max(1.0, last[0])


def test_the_warning_and_the_best_evaluation_are_in_the_summary(train, monkeypatch, capsys):
    scores = iter([0.0, 3.0, 1.0, -2.0])

    def evaluate(*_):
        score = next(scores)
        found = dict.fromkeys(EVALUATION, 1.0) | {"gold": score, "gold_low": score - 0.5, "gold_high": score + 0.5}
        return found | {"proxy": -abs(score - 3) + 5 if score == 3 else 9 - score, "problems": 8}

    monkeypatch.setattr(train_ppo, "evaluate_preferred", evaluate)
    summary = json.loads((train(eval_every=1) / "summary.json").read_text())
    assert summary["over_optimized"] is True
    assert summary["best"] == {"step": 1, "gold": 3.0, "gold_low": 2.5, "proxy": 5.0}
    said = capsys.readouterr().out
    assert [line.split()[4] for line in said.splitlines() if line.startswith("WARNING: over-opt")] == ["1.00", "-2.00"]


# ---- stopping and going on

WHOLE = LEARNED | TINY | {"steps": 4, "save_every": 3, "eval_every": 2, "prompts": 4, "pairs": "20"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patched:
        quick(patched)
        train_ppo.main(train_ppo.Config(out=str(out), **WHOLE))
    return out


def ending(out: Path) -> dict:
    """All that a run leaves but times: weights, moments, generators, metrics, evaluations, the reward model."""
    newest = checkpoint.latest(out / "checkpoint")
    training = torch.load(newest / "training.pt", weights_only=True)
    training.pop("seconds")
    summary = json.loads((out / "summary.json").read_text())
    for results in (summary, training["results"]):
        results.pop("seconds", None)
        results.pop("warm_start_cached")  # found beside the run by one of them
    return {
        "step": newest.name,
        "weights": {name: load_file(newest / f"{name}.safetensors") for name in ("policy", "critic", "reference")},
        "reward_model": load_file(out / "reward_model" / "reward_model.safetensors"),
        "training": training,
        "metrics": metrics(out),
        "summary": summary,
        "samples": (out / "samples.txt").read_text(),
    }


def assert_same_end(out: Path, other: Path) -> None:
    found, expected = ending(out), ending(other)
    for name in expected:
        assert equal(found[name], expected[name]), name
    both = found["training"]["optimizers"]
    assert len(both) == 2 and all(part["state"] for optimizer in both for part in optimizer["parts"])


STOPS = {  # what is called there, and the message
    "warm start": (sft, "demonstrations", lambda task, n, key: key.endswith(" 1"), "stopped in the warm start, which"),
    "reward model": (rewarding, "rows_of_step", lambda step, *_: step == 1, "stopped in the reward model, which"),
    "steps": (Sampler, "generate", lambda *_, sample_ids=(0,), **__: sample_ids[0] == 4, "saved at step 2 of 4"),
}


@pytest.mark.parametrize("where", STOPS)
def test_trap_f1_interrupted_and_resumed_the_run_ends_bit_by_bit_where_it_would_have(
    where, undisturbed, tmp_path, monkeypatch
):
    out, (place, name, when, message) = tmp_path / "run", STOPS[where]
    with ctrl_c(place, name, when), pytest.raises(Interrupted, match=message):
        train_ppo.main(train_ppo.Config(out=str(out), **WHOLE))
    assert (out / "reward_model").exists() == (where == "steps")
    trained, train_reward_model = [], rewarding.train_reward_model

    def spy(*given, **keywords):
        trained.append(given)
        train_reward_model(*given, **keywords)

    monkeypatch.setattr(rewarding, "train_reward_model", spy)
    if where == "steps":  # pairs are of no use any more
        monkeypatch.setattr(train_ppo, "collect_pairs", None)
    resume(train_ppo, out)
    assert len(trained) == (where != "steps")
    assert_same_end(out, undisturbed)


def test_trap_f1_resumed_in_a_new_process_it_ends_bit_by_bit_where_it_would_have(undisturbed, tmp_path):
    out = tmp_path / "a run"
    with ctrl_c(*STOPS["steps"][:3]), pytest.raises(Interrupted) as stopped:
        train_ppo.main(train_ppo.Config(out=str(out), **WHOLE))
    *_, given, path, flag = shlex.split(str(stopped.value))
    assert (given, path, flag) == ("--out", str(out), "--resume")
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--resume"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 2" in done.stdout and "reward model: 3 steps" not in done.stdout
    assert_same_end(out, undisturbed)


def test_a_run_killed_between_reward_model_and_first_checkpoint_trains_none_again(undisturbed, tmp_path, monkeypatch):
    out = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    shutil.rmtree(out / "checkpoint")
    monkeypatch.setattr(rewarding, "train_reward_model", None)
    shutil.copytree(undisturbed.parent / "warm_starts", tmp_path / "warm_starts")
    resume(train_ppo, out)
    found, expected = ending(out), ending(undisturbed)
    for name in ("weights", "reward_model", "metrics", "summary"):
        assert equal(found[name], expected[name]), name


def test_a_bfloat16_run_resumes_bit_by_bit_with_the_masters_of_policy_and_critic(train):
    chosen = {"dtype": "bfloat16", "steps": 2, "save_every": 1, "learning_rate": 1e-4}  # below what bfloat16 resolves
    whole, cut = train(**chosen), train(**chosen)
    shutil.rmtree(cut / "checkpoint" / "step_000002")
    resume(train_ppo, cut)
    for model in ("policy", "critic"):
        assert equal(weights(cut, model), weights(whole, model))
    states = [torch.load(checkpoint.latest(o / "checkpoint") / "training.pt", weights_only=True) for o in (whole, cut)]
    masters = [[optimizer["masters"] for optimizer in state["optimizers"]] for state in states]
    assert equal(*masters) and len(masters[0]) == 2 and all(masters[0])


# ---- pairs and rewards from elsewhere


def test_pairs_of_a_file_train_the_reward_model_and_their_dropped_ones_are_counted(train, tmp_path, monkeypatch):
    path, handed_over = tmp_path / "pairs.jsonl", []
    row = {"prompt": " the plot was dull", "chosen": " .", "rejected": " but the acting was superb .", "margin": 0.5}
    same = row | {"rejected": " ."}
    path.write_text("".join(json.dumps(line) + "\n" for line in (row, same, row)))
    function = rewarding.train_reward_model

    def spy(model, pairs, **how):
        handed_over.extend(pairs)
        function(model, pairs, **how)

    monkeypatch.setattr(rewarding, "train_reward_model", spy)
    out = train(pairs=str(path), steps=1)
    assert [pair.margin for pair in handed_over] == [0.5, 0.5]
    report = json.loads((out / "summary.json").read_text())["reward_model"]
    assert report["trained_on"] == 2 and report["dropped"] == {"the same response twice": 1}


def test_a_resumed_run_that_has_its_reward_model_needs_the_file_of_pairs_no_more(train, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": " the plot was dull", "chosen": " .", "rejected": " dull"}) + "\n")
    out = train(pairs=str(path), steps=1)
    path.unlink()
    resume(train_ppo, out, "--steps", "2")
    assert len(metrics(out)) == 2


def test_a_run_that_has_lost_the_reward_model_it_learns_from_says_so_and_trains_no_other(train):
    for out in (train(pairs="30", steps=1), train(steps=1)):
        before = metrics(out)
        shutil.rmtree(out / "reward_model")
        with pytest.raises(RunError, match=r"reward_model is gone, and the run learns from it: put it back"):
            resume(train_ppo, out, "--steps", "2")
        assert metrics(out) == before and not (out / "reward_model").exists()


def test_interrupted_in_the_reward_model_it_goes_on_with_the_pairs_it_had(train, tmp_path, monkeypatch):
    path = tmp_path / "pairs.jsonl"
    row = {"prompt": " the plot was dull", "chosen": " .", "rejected": " dull"}
    path.write_text(json.dumps(row) + "\n")
    whole = train(pairs=str(path), steps=1)

    def interrupted(*_, **__):
        raise Interrupted("by Ctrl-C")

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(rewarding, "train_reward_model", interrupted)
        train(pairs=str(path), steps=1)
    cut = tmp_path / "run-1"
    path.write_text(json.dumps(row | {"chosen": row["rejected"], "rejected": row["chosen"]}) + "\n")
    resume(train_ppo, cut)
    assert equal(weights(cut), weights(whole)) and equal(weights(cut, "critic"), weights(whole, "critic"))


def test_a_run_keeps_a_copy_of_the_reward_model_it_was_given(train, finished, tmp_path):
    shutil.copytree(finished.out / "reward_model", tmp_path / "given")
    out = train(reward=f"rm:{tmp_path / 'given'}", steps=1)
    shutil.rmtree(tmp_path / "given")
    resume(train_ppo, out, "--steps", "2")
    assert len(metrics(out)) == 2
    mine, theirs = (load_file(folder / "reward_model" / "reward_model.safetensors") for folder in (out, finished.out))
    assert equal(mine, theirs)


def test_a_fresh_run_never_takes_up_a_reward_model_that_lies_in_its_folder(train, finished, tmp_path):
    shutil.copytree(finished.out / "reward_model", tmp_path / "run-0" / "reward_model")
    with pytest.raises(RunError, match=r"already holds a reward model: choose another --out, or give --reward rm:"):
        train(pairs="30", steps=1)


def test_the_reward_model_is_examined_and_normalized_on_pairs_about_prompts_that_none_is_trained_on(train, monkeypatch):
    held_out = {tuple(Reviews.tokenizer.encode_prompt(prompt)) for prompt in Reviews().prompts[True]}
    seen = {}

    def spy(name, owner):
        function = getattr(owner, name)

        def call(model, pairs, *given, **keywords):
            seen[name] = {tuple(pair.prompt) in held_out for pair in pairs}
            return function(model, pairs, *given, **keywords)

        monkeypatch.setattr(owner, name, call)

    spy("train_reward_model", rewarding)
    spy("examine", rewarding)
    spy("normalize_on", RewardModel)
    train(pairs="30", steps=1)
    assert seen == {"train_reward_model": {False}, "examine": {True}, "normalize_on": {True}}


def test_the_labeller_of_the_option_is_the_one_who_is_asked(train, monkeypatch):
    asked, prefers = set(), Reviews.prefers

    def spy(self, problem, a, b, key, labeller):
        asked.add(labeller)
        return prefers(self, problem, a, b, key, labeller)

    monkeypatch.setattr(Reviews, "prefers", spy)
    train(labeller="length", steps=1)
    assert asked == {"length"}


def test_with_a_reward_model_given_none_is_trained_and_no_pair_is_asked_for(train, monkeypatch, finished):
    monkeypatch.setattr(train_ppo, "collect_pairs", None)
    out = train(steps=1)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reward_model"] == json.loads((finished.out / "summary.json").read_text())["reward_model"]


def test_a_single_pair_is_enough_to_run_and_none_is_an_error_that_says_so(train, monkeypatch):
    collect_pairs, said = train_ppo.collect_pairs, []

    def collect(policy, task, n, **how):
        monkeypatch.setattr(Reviews, "prefers", (lambda *_: said[0]) if n == 1 else Reviews.prefers)
        return collect_pairs(policy, task, n, **how)

    monkeypatch.setattr(train_ppo, "collect_pairs", collect)
    said[:] = [True]
    out = train(pairs="1", steps=1)
    assert json.loads((out / "summary.json").read_text())["reward_model"]["trained_on"] == 1
    said[:] = [None]
    with pytest.raises(RunError, match=r"of 1 pairs none can be learned from \(dropped: 1 \(equally good\)\)"):
        train(pairs="1", steps=1)


# ---- options


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs train_ppo.py with the given options in an empty folder; returns exit status, output and errors."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", ["train_ppo.py"])

    def command(arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            command_line(train_ppo.Config, train_ppo.__doc__, train_ppo.main, shlex.split(arguments))
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--reward xyz", "--reward xyz is unknown: write rm:DIR"),
        ("--reward rm:x --pairs 9 --labeller length", "--pairs, --labeller would do nothing beside --reward: leave"),
        ("--reward rm:nowhere", "nowhere holds no reward model: give the folder of a run of train_ppo.py"),
        ("--reward rm:../other", "of a vocabulary of 5, the policy writes 37 of 61: train another"),
        ("--kl-in both", "--kl-in both is unknown: choose one of reward, loss"),
        ("--labeller nobody", "--labeller nobody is unknown: choose one of gold, length"),
        ("--task chain", "--task chain is unknown: choose one of reviews"),
        ("--pairs nofile.jsonl", "nofile.jsonl cannot be read"),
        ("--pairs ../empty.jsonl", "empty.jsonl holds no usable pair"),
        ("--pairs ../bad.jsonl", "bad.jsonl, line 2: not JSON"),
        ("--pairs 0", "--pairs must be at least 1, not 0"),
        ("--pairs -3", "cannot be read"),
        ("--size 0 2 4", "width must be at least 1, not 0"),
        ("--size 96 2 0", "heads must be at least 1, not 0"),
        ("--dtype float16", "--dtype float16 is unknown"),
        ("--device warp", "--device warp is unknown"),
        ("--steps 0", "--steps must be at least 1"),
        ("--prompts 0", "--prompts must be at least 1"),
        ("--epochs 0", "--epochs must be at least 1"),
        ("--mini-batches 5 --prompts 4", "--mini-batches must be at most 4, not 5"),
        ("--micro-batch 0", "--micro-batch must be at least 1"),
        ("--reward-model-steps 0", "--reward-model-steps must be at least 1"),
        ("--beta nan", "--beta must be at least 0, not nan"),
        ("--gamma 1.1", "--gamma must be at most 1, not 1.1"),
        ("--lam -0.1", "--lam must be at least 0, not -0.1"),
        ("--clip 0", "--clip must be at least 0.0001, not 0"),
        ("--beta 1e300", "--beta must be at most 1000000.0"),
        ("--clip 2", "--clip must be at most 1, not 2"),
        ("--value-clip -1", "--value-clip must be at least 0"),
        ("--target-kl nan", "--target-kl must be at least 0, not nan"),
        ("--missing-eos-penalty -1", "--missing-eos-penalty must be at least 0"),
        ("--max-new-tokens 0", "--max-new-tokens must be at least 1"),
        ("--eval-problems 1", "--eval-problems must be at least 2"),
        ("--seed -1", "--seed must be at least 0"),
        ("--resume", "nothing to resume"),
    ],
)
def test_a_bad_option_is_an_error_in_one_line_before_any_work(arguments, message, command, tmp_path):
    rewarding.save(tmp_path / "other", RewardModel(GPTConfig(5, width=8, layers=1, heads=2, max_context=64)), {})
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text("\nno\n")
    status, output, errors = command(arguments)
    assert status == 1
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1
    assert output == "" and list(Path.cwd().iterdir()) == []


def test_a_resumed_run_keeps_its_options(undisturbed):
    for changed in (["--pairs", "40"], ["--kl-in", "loss"], ["--labeller", "length"], ["--beta", "1"]):
        with pytest.raises(RunError, match=f"keeps its options, but {changed[0]} differs"):
            parse(train_ppo.Config, None, ["--out", str(undisturbed), "--resume", *changed])


def test_every_option_is_explained_and_there_are_at_most_30():
    (config,) = (n for n in ast.parse(SCRIPT.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Config")
    explained = {
        field.target.id
        for field, below in zip(config.body, config.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and below.value.value
    }
    names = {field.name for field in dataclasses.fields(train_ppo.Config)}
    assert names == explained and len(names) <= 30
