"""The script as a whole: what it leaves behind, what it logs, and what must not change its result."""

import contextlib
import dataclasses
import inspect
import io
import json
import math
import re
import shutil
import statistics
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from script_runs import digest, equal, lines_of, metrics, resume, weights

import train_grpo
from nanorl import checkpoint, report
from nanorl import reward_model as rewarding
from nanorl.algorithms import ALGORITHMS, Algorithm
from nanorl.errors import RunError
from nanorl.losses import grpo_loss
from nanorl.model import GPT, GPTConfig, frozen_copy, require_separate
from nanorl.optimizers import Optimizers
from nanorl.reward_model import RewardModel
from nanorl.sampler import Sampler
from nanorl.tasks.chain import ChainArithmetic
from nanorl.tasks.reviews import Reviews, gold

TINY = {
    "size": (16, 1, 2),
    "warm_start_steps": 2,
    "eval_problems": 8,
    "prompts": 2,
    "group_size": 4,
    "steps": 3,
    "device": "cpu",
}


def text_reward(task, problem, response: str) -> float:
    """Any function of the text that differs within most groups: two warm start steps teach nothing of the true one."""
    return zlib.crc32(response.encode()) % 7 / 6


@pytest.fixture(autouse=True)
def own_reward_and_no_picture(monkeypatch):
    monkeypatch.setattr(ChainArithmetic, "reward", text_reward)
    monkeypatch.setattr(report, "draw_curves", lambda out: None)  # drawing takes longer than the run


@pytest.fixture
def train(tmp_path):
    """Trains in a folder of its own; returns it."""
    count = iter(range(100))

    def train(**chosen) -> Path:
        out = tmp_path / f"run-{next(count)}"
        train_grpo.main(train_grpo.Config(out=str(out), **(TINY | chosen)))
        return out

    return train


def optimizer_state(out: Path, step: int) -> list[dict]:
    path = out / "checkpoint" / f"step_{step:06d}" / "training.pt"
    return [part["state"] for part in torch.load(path, weights_only=True)["optimizers"][0]["parts"]]


def leaves(value):
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    else:
        yield value


# ---- the run contract


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str, list]:
    """A run with everything on: its folder, what it said, its rollouts with the rewards and advantages they got."""
    out, console, rollouts = tmp_path_factory.mktemp("contract") / "run", io.StringIO(), []
    generate = Sampler.generate

    def keep(self, prompts, **how):
        rollout = generate(self, prompts, **how)
        if "sample_ids" in how:  # not an evaluation
            rollouts.append(rollout)
        return rollout

    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(console):
        patched.setattr(ChainArithmetic, "reward", text_reward)
        patched.setattr(Sampler, "generate", keep)
        train_grpo.main(train_grpo.Config(out=str(out), **(TINY | {"steps": 4, "eval_every": 2, "beta": 0.04})))
    return out, console.getvalue(), rollouts


def test_a_run_leaves_the_files_of_the_contract(finished):
    out, _, _ = finished
    names = {path.name for path in out.iterdir()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "samples.txt",
        "curves.png",
        "checkpoint",
        "summary.json",
        "lock",
        "samples.html",
    }
    config = json.loads((out / "config.json").read_text())
    assert {name: config["options"][name] for name in TINY} == TINY | {"steps": 4, "size": list(TINY["size"])}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    saved = checkpoint.latest(out / "checkpoint")
    models = {f"{name}.{end}" for name in ("policy", "reference") for end in ("safetensors", "json")}
    assert {path.name for path in saved.iterdir()} == models | {"training.pt"}


EVALUATION = {"accuracy", "accuracy_greedy", "mean_length", "truncated_share", "problems", "pass@1", "thinks"}
EVALUATION |= {f"{name}_{end}" for name in ("accuracy", "accuracy_greedy") for end in ("low", "high")}


def test_the_summary_holds_the_evaluations_before_and_after_seconds_and_seed(finished):
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert {"eval_before", "eval_after", "seconds", "seed"} <= summary.keys()
    assert (summary["seed"], summary["steps"]) == (0, 4)
    for name in ("eval_before", "eval_after"):
        assert EVALUATION | {"pass@2", "pass@4"} <= summary[name].keys()
        assert summary[name]["problems"] == 8
    assert summary["eval_before"] == lines_of(finished[0])[0]["eval"]
    seconds = summary["seconds"]
    assert min(seconds[name] for name in ("warm_start", "train", "eval", "total")) > 0
    parts = seconds["warm_start"] + seconds["train"] + seconds["eval"]
    assert parts < seconds["total"]
    assert seconds["sample"] + seconds["reward"] + seconds["update"] <= seconds["train"] + 2e-3  # rounding


def test_trap_c2_the_summary_says_how_training_sampled_its_defaults_filled_in(finished):
    task = ChainArithmetic()
    assert json.loads((finished[0] / "summary.json").read_text())["sampling"] == {
        "samples_per_prompt": 4,
        "max_new_tokens": task.max_new_tokens,
        "stop_ids": [task.tokenizer.eos_id],
        "temperature": 1.0,
    }


EVALUATED = dict.fromkeys(EVALUATION, 0.5)


LOGGED = {  # trap H.3, and what the contract adds
    "step",
    "reward",
    "reward_std",
    "zero_variance_share",
    "length",
    "length_max",
    "length_right",
    "length_wrong",
    "truncated_share",
    "thinks",
    "entropy",
    "mismatch",
    "ratio",
    "kl_old",
    "kl_ref",
    "clip_fraction_low",
    "clip_fraction_high",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "sampling_rounds",
    "skipped_updates",
    "seconds",
}


