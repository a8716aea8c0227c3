"""Runs side by side: no more at a time than asked for, warm starts made once, and nothing left behind."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from nanorl import processes
from nanorl.errors import RunError
from nanorl.processes import CONSOLE, Job, run_all

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

out = Path(sys.argv[sys.argv.index("--out") + 1])
resumed = "--resume" in sys.argv

def event(what):
    with open(out.parent / "events", "a") as events:  # appended whole
        events.write(f"{what} {out.name}\\n")

def stop(number, frame):
    (out / "saved").touch()
    event("saved")
    sys.exit(130)

signal.signal(signal.SIGTERM, stop)
event("resumed" if resumed else "started")
print("told:", *sys.argv[1:], os.environ["OMP_NUM_THREADS"])
(out / "config.json").touch()
if "--fail" in sys.argv:
    sys.exit("what went wrong")
time.sleep(WARM_START)
(out / "checkpoint" / "step_000000").mkdir(parents=True, exist_ok=True)
event("warm")
time.sleep(0 if resumed or "--long" not in sys.argv else 60)
time.sleep(0.1)
(out / "summary.json").touch()
event("ended")
"""


@pytest.fixture
def jobs(tmp_path):
    """Builds jobs of a script that notes what it does, and learns nothing."""

    def build(*names: str, arguments: tuple[str, ...] = (), warm_start: float = 0.1) -> list[Job]:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.replace("WARM_START", str(warm_start)))
        return [Job(name[0], int(name[1:]), tmp_path / name, arguments, script) for name in names]

    return build


def events(folder: Path) -> list[tuple[str, str]]:
    return [tuple(line.split()) for line in (folder / "events").read_text().splitlines()]


def most_at_once(found: list[tuple[str, str]]) -> int:
    running, most = 0, 0
    for what, _ in found:
        running += {"started": 1, "ended": -1}.get(what, 0)
        most = max(most, running)
    return most


def alive(folder: Path) -> list[str]:
    """Processes that were told this folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text())
        except OSError:
            continue
    return [line for line in lines if str(folder) in line]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_every_job_runs_once_and_no_more_than_asked_for_at_a_time(at_once, jobs, tmp_path):
    said = []
    run_all(jobs("a0", "a1", "a2", "b3", "b4"), at_once, said.append)
    found = events(tmp_path)
    assert sorted(name for what, name in found if what == "ended") == ["a0", "a1", "a2", "b3", "b4"]
    assert most_at_once(found) <= at_once
    assert [line.startswith("starts") for line in said[: at_once + 1]] == [True] * at_once + [False]
    assert said[0] == "starts: a, seed 0" and sum(line.endswith("(5 of 5)") for line in said) == 1


def test_a_run_is_told_its_options_its_seed_its_folder_and_to_use_one_thread(jobs, tmp_path):
    run_all(jobs("a3", arguments=("--algo", "grpo")), 1, print)
    assert (tmp_path / "a3" / CONSOLE).read_text() == f"told: --algo grpo --seed 3 --out {tmp_path / 'a3'} 1\n"


def test_runs_of_one_seed_wait_until_its_warm_start_is_made(jobs, tmp_path):
    run_all(jobs("a0", "b0", "c1", warm_start=0.4), 3, print)
    found = events(tmp_path)
    assert found.index(("started", "b0")) > found.index(("warm", "a0"))
    assert found.index(("started", "c1")) < found.index(("warm", "a0"))  # another seed does not wait


def test_what_is_finished_is_not_run_again_and_what_was_begun_goes_on(jobs, tmp_path):
    finished, begun, new = jobs("a0", "a1", "a2")
    for job, name in ((finished, "summary.json"), (begun, "config.json")):
        job.out.mkdir()
        (job.out / name).touch()
    said = []
    run_all([finished, begun, new], 1, said.append)
    assert [event for event in events(tmp_path) if event[0] in ("started", "resumed")] == [
        ("resumed", "a1"),
        ("started", "a2"),
    ]
    assert said[:2] == ["1 of 3 runs are there already", "goes on: a, seed 1"]
    assert (begun.out / CONSOLE).read_text() == f"told: --resume --out {begun.out} 1\n"


def test_a_run_that_fails_ends_the_others_and_its_last_words_are_shown(jobs, tmp_path):
    (long,), (bad,) = jobs("a0", arguments=("--long",)), jobs("b1", arguments=("--fail",))
    with pytest.raises(
        RunError, match=r"b, seed 1 failed with status 1; .*console\.txt ends with(.|\n)*what went wrong"
    ):
        run_all([long, bad], 2, print)
    assert not alive(tmp_path)
    assert not long.finished


def test_a_run_that_ends_well_without_a_result_is_a_failure(jobs, tmp_path):
    (job,) = jobs("a0")
    job.script.write_text("")
    with pytest.raises(RunError, match="a, seed 0 failed with status 0"):
        run_all([job], 1, print)


@pytest.fixture
def heeds_sigint():
    """As at a terminal: a process that a shell has started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_interrupted_the_runs_save_and_end_and_go_on_later(number, jobs, tmp_path, heeds_sigint):
    first, second, waiting = jobs("a0", "a1", "a2", arguments=("--long",))

    def interrupt():
        while not (first.warm and second.warm):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    handler = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_all([first, second, waiting], 2, print)
    assert (first.out / "saved").exists() and (second.out / "saved").exists() and not waiting.out.exists()
    assert not alive(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == handler
    run_all([first, second], 2, print)
    assert first.finished and second.finished
    assert [what for what, name in events(tmp_path) if name == "a0"] == [
        "started",
        "warm",
        "saved",
        "resumed",
        "warm",
        "ended",
    ]


def test_a_run_that_does_not_stop_in_time_is_killed(jobs, tmp_path, monkeypatch):
    (job,) = jobs("a0", arguments=("--long",))
    job.script.write_text(job.script.read_text().replace("sys.exit(130)", "pass"))
    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    process = job.start()
    while not job.warm:
        time.sleep(0.02)
    processes.stop([process])
    assert process.returncode == -signal.SIGKILL and (job.out / "saved").exists()
