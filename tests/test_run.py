"""What keeps a run alive: stopping and going on, broken updates, bad options.

The runs that are stopped are processes of their own, stopped by real signals. `DRIVER` is train_grpo.py with a reward
that draws from all three global random generators, so that a resume which restores less than everything ends elsewhere.
"""

import ast
import contextlib
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_grpo
from nanorl import checkpoint, report
from nanorl.errors import Interrupted, RunError
from nanorl.options import (
    at_least,
    at_most,
    choose,
    choose_device,
    command_line,
    cpu_threads,
    describe_memory,
    newest_run,
    parse,
    policy_shape,
)
from nanorl.run import Run, plain, write_atomically
from nanorl.tasks.chain import ChainArithmetic

TINY = {
    "size": (16, 1, 2),
    "warm_start_steps": 2,
    "eval_problems": 8,
    "prompts": 2,
    "group_size": 2,
    "device": "cpu",
}
STEPS, SAVE_EVERY = 10, 3


def text_reward(task, problem, response: str) -> float:
    """Any function of the text that differs within most groups: two warm start steps teach nothing of the true one."""
    return zlib.crc32(response.encode()) % 7 / 6


def options(**chosen) -> list[str]:
    given = TINY | {"steps": STEPS, "save_every": SAVE_EVERY, "eval_every": 4} | chosen
    return " ".join(
        f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in given.items()
    ).split()


# ---- processes

DRIVER = """
import json, os, random, runpy, sys, time, zlib
from pathlib import Path

import numpy, torch

from nanorl import sft
from nanorl.sampler import Sampler
from nanorl.tasks.chain import ChainArithmetic


def reward(task, problem, response):
    drawn = random.random() + numpy.random.rand() + torch.rand(()).item()
    return drawn / 10 + zlib.crc32(response.encode()) % 7 / 6


def pause_at(moment):
    if os.environ.get("PAUSE_AT") == moment:
        Path("paused").touch()
        while not Path("go").exists():
            time.sleep(0.005)
    time.sleep(float(os.environ.get("SLOW", 0)))


def generate(sampler, prompts, *, sample_ids=None, **options):
    if sample_ids is None:  # an evaluation
        return sample(sampler, prompts, **options)
    pause_at(f"step {sample_ids[0] // len(sample_ids)}")
    rollout = sample(sampler, prompts, sample_ids=sample_ids, **options)
    with open("sampled.jsonl", "a") as file:
        file.write(json.dumps([sample_ids[0], rollout.tokens.tolist(), rollout.behavior_logprobs.tolist()]) + "\\n")
    return rollout


def demonstrations(task, n, key):
    pause_at(f"warm start {key.split()[-1]}")
    return demonstrate(task, n, key)


sample, Sampler.generate = Sampler.generate, generate
demonstrate, sft.demonstrations = sft.demonstrations, demonstrations
ChainArithmetic.reward = reward
random.seed(1)
numpy.random.seed(2)
runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
"""
SCRIPT = Path(train_grpo.__file__)
DEADLINE = 120  # seconds; far more than anything here needs