def test_trap_h3_every_step_logs_what_tells_learning_from_not_learning(finished):
    lines = lines_of(finished[0])
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line.keys() - {"eval"} == LOGGED
        assert ("eval" in line) == (line["step"] % 2 == 0)
        accuracy_thinks = line.get("eval", {}).pop("accuracy_thinks", None)  # none where no response thinks
        assert accuracy_thinks is None or 0 <= accuracy_thinks <= 1
        for value in leaves(line):
            assert type(value) in (int, float) and math.isfinite(value)
        assert {"sample", "reward", "update", "step"} <= line["seconds"].keys()
        assert line["kl_ref"] >= 0 and line["kl_old"] >= 0  # k3 cannot be negative
        assert line["entropy"] > 0 and line["grad_norm"] > 0 and line["tokens_per_second"] > 0
        assert line["ratio"] == pytest.approx(1, abs=1e-5) and line["mismatch"] < 1e-5  # before the update
        assert line["clip_fraction_low"] == line["clip_fraction_high"] == 0
        assert line["skipped_updates"] == 0


def test_what_is_logged_of_rewards_and_lengths_agrees_with_counting(finished):
    out, _, rollouts = finished
    task = ChainArithmetic()
    for line, rollout in zip(lines_of(out), rollouts, strict=True):
        eos = task.tokenizer.eos_id
        rows = [row.tolist() for row in rollout.tokens]
        lengths = [row.index(eos) + 1 if eos in row else task.max_new_tokens for row in rows]
        texts = [task.tokenizer.decode([i for i in row[:n] if i != eos]) for row, n in zip(rows, lengths, strict=True)]
        rewards = [text_reward(task, None, text) for text in texts]
        groups = [rewards[:4], rewards[4:]]
        expected = {
            "reward": statistics.mean(rewards),
            "reward_std": statistics.pstdev(rewards),
            "zero_variance_share": sum(len(set(group)) == 1 for group in groups) / 2,
            "length": statistics.mean(lengths),
            "length_max": max(lengths),
            "truncated_share": sum(eos not in row for row in rows) / 8,
            "thinks": sum(text.startswith("<") for text in texts) / 8,
        }
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        tokens = line["tokens_per_second"] * line["seconds"]["sample"]
        assert tokens == pytest.approx(sum(lengths), rel=1e-3)  # the seconds are rounded
        for group, rows in ((groups[0], slice(0, 4)), (groups[1], slice(4, 8))):
            z_scores = [(r - statistics.mean(group)) / (statistics.stdev(group) + 1e-4) for r in group]
            assert rollout.advantages[rows].tolist() == pytest.approx(z_scores, abs=1e-5)


def test_trap_h3_progress_and_responses_are_on_the_console_and_in_a_plain_file(finished):
    out, console, rollouts = finished
    for step in range(4):
        assert f"step {step + 1:4d}/4  reward " in console
    blocks = (out / "samples.txt").read_text().split("--- after ")[1:]
    assert [block.split()[0] for block in blocks] == ["0", "2"]
    task = ChainArithmetic()
    for block, rollout in zip(blocks, (rollouts[0], rollouts[2]), strict=True):
        lines = block.splitlines()[1:]
        assert len(lines) == 8
        for line, prompt, text in zip(lines, rollout.prompts, rollout.texts(task.tokenizer), strict=True):
            assert line == f"{task.tokenizer.decode(prompt)} {text}   reward {text_reward(task, None, text):g}"
        assert sum(line in console for line in lines) >= 2
    assert "on 8 held-out problems" in console and "pass@4" in console and str(out) in console


def test_the_entropy_that_is_logged_is_that_of_the_policy_that_sampled(train, monkeypatch):
    generate, rollouts = Sampler.generate, []

    def keep(self, prompts, **how):
        rollouts.append(generate(self, prompts, **how))
        return rollouts[-1]

    monkeypatch.setattr(Sampler, "generate", keep)
    out = train(steps=1, dtype="float64", temperature=0.5)
    _, _, rollout, *_ = rollouts  # behind the two of the evaluation
    task = ChainArithmetic()
    policy = GPT(GPTConfig(task.tokenizer.vocab_size, width=16, layers=1, heads=2, max_context=40)).double()
    policy.load_state_dict(weights(out, step=0))
    entropies = []
    with torch.no_grad():
        for prompt, row, n in zip(rollout.prompts, rollout.tokens, rollout.lengths.tolist(), strict=True):
            ids = prompt + row[:n].tolist()
            logits = policy(torch.tensor([ids]))[0] @ policy.head.T / 0.5
            for position in range(len(prompt) - 1, len(ids) - 1):
                p = logits[position].softmax(-1)
                entropies.append(-float((p * p.log()).sum()))
    assert lines_of(out)[0]["entropy"] == pytest.approx(statistics.mean(entropies), rel=1e-9)


# ---- the loss on-policy


def test_trap_h3_the_loss_on_policy_is_zero_while_the_gradient_is_not(train):
    """Advantages of a group sum to zero and every ratio is 1, so the sequence mean is 0: that says nothing about
    learning."""
    for line in lines_of(train()):
        assert abs(line["loss"]) <= 1e-6
        assert line["grad_norm"] > 1e-3 and line["reward_std"] > 0


