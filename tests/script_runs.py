"""What the tests of the three training scripts share: what a run left, bit by bit, and Ctrl-C at a chosen moment."""

from __future__ import annotations

import contextlib
import json
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanorl import checkpoint
from nanorl.options import parse

TIMES = ("seconds", "tokens_per_second")


def resume(script: ModuleType, out: Path, *arguments: str) -> dict:
    return script.main(parse(script.Config, None, ["--out", str(out), "--resume", *arguments]))


def lines_of(out: Path) -> list[dict]:
    """Of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def metrics(out: Path) -> list[dict]:
    """The lines of metrics.jsonl without times."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines_of(out)]


def weights(out: Path, model: str = "policy", step: int | None = None) -> dict[str, Tensor]:
    """Of a checkpoint, the newest by default."""
    at = checkpoint.latest(out / "checkpoint") if step is None else out / "checkpoint" / f"step_{step:06d}"
    return load_file(at / f"{model}.safetensors")


def equal(a, b) -> bool:
    """Bit by bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else a == b


def digest(model: torch.nn.Module) -> int:
    return zlib.crc32(b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values()))


@contextlib.contextmanager
def ctrl_c(where, name: str, when: Callable[..., bool]) -> Iterator[None]:
    """A real signal just before the call of `where.name` whose arguments fulfil `when`, once."""
    function, sent = getattr(where, name), []

    def call(*given, **keywords):
        if not sent and when(*given, **keywords):
            sent.append(True)
            signal.raise_signal(signal.SIGINT)
        return function(*given, **keywords)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(where, name, call)
        yield
    assert sent