class Process:
    """The driver, running in `folder`."""

    def __init__(self, folder: Path, *arguments: str, pause_at: str = "", slow: float = 0):
        self.folder = folder
        driver = folder / "driver.py"
        driver.write_text(DRIVER)
        for name in ("paused", "go"):
            (folder / name).unlink(missing_ok=True)
        environment = os.environ | {"SCRIPT": str(SCRIPT), "PAUSE_AT": pause_at, "SLOW": str(slow)}
        environment |= {"PYTHONPATH": str(SCRIPT.parent), "OMP_NUM_THREADS": "1"}  # one thread: one order of summation
        environment.pop("PYTHONUNBUFFERED", None)  # output must come through without it
        self.log = folder / f"log-{len(list(folder.glob('log-*')))}"
        with open(self.log, "w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, str(driver), *arguments], cwd=folder, env=environment, stdout=log, stderr=log
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_until(self, happened) -> None:
        end = time.monotonic() + DEADLINE
        while not happened():
            assert self.popen.poll() is None, f"ended before its time:\n{self.said}"
            assert time.monotonic() < end, f"waited in vain:\n{self.said}"
            time.sleep(0.005)

    def wait_until_paused(self) -> None:
        self.wait_until((self.folder / "paused").exists)

    def signal_and_go_on(self, number: int) -> None:
        self.wait_until_paused()
        self.popen.send_signal(number)
        self.wait_until(lambda: "stopping after this step" in self.said)
        (self.folder / "go").touch()

    def ended_with(self, status: int) -> None:
        assert self.popen.wait(DEADLINE) == status, self.said

    def command_to_continue(self) -> list[str]:
        """The arguments behind the script in the command that the message names."""
        python, script, *arguments = shlex.split(re.search(r"Continue with: (.*)", self.said)[1])
        assert (python, script) == ("python", str(SCRIPT))
        return arguments


@pytest.fixture
def start(tmp_path):
    """Starts processes in the test's folder and leaves none behind."""
    started = []

    def start(*arguments, **how) -> Process:
        started.append(Process(tmp_path, *arguments, **how))
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()


OUT = "a run"  # with a space: the command to continue must quote it


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder in which ten steps ran in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Process(folder, "--out", OUT, *options()).ended_with(0)
    return folder


def ending(folder: Path) -> dict:
    """All that a run leaves but times: weights, moments, generators, counters, metrics, evaluations, sampled ids."""
    out = folder / OUT
    newest = checkpoint.latest(out / "checkpoint")
    training = torch.load(newest / "training.pt", weights_only=True)
    assert training.pop("seconds")["total"] > 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary.pop("seconds")["total"] > 0
    sampled = {}
    for first, *what in map(json.loads, (folder / "sampled.jsonl").read_text().splitlines()):
        assert sampled.setdefault(first, what) == what, "a step that was taken twice sampled something else"
    return {
        "checkpoint": newest.name,
        "weights": load_file(newest / "policy.safetensors"),
        "training": training,
        "metrics": metrics(out),
        "summary": summary,
        "sampled": sampled,
        "files": sorted(path.name for path in out.iterdir()),
    }


TIMES = ("seconds", "tokens_per_second")


def metrics(out: Path) -> list[dict]:
    """The lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def assert_same(found, expected, where: str = "the run") -> None:
    """Bit by bit, down to the leaves."""
    assert type(found) is type(expected), where
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for key in found:
            assert_same(found[key], expected[key], f"{where}, {key}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}, {i}")
    elif isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected, where


def test_the_undisturbed_run_trains_and_draws_from_every_generator(undisturbed):
    """Else the comparisons below would prove nothing."""
    end = ending(undisturbed)
    first = load_file(next((undisturbed / "warm_starts").glob("*.safetensors")))
    assert all(not torch.equal(value, first[name]) for name, value in end["weights"].items())
    assert [line["step"] for line in end["metrics"]] == list(range(STEPS))
    assert len({line["reward"] for line in end["metrics"]}) == STEPS
    assert all(line["grad_norm"] > 0 for line in end["metrics"])
    assert len({line["learning_rate"] for line in end["metrics"]}) > 2
    assert list(end["sampled"]) == list(range(0, 4 * STEPS, 4))
    parts = end["training"]["optimizers"][0]["parts"]
    moments = [value for part in parts for state in part["state"].values() for value in state]
    assert {"momentum", "exp_avg", "exp_avg_sq"} <= set(moments)
    assert end["checkpoint"] == f"step_{STEPS:06d}"


def test_trap_f1_five_steps_a_stop_and_five_in_a_new_process_are_ten_steps_bit_by_bit(start, tmp_path, undisturbed):
    first = start("--out", OUT, *options(), pause_at="step 4")
    first.wait_until_paused()
    assert "step    4/10" in first.said  # progress reaches a file while the run is going on
    first.signal_and_go_on(signal.SIGINT)  # Ctrl-C
    first.ended_with(130)
    assert "saved at step 5 of 10" in first.said and "Traceback" not in first.said
    assert checkpoint.latest(tmp_path / OUT / "checkpoint").name == "step_000005"
    second = start(*first.command_to_continue())
    second.ended_with(0)
    assert "resumed at step 5" in second.said
    assert_same(ending(tmp_path), ending(undisturbed))
    lines = [(folder / OUT / "samples.txt").read_text() for folder in (tmp_path, undisturbed)]
    assert lines[0] == lines[1]


def test_sigterm_saves_too_and_the_run_goes_on_bit_by_bit(start, tmp_path, undisturbed):
    first = start("--out", OUT, *options(), pause_at="step 1")
    first.signal_and_go_on(signal.SIGTERM)
    first.ended_with(130)
    assert "saved at step 2 of 10" in first.said
    start(*first.command_to_continue()).ended_with(0)
    assert_same(ending(tmp_path), ending(undisturbed))


def test_a_stop_in_the_warm_start_starts_it_again(start, tmp_path, undisturbed):
    first = start("--out", OUT, *options(), pause_at="warm start 1")
    first.signal_and_go_on(signal.SIGINT)
    first.ended_with(130)
    assert "stopped in the warm start, which a resumed run does again" in first.said
    assert not (tmp_path / "warm_starts").exists()
    start(*first.command_to_continue()).ended_with(0)
    assert_same(ending(tmp_path), ending(undisturbed))


def test_a_second_ctrl_c_stops_at_once(start, tmp_path):
    process = start("--out", OUT, *options(), pause_at="step 4")
    process.wait_until_paused()
    process.popen.send_signal(signal.SIGINT)
    process.wait_until(lambda: "stopping after this step (once more: at once)" in process.said)
    process.popen.send_signal(signal.SIGINT)
    # It is still paused, so that only at once can end it. 130, or ended by the signal, which a shell shows as 130.
    assert process.popen.wait(DEADLINE) in (130, -signal.SIGINT)
    assert checkpoint.latest(tmp_path / OUT / "checkpoint").name == "step_000003"


def test_trap_f1_a_run_killed_at_any_moment_ends_bit_by_bit_where_it_would_have(start, tmp_path, undisturbed):
    first = start("--out", OUT, *options(), slow=0.05)
    after, delay = random.SystemRandom().randint(1, 8), random.SystemRandom().uniform(0, 0.1)
    first.wait_until(lambda: f"step {after:4d}/10" in first.said)
    time.sleep(delay)
    first.popen.kill()  # SIGKILL
    first.ended_with(-signal.SIGKILL)
    start("--out", OUT, "--resume").ended_with(0)
    assert_same(ending(tmp_path), ending(undisturbed), f"killed {delay} s after step {after}")


# ---- in this process


@pytest.fixture
def own_reward(monkeypatch):
    monkeypatch.setattr(ChainArithmetic, "reward", text_reward)
    monkeypatch.setattr(report, "draw_curves", lambda out: None)  # drawing takes longer than the run


def train(out: Path, **chosen) -> dict:
    return train_grpo.main(train_grpo.Config(out=str(out), **(TINY | {"steps": 4, "save_every": 2} | chosen)))


def resume(out: Path, *arguments: str) -> dict:
    return train_grpo.main(parse(train_grpo.Config, None, ["--out", str(out), "--resume", *arguments]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of four steps, to be copied before it is touched."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChainArithmetic, "reward", text_reward)
        train(out := tmp_path_factory.mktemp("finished") / "run", eval_every=2)
    return out


@pytest.fixture
def a_run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.latest(out / "checkpoint") / "policy.safetensors")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("at", [2, 4])
def test_trap_f1_a_crash_in_an_evaluation_keeps_the_steps_before_it(at, tmp_path, finished, own_reward, monkeypatch):
    """Both in an evaluation between steps and in the last one."""
    out, evaluate, calls = tmp_path / "run", train_grpo.evaluate, []

    def crash(*arguments, **how):
        calls.append(arguments)
        if len(calls) == 1 + at // 2:  # evaluations come before steps 0, 2 and behind the last one
            raise MemoryError("out of memory")
        return evaluate(*arguments, **how)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(train_grpo, "evaluate", crash)
        train(out, eval_every=2)
    assert checkpoint.latest(out / "checkpoint").name == f"step_{at:06d}"
    resume(out)
    assert_same(weights(out), weights(finished))
    assert_same(metrics(out), metrics(finished))


def test_a_half_written_last_line_of_the_metrics_is_mended(a_run, finished, own_reward):
    shutil.rmtree(a_run / "checkpoint" / "step_000004")  # as if it had been killed after step 3
    lines = (a_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (a_run / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    resume(a_run)
    assert_same(metrics(a_run), metrics(finished))
    assert_same(weights(a_run), weights(finished))


@pytest.mark.parametrize("tail", ["\n", '{"step": 3', '{"step": 3}', "\x00\x00\x00", '{"step": 2, "reward": 0.5}\n'])
def test_whatever_a_kill_left_at_the_end_of_the_metrics_is_dropped(tail, a_run, tmp_path):
    lines = (a_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (a_run / "metrics.jsonl").write_text("".join(lines[:2]) + tail)
    run = Run(parse(train_grpo.Config, None, ["--out", str(a_run), "--resume"]))
    run.keep_lines_before(2)
    assert (a_run / "metrics.jsonl").read_text() == "".join(lines[:2])


def test_half_a_character_at_the_end_of_the_samples_does_not_keep_a_run_from_going_on(a_run, own_reward):
    path = a_run / "samples.txt"
    whole = path.read_bytes()
    path.write_bytes(whole + b"--- after 4 steps\n\xe2\x82")
    run = Run(parse(train_grpo.Config, None, ["--out", str(a_run), "--resume"]))
    run.keep_lines_before(4)
    assert path.read_bytes() == whole


def test_a_finished_run_can_be_resumed_and_evaluates_again(a_run, own_reward):
    before = json.loads((a_run / "summary.json").read_text())
    (a_run / "summary.json").unlink()
    saved = torch.load(a_run / "checkpoint" / "step_000004" / "training.pt", weights_only=True)["seconds"]
    after = resume(a_run)
    for name in ("eval", "total"):
        assert after["seconds"][name] > round(saved[name], 3) > 0  # summed over all processes of the run
    assert {k: v for k, v in after.items() if k != "seconds"} == {k: v for k, v in before.items() if k != "seconds"}


def test_a_resumed_run_may_take_more_steps_and_remembers_it(a_run, own_reward):
    summary = resume(a_run, "--steps", "6")
    assert summary["steps"] == 6
    assert [line["step"] for line in metrics(a_run)] == [0, 1, 2, 3, 4, 5]
    assert checkpoint.latest(a_run / "checkpoint").name == "step_000006"
    # Stopped again, the command that the message names has no --steps.
    assert parse(train_grpo.Config, None, ["--out", str(a_run), "--resume"]).steps == 6
    assert parse(train_grpo.Config, None, ["--out", str(a_run), "--resume"]).size == TINY["size"]


def test_a_resumed_run_cannot_have_fewer_steps_than_it_has_taken(a_run):
    before = contents(a_run)
    with pytest.raises(RunError, match="has done 4 steps already, more than --steps 3"):
        resume(a_run, "--steps", "3")
    assert contents(a_run) == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--prompts", "3"], "--prompts"),
        (["--seed", "1"], "--seed"),
        (["--dtype", "float64"], "--dtype"),
        (["--learning-rate", "0.1"], "--learning-rate"),
        (["--beta", "0.1"], "--beta"),
        (["--group-size", "4"], "--group-size"),
        (["--group-size", "4", "--warm-start-steps", "3", "--steps", "6"], "--group-size, --warm-start-steps"),
    ],
)
def test_a_resumed_run_keeps_its_options_and_the_error_names_those_that_differ(changed, named, a_run):
    before = contents(a_run)
    with pytest.raises(RunError) as error:
        resume(a_run, *changed)
    assert f"keeps its options, but {named} differs" in str(error.value)
    assert contents(a_run) == before


def test_options_given_again_with_the_same_values_are_no_change(a_run):
    given = ["--out", str(a_run), "--resume", "--prompts", "2", "--save-every", "7"]
    config = parse(train_grpo.Config, None, given)
    assert (config.prompts, config.save_every, config.steps) == (2, 7, 4)


# ---- options


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs train_grpo.py with the given options in an empty folder; returns exit status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_grpo.py"])

    def command(arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            command_line(train_grpo.Config, train_grpo.__doc__, train_grpo.main, shlex.split(arguments))
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return command


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--algo grop", "--algo grop is unknown: choose one of grpo"),
        ("--task sudoku", "--task sudoku is unknown: choose one of chain, free_length"),
        ("--dtype float16", "--dtype float16 is unknown: choose one of float32, float64"),
        ("--device warp", "--device warp is unknown: choose one of auto, cpu, cuda"),
        pytest.param("--device cuda", "try --device cpu", marks=no_gpu),
        ("--steps 0", "--steps must be at least 1, not 0"),
        ("--steps -5", "--steps must be at least 1, not -5"),
        ("--seed -1", "--seed must be at least 0"),
        (f"--seed {2**63}", f"--seed must be at most {2**63 - 1}"),
        ("--prompts 0", "--prompts must be at least 1"),
        ("--group-size 1", "--group-size must be at least 2"),
        ("--micro-batch 0", "--micro-batch must be at least 1"),
        ("--max-new-tokens 0", "--max-new-tokens must be at least 1"),
        ("--temperature 0", "--temperature must be at least 0.001, not 0.0"),
        ("--temperature nan", "--temperature must be at least 0.001, not nan"),
        ("--learning-rate -0.1", "--learning-rate must be at least 0"),
        ("--learning-rate inf", "--learning-rate must be at least 0, not inf"),
        ("--beta nan", "--beta must be at least 0, not nan"),
        ("--beta -1", "--beta must be at least 0"),
        ("--clip-low -0.1", "--clip-low must be at least 0.0001, not -0.1"),
        ("--clip-low 1.5", "--clip-low must be at most 1, not 1.5"),
        ("--clip-high inf", "--clip-high must be at least 0.0001, not inf"),
        ("--clip-high=-inf", "--clip-high must be at least 0.0001, not -inf"),
        ("--size 0 2 4", "width must be at least 1"),
        ("--size 96 -1 4", "layers must be at least 1"),
        ("--size 96 2 0", "heads must be at least 1"),
        ("--warm-start-steps -1", "--warm-start-steps must be at least 0"),
        ("--eval-every 0", "--eval-every must be at least 1"),
        ("--eval-problems 0", "--eval-problems must be at least 1"),
        ("--save-every 0", "--save-every must be at least 1"),
        ("--size 50 2 4", "width 50 is not a multiple of 4 heads"),
        ("--size 12 2 4", "head_width must be even for rotary positions, not 3"),
        ("--resume", "nothing to resume"),
        ("--resume --out nowhere", "nothing to resume: nowhere holds no run"),
    ],
)
def test_a_bad_option_is_an_error_in_one_line_before_any_work(arguments, message, command, tmp_path):
    status, output, errors = command(arguments)
    assert status == 1
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1
    assert output == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--algorithm grpo", "--algorithm"),
        ("--stepz 3", "--stepz"),
        ("--steps many", "many"),
        ("--steps 2.5", "2.5"),
        ("--beta much", "much"),
        ("--steps", "--steps"),
        ("extra", "extra"),
    ],
)
def test_an_unknown_flag_or_a_value_of_the_wrong_type_is_named_before_any_work(arguments, named, command, tmp_path):
    status, output, errors = command(arguments)
    assert status == 2
    assert named in errors and output == "" and list(tmp_path.iterdir()) == []


def explained_fields() -> dict[str, str]:
    """field -> the string under it, read from the script's source."""
    (config,) = (n for n in ast.parse(SCRIPT.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Config")
    explained = {}
    for field, below in zip(config.body, [*config.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            explained[field.target.id] = below.value.value
    return explained


def test_help_explains_every_field(command, tmp_path):
    status, output, _ = command("--help")
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", output).split())
    assert status == 0 and list(tmp_path.iterdir()) == []
    explained = explained_fields()
    for field in fields(train_grpo.Config):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert " ".join(explained[field.name].split()) in shown
    first_line = train_grpo.__doc__.splitlines()[0]
    assert first_line in shown


def test_there_are_at_most_30_options():
    assert len(fields(train_grpo.Config)) <= 30


def test_a_policy_can_read_a_prompt_and_the_longest_response_asked_for_or_sensible():
    task = ChainArithmetic()
    shape = policy_shape(task, (16, 1, 2), 5)
    assert (shape.width, shape.layers, shape.heads, shape.vocab_size) == (16, 1, 2, task.tokenizer.vocab_size)
    assert shape.max_context == task.max_prompt_tokens + task.max_new_tokens
    assert policy_shape(task, (16, 1, 2), 500).max_context == task.max_prompt_tokens + 500
    with pytest.raises(RunError, match="width must be at least 1, not 0"):
        policy_shape(task, (0, 1, 2), 5)


def test_the_memory_of_a_model_that_learns_is_four_times_its_weights():
    """A million weights: 4 MB in float32, with gradients and two moments 16; frozen in float64 8."""
    learns, frozen = (torch.nn.Linear(1000, 1000, bias=False) for _ in range(2))
    frozen.double().requires_grad_(False)
    assert describe_memory(policy=learns, reward_model=frozen) == (
        "memory: policy 16.0 MB (4.0 of weights, with gradients and moments), reward model 8.0 MB"
    )


def test_a_model_in_bfloat16_learns_with_masters_gradients_and_moments_in_float32():
    """A million weights: 2 MB, and four times 4 MB beside them."""
    assert describe_memory(policy=torch.nn.Linear(1000, 1000, bias=False).bfloat16()) == (
        "memory: policy 18.0 MB (2.0 of weights, with gradients and moments)"
    )


def test_a_choice_that_exists_is_returned():
    assert choose("algo", "b", {"a": 1, "b": 2}) == 2


@dataclass
class SomeOptions:
    count: int | None = None
    share: float = 0.5


def test_limits_include_their_ends_and_leave_out_what_is_not_given():
    at_least(SomeOptions(), count=1, share=0.5)
    at_most(SomeOptions(), count=1, share=0.5)
    with pytest.raises(RunError, match="--count must be at least 2, not 1"):
        at_least(SomeOptions(count=1), count=2)
    with pytest.raises(RunError, match="--count must be at most 0, not 1"):
        at_most(SomeOptions(count=1), count=0)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")


# ---- the folder


def test_an_out_that_holds_a_run_is_refused_and_untouched(a_run, command):
    before = contents(a_run)
    status, _, errors = command(shlex.join(["--out", str(a_run), *options()]))
    assert status == 1 and f"{a_run} already holds a run: continue it with --resume, or choose another --out" in errors
    assert contents(a_run) == before


def test_an_out_that_cannot_be_made_is_an_error(tmp_path, command):
    (tmp_path / "file").write_text("not a folder")
    status, _, errors = command("--out file/run")
    assert status == 1 and errors.startswith("error: --out file/run cannot be made")


@dataclass
class SmallConfig:
    name: ClassVar[str] = "small"
    out: str | None = None
    seed: int = 0
    steps: int = 3
    save_every: int = 2
    resume: bool = False


def test_runs_started_together_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    together, found, glob = threading.Barrier(8, timeout=60), [], Path.glob

    def look_together(path, pattern):
        seen = list(glob(path, pattern))
        together.wait()  # all have looked before the first makes a folder
        return seen

    monkeypatch.setattr(Path, "glob", look_together)
    threads = [threading.Thread(target=lambda: found.append(Run(SmallConfig()).out)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {str(out) for out in found} == {str(Path("runs") / f"small-{n}") for n in range(1, 9)}
    for out in found:
        assert json.loads((out / "config.json").read_text())["options"]["out"] == str(out)


def test_the_next_free_number_is_behind_the_highest_and_the_newest_run_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("small-2", "small-10", "small-x", "small-11-copy", "other-99"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert newest_run("small") == Path("runs/small-10")
    assert Run(SmallConfig()).out == Path("runs/small-11")
    assert newest_run("small") == Path("runs/small-11")
    assert newest_run("other") == Path("runs/other-99")
    with pytest.raises(RunError, match=r"there is no run runs.absent-N here"):
        newest_run("absent")


def test_resume_without_out_continues_the_newest_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        Run(SmallConfig(seed=5))
    config = parse(SmallConfig, None, ["--resume"])
    assert (Path(config.out), config.seed, config.resume) == (Path("runs/small-2"), 5, True)


def test_the_configuration_records_options_versions_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_small.py", "--seed", "5"])
    run = Run(SmallConfig(out=str(tmp_path / "deep" / "run"), seed=5))
    saved = json.loads((run.out / "config.json").read_text())
    assert saved["options"] == {"out": str(run.out), "seed": 5, "steps": 3, "save_every": 2, "resume": False}
    assert saved["versions"]["torch"] == torch.__version__ and saved["command"] == ["train_small.py", "--seed", "5"]


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"options": []}', '{"options": null}', "\udcff"])
def test_a_damaged_configuration_is_an_error_that_names_it(damaged, tmp_path):
    Run(SmallConfig(out=str(tmp_path)))
    (tmp_path / "config.json").write_bytes(damaged.encode(errors="surrogateescape"))
    with pytest.raises(RunError, match=r"config\.json is damaged"):
        parse(SmallConfig, None, ["--out", str(tmp_path), "--resume"])


def test_json_never_holds_nan_infinity_or_tensors():
    value = {"a": math.nan, "b": {"c": -math.inf, "d": torch.tensor(0.5)}, "e": torch.tensor(math.inf), "f": 1}
    assert plain(value) == {"a": None, "b": {"c": None, "d": 0.5}, "e": None, "f": 1}


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    path.write_text("before")

    def full(self, text):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(Path, "write_text", full)
        write_atomically(path, "after")
    assert path.read_text() == "before"
    write_atomically(path, "after")
    assert path.read_text() == "after"


# ---- signals and messages, without a process


def test_signals_are_handled_inside_a_run_and_given_back_behind_it(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.suppress(ZeroDivisionError), Run(SmallConfig(out=str(tmp_path / "run"))):
        assert signal.getsignal(signal.SIGINT) != before[0] and signal.getsignal(signal.SIGTERM) != before[1]
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_works_outside_the_main_thread(tmp_path):
    said = []

    def run_it():
        with Run(SmallConfig(out=str(tmp_path / "run"))) as run:
            said.append(run.out)

    thread = threading.Thread(target=run_it)
    thread.start()
    thread.join()
    assert said == [tmp_path / "run"]


@pytest.mark.parametrize(
    ("raised", "status", "shown"),
    [(Interrupted("saved"), 130, "saved\n"), (RunError("mend it"), 1, "error: mend it\n")],
)
def test_what_a_user_can_mend_is_a_message_and_anything_else_a_traceback(raised, status, shown, capsys):
    def main(config):
        raise raised

    with pytest.raises(SystemExit) as end:
        command_line(SmallConfig, None, main, [])
    assert (end.value.code, capsys.readouterr().err) == (status, shown)

    def broken(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command_line(SmallConfig, None, broken, [])


def test_seconds_are_counted_by_phase_even_through_an_error(tmp_path, monkeypatch):
    clock = iter([100.0, 101.0, 103.0, 110.0, 115.0, 120.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    run = Run(SmallConfig(out=str(tmp_path / "run")))  # begins at 100
    with run.phase("sample"):  # 101 to 103
        pass
    with contextlib.suppress(ZeroDivisionError), run.phase("sample"):  # 110 to 115
        raise ZeroDivisionError
    assert run.seconds_so_far() == {"sample": 7.0, "total": 20.0}


@pytest.mark.parametrize(("given", "threads"), [(None, 1), ("4", 4), ("4,2", 4), ("", 1), ("0", 1), ("many", 1)])
def test_threads_are_those_of_omp_num_threads_whatever_stands_there(given, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert cpu_threads() == threads


# ---- what others did to the folder


def test_a_second_process_cannot_use_the_folder_of_a_run(tmp_path):
    out = str(tmp_path / "run")
    first = Run(SmallConfig(out=out))
    for again in (SmallConfig(out=out), SmallConfig(out=out, resume=True)):
        with pytest.raises(RunError, match="another process is using"):
            Run(again)
    with first:
        pass
    Run(SmallConfig(out=out, resume=True))


def another_shape(path: Path) -> None:
    save_file({"embedding.weight": torch.zeros(2, 3)}, path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *itertools.product(
            ["policy.safetensors", "training.pt"],
            [
                lambda path: path.write_bytes(b"x" * 50),
                lambda path: path.write_text("hello"),
                lambda path: path.unlink(),
            ],
        ),
        ("policy.safetensors", another_shape),
        ("training.pt", lambda path: torch.save({"report": {}}, path)),
        ("training.pt", lambda path: torch.save([1], path)),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path, name, damage, capsys):
    def end(out, **more):
        train_grpo.main(train_grpo.Config(out=str(out), steps=4, save_every=2, eval_every=9, **TINY, **more))
        weights = load_file(checkpoint.latest(out / "checkpoint") / "policy.safetensors")
        return {name: value.clone() for name, value in weights.items()}  # a file that is mapped must not be written

    out = tmp_path / "run"
    undisturbed = end(out)
    damage(out / "checkpoint" / "step_000004" / name)
    (out / "checkpoint" / "step_000004.bak").mkdir()
    again = end(out, resume=True)
    assert "step_000004 is damaged" in capsys.readouterr().out
    assert all(torch.equal(value, undisturbed[key]) for key, value in again.items())
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


def test_where_no_checkpoint_can_be_read_all_stay_and_a_later_resume_goes_on(tmp_path, monkeypatch):
    """The disk, the memory or a library may be at fault, and be well again the next time."""
    out = tmp_path / "run"
    options = {"out": str(out), "steps": 4, "save_every": 2, "eval_every": 9, **TINY}
    train_grpo.main(train_grpo.Config(**options))
    before = (out / "metrics.jsonl").read_text()

    def broken(*_, **__):
        raise OSError("input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "load_file", broken)
        with pytest.raises(RunError, match=r"no checkpoint in .* could be read"):
            train_grpo.main(train_grpo.Config(**options, resume=True))
    train_grpo.main(train_grpo.Config(**options, resume=True))
    assert (out / "metrics.jsonl").read_text() == before


def test_without_any_checkpoint_a_resumed_run_starts_its_log_anew(tmp_path):
    out = tmp_path / "run"
    for resume in (False, True):
        train_grpo.main(train_grpo.Config(out=str(out), steps=3, eval_every=9, **TINY, resume=resume))
        assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
        shutil.rmtree(out / "checkpoint")