def test_the_policy_learns_what_is_rewarded(train, monkeypatch):
    """From scratch, without a warm start: answers that begin with a 7."""
    monkeypatch.setattr(ChainArithmetic, "reward", lambda task, problem, response: float(response.startswith("7")))
    lines = lines_of(
        train(steps=30, warm_start_steps=0, max_new_tokens=2, prompts=4, group_size=16, learning_rate=0.01)
    )
    assert statistics.mean(line["reward"] for line in lines[:3]) < 0.2
    assert statistics.mean(line["reward"] for line in lines[-3:]) > 0.8


# ---- what changes the result, and what does not


def test_the_same_seed_gives_the_same_run_and_another_one_another(train):
    first, again, other = train(), train(), train(seed=1)
    assert equal(weights(first), weights(again)) and not equal(weights(first), weights(other))
    timeless = [metrics(out) for out in (first, again, other)]
    assert timeless[0] == timeless[1] != timeless[2]


def test_every_step_samples_with_random_numbers_of_its_own(train, monkeypatch):
    """Weights and problems stay the same here, and the responses still differ."""
    generate, sampled = Sampler.generate, []

    def keep(self, prompts, *, sample_ids=None, **how):
        rollout = generate(self, prompts, sample_ids=sample_ids, **how)
        if sample_ids is not None:  # not an evaluation
            sampled.extend(rollout.texts(ChainArithmetic.tokenizer))
        return rollout

    problems = ChainArithmetic().training_problems(1, "one")
    monkeypatch.setattr(ChainArithmetic, "training_problems", lambda self, n, key: problems * n)
    monkeypatch.setattr(Sampler, "generate", keep)
    train(learning_rate=0, warm_start_steps=0)
    long = [text for text in sampled if len(text) > 5]  # short ones may meet by chance
    assert len(sampled) == 24 and len(long) > 8 and len(set(long)) == len(long)


def test_the_largest_seed_is_a_seed(train):
    train(seed=2**63 - 1, steps=1)


def test_evaluating_and_saving_more_often_never_changes_the_weights(train):
    assert equal(weights(train()), weights(train(eval_every=1, save_every=1, eval_problems=3)))


def test_a_warm_start_from_the_cache_changes_nothing(train):
    first = train()
    assert len(list((first.parent / "warm_starts").iterdir())) == 1
    again = train()
    found = [json.loads((out / "summary.json").read_text())["warm_start_cached"] for out in (first, again)]
    assert found == [False, True] and equal(weights(first), weights(again))


def test_float64_is_the_type_of_weights_moments_and_loss(train):
    out = train(dtype="float64")
    assert {value.dtype for value in weights(out).values()} == {torch.float64}
    moments = [
        m for part in optimizer_state(out, 3) for state in part.values() for n, m in state.items() if n != "step"
    ]
    assert moments and {moment.dtype for moment in moments} == {torch.float64}
    for line in lines_of(out):
        assert abs(line["loss"]) < 1e-12 and line["mismatch"] < 1e-12


def gradients_of_each_step(train, monkeypatch, **chosen) -> list[list[torch.Tensor]]:
    """As they reach the optimizers, the weights being the same at each step: the learning rate is 0."""
    kept = []

    def keep(self, rate=1.0):
        kept.append([weight.grad.clone() for weight in self.weights])

    with monkeypatch.context() as patched:
        patched.setattr(train_grpo, "start_from_demonstrations", lambda *_: None)
        patched.setattr(Optimizers, "step", keep)
        train(dtype="float64", learning_rate=0, eval_every=100, **chosen)
    return kept


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_the_micro_batch_size_never_changes_a_gradient(beta, train, monkeypatch):
    whole = gradients_of_each_step(train, monkeypatch, beta=beta)
    assert len(whole) == 3 and all(gradient.abs().max() > 0 for step in whole for gradient in step)
    for micro_batch in (1, 3):
        parts = gradients_of_each_step(train, monkeypatch, beta=beta, micro_batch=micro_batch)
        for step, expected in zip(parts, whole, strict=True):
            for gradient, all_at_once in zip(step, expected, strict=True):
                assert torch.allclose(gradient, all_at_once, rtol=1e-9, atol=1e-13)


def test_the_micro_batch_size_never_changes_metrics_or_weights(train):
    runs = {size: train(dtype="float64", beta=0.04, steps=2, micro_batch=size) for size in (None, 1, 3)}
    for size in (1, 3):
        for line, expected in zip(lines_of(runs[size]), lines_of(runs[None]), strict=True):
            for name in LOGGED - {"seconds", "tokens_per_second"}:
                assert line[name] == pytest.approx(expected[name], rel=1e-8, abs=1e-12), name
        for name, value in weights(runs[size]).items():
            assert torch.allclose(value, weights(runs[None])[name], rtol=0, atol=1e-9)


def test_the_learning_rate_is_constant_and_then_falls_to_almost_nothing(train):
    rates = [line["learning_rate"] for line in lines_of(train(steps=5, learning_rate=0.01))]
    assert rates == pytest.approx([0.01, 0.01, 0.0075, 0.005, 0.0025])


# ---- the reference


def test_trap_f4_a_policy_cannot_be_its_own_reference():
    policy = GPT(GPTConfig(5, width=8, layers=1, heads=2))
    reference = frozen_copy(policy)
    with pytest.raises(ValueError, match=r"policy and reference share the weight .*frozen_copy"):
        require_separate(policy, policy)
    reference.norm.weight = policy.norm.weight  # one shared weight is enough
    with pytest.raises(ValueError, match=r"share the weight norm\.weight"):
        require_separate(policy, reference)


