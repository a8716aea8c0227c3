"""Training runs side by side, each a process of its own: no more than the machine has cores, and all of them end when
this one is interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanorl import checkpoint
from nanorl.errors import RunError

SCRIPT = Path(__file__).resolve().parents[1] / "train_grpo.py"
PATIENCE = 60.0  # seconds an interrupted run gets to finish its step and save
LOOK = 0.05  # seconds between looks at what is running
CONSOLE = "console.txt"  # in the run's folder: what it said


@dataclass(frozen=True)
class Job:
    """One run of a training script."""

    label: str
    seed: int
    out: Path
    arguments: tuple[str, ...]
    script: Path = SCRIPT

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.out / "summary.json").exists()

    @property
    def begun(self) -> bool:
        return (self.out / "config.json").exists()

    @property
    def warm(self) -> bool:
        """Whether its warm start is over, and kept for the others of its seed."""
        return checkpoint.latest(self.out / "checkpoint") is not None

    def start(self) -> subprocess.Popen:
        options = ["--resume"] if self.begun else [*self.arguments, "--seed", str(self.seed)]
        self.out.mkdir(parents=True, exist_ok=True)
        with open(self.out / CONSOLE, "a") as console:
            return subprocess.Popen(
                [sys.executable, str(self.script), *options, "--out", str(self.out)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C comes here alone, and `stop` passes it on
            )


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(jobs: Sequence[Job], at_once: int, say: Callable[[str], None]) -> None:
    """Run what is not finished, `at_once` at a time, in the order given. Raises RunError when one fails."""
    waiting = [job for job in jobs if not job.finished]
    if len(waiting) < len(jobs):
        say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are there already")
    running: dict[Job, subprocess.Popen] = {}
    with terminated_like_interrupted():
        try:
            while waiting or running:
                for job in list(waiting):
                    # Runs of one seed share a warm start: the first one makes it, the others wait for it.
                    alone = all(other.warm for other in running if other.seed == job.seed)
                    if len(running) < at_once and alone:
                        say(f"{'goes on' if job.begun else 'starts'}: {job}")
                        running[job] = job.start()
                        waiting.remove(job)
                time.sleep(LOOK)
                for job in [job for job, process in running.items() if process.poll() is not None]:
                    status = running.pop(job).returncode
                    if status or not job.finished:
                        raise RunError(f"{job} failed with status {status}; {job.out / CONSOLE} ends with\n{tail(job)}")
                    done = len(jobs) - len(waiting) - len(running)
                    say(f"done:   {job} ({done} of {len(jobs)})")
        finally:
            stop(running.values())


def stop(processes: Sequence[subprocess.Popen]) -> None:
    """End them: each may finish its step and save; interrupted once more, or out of patience, they are killed."""
    try:
        for process in processes:
            process.terminate()
        end = time.monotonic() + PATIENCE
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()  # nothing happens to one that has ended
            process.wait()


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Inside, SIGTERM is Ctrl-C, so that a batch system's time limit leaves no process behind either."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tail(job: Job, lines: int = 12) -> str:
    with contextlib.suppress(OSError):
        text = (job.out / CONSOLE).read_text(errors="replace").strip().splitlines()
        return "\n".join("    " + line for line in text[-lines:])
    return ""