def test_trap_f4_a_reference_that_could_learn_is_an_error():
    policy = GPT(GPTConfig(5, width=8, layers=1, heads=2))
    reference = frozen_copy(policy)
    reference.head_weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"head_weight is trainable"):
        require_separate(policy, reference)


def test_trap_f4_the_reference_is_a_copy_that_stays_as_it_is(train, monkeypatch):
    seen = {}

    def keep(policy):
        seen.update(policy=policy, reference=frozen_copy(policy), before=digest(policy))
        return seen["reference"]

    monkeypatch.setattr(train_grpo, "frozen_copy", keep)
    out = train(steps=5, beta=0.04)
    policy, reference = seen["policy"], seen["reference"]
    assert digest(reference) == seen["before"] != digest(policy)
    assert not any(weight.requires_grad for weight in reference.parameters())
    assert all(weight.grad is None for weight in reference.parameters())
    storages = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    assert not storages & {weight.untyped_storage().data_ptr() for weight in reference.parameters()}
    (warm_start,) = (out.parent / "warm_starts").iterdir()
    assert equal(weights(out, model="reference"), load_file(warm_start))


def test_trap_f4_the_kl_to_the_reference_is_exactly_0_before_the_first_update_and_positive_after_it(finished):
    first, *rest = [line["kl_ref"] for line in lines_of(finished[0])]
    assert first == 0 and min(rest) > 0


def test_trap_f4_the_reference_survives_a_resume(train, monkeypatch, tmp_path):
    whole = train(steps=4, save_every=2, eval_every=2, beta=0.04)

    evaluate, calls = train_grpo.evaluate, []

    def crash(*arguments, **how):
        calls.append(arguments)
        if len(calls) == 2:  # after step 2 and its checkpoint
            raise MemoryError("out of memory")
        return evaluate(*arguments, **how)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(train_grpo, "evaluate", crash)
        train(steps=4, save_every=2, eval_every=2, beta=0.04)
    out = tmp_path / "run-1"
    assert checkpoint.latest(out / "checkpoint").name == "step_000002"
    resume(train_grpo, out)
    assert equal(weights(out, model="reference"), weights(whole, model="reference"))
    assert equal(weights(out), weights(whole))
    assert [line["kl_ref"] for line in lines_of(out)] == [line["kl_ref"] for line in lines_of(whole)]


def test_without_beta_there_is_no_reference(train, monkeypatch):
    monkeypatch.setattr(train_grpo, "frozen_copy", None)
    out = train()
    assert not (checkpoint.latest(out / "checkpoint") / "reference.safetensors").exists()
    assert "kl_ref" not in lines_of(out)[0]


# ---- updates that are not finite


def spoil(monkeypatch, bad_steps, how) -> None:
    """The loss of the given steps (one micro-batch a step) is spoiled by `how`, which knows the true one."""
    calls = iter(range(1000))

    def loss(logprobs, old_logprobs, advantages, mask, *, denominator=None):
        value, found = grpo_loss(logprobs, old_logprobs, advantages, mask, denominator=denominator)
        return (how(value, logprobs) if next(calls) in bad_steps else value), found

    monkeypatch.setitem(ALGORITHMS, "grpo", Algorithm(loss, advantage_scale="group", mean_over="sequences"))


SPOILED = {
    "loss nan": lambda loss, logprobs: loss * math.nan,
    "loss inf": lambda loss, logprobs: loss + math.inf,
    "gradient nan": lambda loss, logprobs: loss + (0 * (logprobs - logprobs.detach())).sum().sqrt(),  # 0 * inf
    "gradient inf": lambda loss, logprobs: loss + (logprobs - logprobs.detach()).sum().sqrt(),  # slope of sqrt at 0
}


@pytest.mark.parametrize("how", SPOILED)
def test_an_update_that_is_not_finite_never_reaches_weights_or_moments(how, train, monkeypatch):
    spoil(monkeypatch, {2}, SPOILED[how])
    out = train(save_every=1)  # three steps, the last one spoiled
    line = lines_of(out)[2]
    assert line["skipped_updates"] == 1 and (line["loss"] is None or line["grad_norm"] is None)
    if how.startswith("gradient"):
        assert line["loss"] is not None
    assert equal(weights(out, step=3), weights(out, step=2))
    assert equal(optimizer_state(out, 3), optimizer_state(out, 2)) and optimizer_state(out, 3)[0]


def test_after_an_update_was_skipped_the_next_one_is_taken(train, monkeypatch):
    spoil(monkeypatch, {1}, SPOILED["loss nan"])
    out = train(save_every=1)
    assert [line["skipped_updates"] for line in lines_of(out)] == [0, 1, 1]
    assert not equal(weights(out, step=3), weights(out, step=2))
    assert all(value.isfinite().all() for value in weights(out).values())


def test_one_bad_micro_batch_spoils_the_update_and_no_more(train, monkeypatch):
    spoil(monkeypatch, {3}, SPOILED["gradient nan"])  # of the second step's two micro-batches the last one
    out = train(save_every=1, micro_batch=4)
    assert [line["skipped_updates"] for line in lines_of(out)] == [0, 1, 1]
    assert all(value.isfinite().all() for value in weights(out).values())


def test_five_bad_updates_in_a_row_stop_the_run_and_keep_its_last_good_state(train, monkeypatch, tmp_path):
    spoil(monkeypatch, {3, 4, 5, 6, 7}, SPOILED["loss nan"])
    with pytest.raises(RunError, match=r"5 updates in a row had a loss or gradient that is not finite \(loss nan"):
        train(steps=20, save_every=1)
    out = tmp_path / "run-0"
    assert [line["skipped_updates"] for line in lines_of(out)] == [0, 0, 0, 1, 2, 3, 4]
    assert checkpoint.latest(out / "checkpoint").name == "step_000007"
    assert all(value.isfinite().all() for value in weights(out).values())


def test_four_bad_updates_and_a_good_one_go_on(train, monkeypatch):
    spoil(monkeypatch, {0, 1, 2, 3, 5, 6, 7, 8}, SPOILED["gradient inf"])
    out = train(steps=10)
    assert [line["skipped_updates"] for line in lines_of(out)] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]


def test_a_resumed_run_still_counts_the_bad_updates_before_it(train, monkeypatch, tmp_path):
    spoil(monkeypatch, {0, 1, 2, 3, 4}, SPOILED["loss nan"])
    with pytest.raises(RunError):
        train(steps=9, save_every=1)
    spoil(monkeypatch, {0}, SPOILED["loss nan"])
    with pytest.raises(RunError, match="5 updates in a row"):
        resume(train_grpo, tmp_path / "run-0")


def test_the_page_on_metrics_explains_each_logged_number(train):
    page = (Path(train_grpo.__file__).parent / "docs" / "metrics.md").read_text()
    explained = set(re.findall(r"`([\w.@]+)`", page))
    explained |= {f"eval.{name}_{end}" for name in ("accuracy", "accuracy_greedy") for end in ("low", "high")}
    line = lines_of(train(beta=0.04))[0]
    logged = set(line) - {"eval"} | {f"eval.{name}" for name in line["eval"]}
    logged = {re.sub(r"@\d+", "@k", name) for name in logged}
    assert logged <= explained


def test_with_several_epochs_the_ratio_leaves_1_and_clipping_acts(train):
    once, thrice = (lines_of(train(learning_rate=0.02, epochs=epochs)) for epochs in (1, 3))
    assert all(line["ratio"] == pytest.approx(1, abs=1e-5) for line in once)
    assert all(line["clip_fraction_low"] == line["clip_fraction_high"] == 0 for line in once)
    teaching = [line for line in thrice if line["grad_norm"] > 0]
    assert teaching and all(abs(line["ratio"] - 1) > 1e-4 for line in teaching)
    assert any(line["clip_fraction_low"] + line["clip_fraction_high"] > 0 for line in teaching)
    assert all(line["mismatch"] < 1e-5 for line in thrice)  # measured before the first update of a batch


# ---- several updates a rollout


@pytest.fixture
def seen_updates(monkeypatch):
    """Of every call of the loss: rows, old log-probs, log-probs, and the denominator it got."""
    calls = []
    row = train_grpo.ALGORITHMS["grpo"]

    def loss(logprobs, old_logprobs, advantages, mask, *, denominator=None):
        calls.append((len(mask), old_logprobs.clone(), logprobs.detach().clone(), denominator))
        return row.loss(logprobs, old_logprobs, advantages, mask, denominator=denominator)

    monkeypatch.setitem(train_grpo.ALGORITHMS, "grpo", dataclasses.replace(row, loss=loss))
    return calls


def test_updates_per_rollout_are_disjoint_parts_with_the_old_log_probs_of_before_the_first(train, seen_updates):
    out = train(steps=1, prompts=4, updates_per_rollout=4, learning_rate=0.02)
    assert [rows for rows, *_ in seen_updates] == [4, 4, 4, 4]  # a group each
    assert [denominator for *_, denominator in seen_updates] == [4, 4, 4, 4]
    distance = [(new - old).abs().max().item() for _, old, new, _ in seen_updates]
    assert distance[0] == 0 and min(distance[1:]) > 1e-4  # the first update moves the policy away from the others' old
    (line,) = lines_of(out)
    assert line["mismatch"] < 1e-5  # looked at before any update: later it would hold the drift


def test_epochs_use_every_part_again_with_the_same_old_log_probs(train, seen_updates):
    train(steps=1, prompts=2, updates_per_rollout=2, epochs=2, learning_rate=0.02)
    assert len(seen_updates) == 4
    for first, again in ((0, 2), (1, 3)):
        assert torch.equal(seen_updates[first][1], seen_updates[again][1])
        assert (seen_updates[first][2] - seen_updates[again][2]).abs().max() > 1e-4


def test_micro_batches_change_nothing_with_several_updates_a_rollout(train):
    whole, cut = (train(prompts=4, updates_per_rollout=2, micro_batch=size, dtype="float64") for size in (None, 3))
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weight, weights(cut)[name], rtol=0, atol=1e-9)


def test_gspo_takes_four_updates_a_rollout_and_its_ratio_leaves_1(train):
    lines = lines_of(train(algo="gspo", prompts=4, learning_rate=0.02))
    assert all(abs(line["ratio"] - 1) > 1e-6 for line in lines if line["grad_norm"] > 0)


def test_more_updates_than_prompts_are_an_error(train):
    with pytest.raises(RunError, match="--updates-per-rollout must be at most 2, not 3"):
        train(prompts=2, updates_per_rollout=3)


@pytest.mark.parametrize("algo", ["grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "reinforce", "cispo"])
def test_every_algorithm_trains(algo, train):
    out = train(algo=algo, importance_cap=2.0)
    assert all(math.isfinite(line["loss"]) for line in lines_of(out))
    assert not equal(weights(out, step=0), weights(out))


# ---- the rest of DAPO


def rewards_by_prompt(rewards):
    """Of a problem's k-th appearance: those of its group, cyclically."""
    count = {}

    def reward(task, problem, response):
        n = count[problem.prompt] = count.get(problem.prompt, -1) + 1
        return rewards(problem)[n % 4]

    return reward


def test_dynamic_sampling_replaces_groups_of_equal_reward(train, monkeypatch, seen_updates):
    def rewards(problem):  # only problems that begin with an odd digit tell their responses apart
        return [0.0, 1.0, 1.0, 0.0] if int(problem.prompt[0]) % 2 else [1.0] * 4

    monkeypatch.setattr(ChainArithmetic, "reward", rewards_by_prompt(rewards))
    monkeypatch.setattr(train_grpo, "evaluate", lambda *_, **__: EVALUATED)
    monkeypatch.setattr(report, "describe_evaluation", lambda *_: "")
    monkeypatch.setattr(report.viewer, "write_run", lambda *_, **__: "")
    lines = lines_of(train(extras=["dynamic_sampling"], prompts=4, steps=3))
    assert [rows for rows, *_ in seen_updates] == [16] * 3  # four groups of four, all of which teach
    assert max(line["sampling_rounds"] for line in lines) > 1
    assert all(0 < line["zero_variance_share"] < 1 for line in lines)  # of all that was sampled


def test_dynamic_sampling_gives_up_after_its_last_round_and_moves_nothing(train, monkeypatch):
    monkeypatch.setattr(ChainArithmetic, "reward", lambda *_: 1.0)
    out = train(extras=["dynamic_sampling"], steps=1)
    (line,) = lines_of(out)
    assert line["sampling_rounds"] == train_grpo.MAX_ROUNDS and line["grad_norm"] == 0
    assert equal(weights(out, step=0), weights(out))


def test_where_no_group_teaches_the_batch_is_as_large_as_ever(train, monkeypatch, seen_updates):
    monkeypatch.setattr(ChainArithmetic, "reward", lambda *_: 1.0)
    train(extras=["dynamic_sampling"], steps=1)
    assert [rows for rows, *_ in seen_updates] == [TINY["prompts"] * TINY["group_size"]]


def test_every_round_has_problems_and_random_numbers_of_its_own(train, monkeypatch):
    monkeypatch.setattr(ChainArithmetic, "reward", lambda *_: 1.0)
    asked, generate = [], Sampler.generate

    def keep(self, prompts, **how):
        if "sample_ids" in how:
            asked.append((tuple(map(tuple, prompts)), tuple(how["sample_ids"])))
        return generate(self, prompts, **how)

    monkeypatch.setattr(Sampler, "generate", keep)
    train(extras=["dynamic_sampling"], steps=2)
    assert len(asked) == 2 * train_grpo.MAX_ROUNDS == len({prompts for prompts, _ in asked})
    ids = [i for _, ids in asked for i in ids]
    assert len(ids) == len(set(ids))


def test_overlong_filtering_leaves_truncated_responses_out_of_the_loss(train, monkeypatch):
    masks = []
    row = train_grpo.ALGORITHMS["grpo"]

    def loss(logprobs, old_logprobs, advantages, mask, *, denominator=None):
        masks.append((mask.any(1).sum().item(), denominator))
        return row.loss(logprobs, old_logprobs, advantages, mask, denominator=denominator)

    monkeypatch.setitem(train_grpo.ALGORITHMS, "grpo", dataclasses.replace(row, loss=loss))
    (line,) = lines_of(train(extras=["overlong_filtering"], steps=1, prompts=8, max_new_tokens=8))
    assert 0 < line["truncated_share"] < 1
    left = round((1 - line["truncated_share"]) * 32)
    assert masks == [(left, left)]


def test_where_every_response_is_filtered_a_mean_over_tokens_is_null_and_no_weight_moves(train):
    out = train(extras=["overlong_filtering"], steps=1, max_new_tokens=1, prompts=1, group_size=2)
    (line,) = lines_of(out)
    assert line["truncated_share"] == 1
    assert [line[name] for name in ("entropy", "mismatch", "ratio", "kl_old")] == [None] * 4
    assert line["loss"] == line["grad_norm"] == 0 and equal(weights(out), weights(out, step=0))


def test_the_overlong_penalty_enters_the_advantages_and_leaves_the_logged_reward_alone(train, monkeypatch):
    monkeypatch.setattr(ChainArithmetic, "reward", lambda *_: 0.0)
    # With a buffer of one token nothing but a response of the full length is penalised.
    with_it, without = (
        lines_of(train(extras=e, steps=1, max_new_tokens=8))[0] for e in (["overlong_penalty"], ["none"])
    )
    assert 0 < with_it["truncated_share"] < 1 and with_it["reward"] == without["reward"] == 0
    assert with_it["grad_norm"] > 0 == without["grad_norm"]


def test_dynamic_sampling_judges_a_group_by_the_tasks_rewards_and_not_by_lengths(train, monkeypatch):
    monkeypatch.setattr(ChainArithmetic, "reward", lambda *_: 0.0)
    (line,) = lines_of(train(extras=["dynamic_sampling", "overlong_penalty"], steps=1, max_new_tokens=8))
    assert line["sampling_rounds"] == train_grpo.MAX_ROUNDS and line["zero_variance_share"] == 1


def test_an_option_that_the_loss_does_not_have_is_an_error_before_any_work(train, monkeypatch):
    def plain(logprobs, old_logprobs, advantages, mask, *, denominator=None):
        raise AssertionError("not reached")

    algorithm = dataclasses.replace(train_grpo.ALGORITHMS["grpo"], loss=plain)
    monkeypatch.setitem(train_grpo.ALGORITHMS, "plain", algorithm)
    with pytest.raises(RunError, match="plain has no beta"):
        train(algo="plain", beta=0.1)


# ---- bfloat16, and a sampler that differs from the scorer


def test_in_bfloat16_the_first_ratio_is_1_and_the_mismatch_with_the_sampler_is_logged(train):
    out = train(dtype="bfloat16")
    assert {value.dtype for value in weights(out).values()} == {torch.bfloat16}
    for line in lines_of(out):
        assert (
            line["ratio"] == pytest.approx(1, abs=1e-6) and line["kl_old"] == 0
        )  # the scored log-probs are the old ones
        assert 0 < line["mismatch"] < 0.02


def test_a_bfloat16_run_resumes_bit_by_bit_with_its_float32_masters(train):
    chosen = {"dtype": "bfloat16", "steps": 4, "save_every": 2, "learning_rate": 1e-4}  # below what bfloat16 resolves
    whole, cut = train(**chosen), train(**chosen)
    shutil.rmtree(cut / "checkpoint" / "step_000004")
    resume(train_grpo, cut)
    assert equal(weights(cut), weights(whole))
    saved = [torch.load(checkpoint.latest(o / "checkpoint") / "training.pt", weights_only=True) for o in (whole, cut)]
    masters, again = (state["optimizers"][0]["masters"] for state in saved)
    assert masters and equal(masters, again) and {m.dtype for m in masters} == {torch.float32}


def test_importance_weights_scale_each_tokens_advantage_and_the_cap_bounds_them(train, monkeypatch):
    """The sampler is made to report log-probs that are too low by log 3 at every other token."""
    generate, seen = Sampler.generate, []

    def wrong(self, prompts, **how):
        rollout = generate(self, prompts, **how)
        rollout.behavior_logprobs[:, ::2] -= math.log(3)
        return rollout

    def keep(logprobs, old_logprobs, advantages, mask, **options):
        seen.append((logprobs, old_logprobs, advantages, mask))
        return grpo_loss(logprobs, old_logprobs, advantages, mask, **options)

    monkeypatch.setattr(Sampler, "generate", wrong)
    keep.__signature__ = inspect.signature(grpo_loss)
    monkeypatch.setitem(ALGORITHMS, "grpo", dataclasses.replace(ALGORITHMS["grpo"], loss=keep))
    for cap in (None, 5.0, 2.0):
        train(steps=1, importance_cap=cap)
    (_, _, plain, mask), (logprobs, old, wide, _), (_, _, tight, _) = seen
    even = mask & (torch.arange(mask.shape[1]) % 2 == 0)
    for advantages, weight in ((wide, 3.0), (tight, 2.0)):
        expected = plain[:, None] * torch.where(even, weight, 1.0)
        torch.testing.assert_close(advantages[mask], expected[mask], rtol=1e-5, atol=1e-6)
    assert torch.equal(old, logprobs.detach())  # the ratio starts at 1: the weights correct for the sampler, not it


# ---- a learned reward


@pytest.fixture
def learned(tmp_path) -> str:
    """`rm:DIR` of a reward model that knows nothing but tells responses apart."""
    torch.manual_seed(3)
    model = RewardModel(GPTConfig(Reviews.tokenizer.vocab_size, width=16, layers=1, heads=2, max_context=37))
    torch.nn.init.normal_(model.score_weight)
    rewarding.save(tmp_path / "learned", model, {"accuracy": 0.5})
    return f"rm:{tmp_path / 'learned'}"


REVIEWS = {"task": "reviews", "warm_start_steps": 0, "max_new_tokens": 10}


def test_the_reward_is_the_reward_models_and_the_hidden_score_is_only_looked_at(train, learned, monkeypatch, capsys):
    rollouts, generate = [], Sampler.generate

    def keep(self, prompts, **how):
        rollout = generate(self, prompts, **how)
        if "sample_ids" in how:
            rollouts.append(rollout)
        return rollout

    monkeypatch.setattr(Sampler, "generate", keep)
    out = train(**REVIEWS, reward=learned, learning_rate=0.01, eval_every=2)
    said = capsys.readouterr().out
    model, _ = rewarding.load(Path(learned[3:]))
    tokenizer = Reviews.tokenizer
    for line, rollout in zip(lines_of(out), rollouts, strict=True):
        scores = model.outcomes(rollout)
        assert line["reward"] == pytest.approx(scores.mean().item(), rel=1e-5)
        assert torch.equal(rollout.rewards, scores)
        golds = [
            gold(tokenizer.decode(p), text) for p, text in zip(rollout.prompts, rollout.texts(tokenizer), strict=True)
        ]
        assert line["gold"] == pytest.approx(statistics.mean(golds), abs=1e-9)
    blocks = (out / "samples.txt").read_text().split("--- after ")[1:]
    for block, rollout in zip(blocks, (rollouts[0], rollouts[2]), strict=True):
        proxies = [re.search(r"   gold \S+  proxy (\S+)$", line)[1] for line in block.splitlines()[1:]]
        assert [float(proxy) for proxy in proxies] == pytest.approx(rollout.rewards.tolist(), rel=1e-4)
    assert re.search(r"step +1/\d+  proxy \S+  gold ", said) and "reward " not in said + "".join(blocks)
    page = json.loads(re.search(r'id="data">(.*?)</script>', (out / "samples.html").read_text())[1])
    assert {tuple(r["scores"]) for problem in page["problems"] for r in problem["after"]} == {("gold", "proxy")}
    summary = json.loads((out / "summary.json").read_text())
    evaluated = {"gold", "gold_low", "gold_high", "proxy", "kl", "mean_length", "truncated_share", "problems"}
    for name in ("eval_before", "eval_after"):
        assert summary[name].keys() == evaluated and summary[name]["problems"] == 8
    assert summary["eval_before"]["kl"] == 0 != summary["eval_after"]["kl"]
    assert lines_of(out)[0]["kl_ref"] == 0 < lines_of(out)[2]["kl_ref"]  # looked at, though beta is 0
    again, _ = rewarding.load(Path(learned[3:]))
    assert equal(again.state_dict(), model.state_dict())
    assert (checkpoint.latest(out / "checkpoint") / "reference.safetensors").exists()
    page = (Path(train_grpo.__file__).parent / "docs" / "metrics.md").read_text()
    logged = set(lines_of(out)[0]) - {"eval"} | {f"eval.{name}" for name in evaluated - {"gold_low", "gold_high"}}
    assert logged <= set(re.findall(r"`([\w.@]+)`", page))


@pytest.mark.parametrize("algo", ["reinforce", "gspo", "dapo", "cispo"])
def test_every_algorithm_learns_from_a_learned_reward(algo, train, learned):
    out = train(**REVIEWS, reward=learned, algo=algo, steps=1)
    assert not equal(weights(out, step=0), weights(out)) and math.isfinite(lines_of(out)[0]["loss"])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_trap_a3_a_learned_reward_that_is_no_number_is_an_error_that_names_the_response(
    broken, train, learned, monkeypatch
):
    def outcomes(self, rollout, function=RewardModel.outcomes):
        scores = function(self, rollout)
        scores[3] = broken
        return scores

    monkeypatch.setattr(RewardModel, "outcomes", outcomes)
    with pytest.raises(RunError, match=rf"the reward of response 3 in step 0 is {broken}: mend the reward"):
        train(**REVIEWS, reward=learned)


def test_a_run_keeps_a_copy_of_the_reward_model_it_was_given(train, learned):
    chosen = REVIEWS | {"reward": learned, "steps": 4, "save_every": 2}
    whole, cut = train(**chosen), train(**chosen)
    shutil.rmtree(cut / "checkpoint" / "step_000004")
    shutil.rmtree(Path(learned[3:]))  # nobody needs it any more
    resume(train_grpo, cut)
    assert equal(weights(cut), weights(whole))
    shutil.rmtree(cut / "reward_model")
    with pytest.raises(RunError, match="holds no reward model"):
        resume(train_grpo, cut)


def test_a_learned_reward_that_is_being_fooled_is_warned_of(train, learned, monkeypatch):
    warned = []
    monkeypatch.setattr(
        train_grpo, "warn_if_over_optimized", lambda run, step, found: warned.append((step, found["gold"]))
    )
    out = train(**REVIEWS, reward=learned, steps=2, eval_every=1)
    assert [step for step, _ in warned] == [0, 1, 2]
    assert warned[2][1] == json.loads((out / "summary.json").read_text())["eval_after"]["gold"]


def test_a_run_on_a_learned_reward_resumes_bit_by_bit(train, learned):
    chosen = REVIEWS | {"reward": learned, "steps": 4, "save_every": 2}
    whole, cut = train(**chosen), train(**chosen)
    shutil.rmtree(cut / "checkpoint" / "step_000004")
    resume(train_grpo, cut)
    assert equal(weights(cut), weights(whole)) and equal(weights(cut, model="reference"), weights(whole, step=0))


def test_a_single_held_out_response_has_no_interval_and_can_be_drawn(train, learned, monkeypatch):
    from nanorl import plots

    monkeypatch.setattr(report, "draw_curves", plots.draw_curves)
    out = train(**REVIEWS, reward=learned, steps=1, eval_problems=1)
    assert json.loads((out / "summary.json").read_text())["eval_after"]["gold_low"] is None
    assert (out / "curves.png").exists()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"task": "reviews"},
            r"--task reviews has no verifier: give --reward rm:DIR, the folder of a run of train_ppo",
        ),
        ({"task": "reviews", "reward": "xyz"}, r"--reward xyz is unknown: write rm:DIR"),
        ({"task": "reviews", "reward": "rm:nowhere"}, r"nowhere holds no reward model"),
        ({"task": "chain", "reward": "rm:nowhere"}, r"--task chain has a verifier: leave --reward away"),
        ({"task": "reviews", "reward": "LEARNED", "max_new_tokens": 33}, r"reads 37 tokens .* writes 38 of 61"),
    ],
)
def test_a_reward_that_cannot_be_is_an_error_before_any_work(chosen, message, train, learned, tmp_path):
    chosen = {name: learned if value == "LEARNED" else value for name, value in chosen.items()}
    with pytest.raises(RunError, match=message):
        train(**chosen)
    assert [path.name for path in tmp_path.iterdir()] == ["learned"]
