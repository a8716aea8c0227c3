"""Models that several test files share."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from nanorl.model import GPT, GPTConfig, KVCache

# At these sizes a second thread costs more than it brings; here, and in the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def tiny_gpt():
    """Builds a small GPT whose weights are large enough for predictions far from uniform: fresh ones have std 0.02."""

    def build(seed: int = 0, *, dtype: torch.dtype = torch.float32, std: float = 0.2, **config) -> GPT:
        shape = {"vocab_size": 20, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_context": 96} | config
        model = GPT(GPTConfig(**shape)).to(dtype)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            norm = name.endswith("norm.weight")
            nn.init.normal_(weight, mean=float(norm), std=std, generator=generator)
        return model

    return build


class TableModel(nn.Module):
    """Stands in for a GPT where a test needs to know every probability: logits are looked up in a table.

    `table` (rows, V): the row of the last token's position, or with `by_token` of the last token itself, holds the
    logits of the next one.
    """

    def __init__(self, table: Tensor, *, by_token: bool = False, max_context: int = 64):
        super().__init__()
        vocab_size = table.shape[1]
        self.config = GPTConfig(vocab_size, width=2, layers=1, heads=1, max_context=max_context)
        self.table, self.by_token = table, by_token
        self.head = torch.eye(vocab_size, dtype=table.dtype)

    def forward(self, tokens: Tensor, cache: KVCache | None = None, lengths: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        if cache is not None:
            positions = positions + cache.lengths[:, None]
            cache.lengths = cache.lengths + (tokens.shape[1] if lengths is None else lengths)
        return self.table[tokens if self.by_token else positions]


@pytest.fixture
def table_model():
    return TableModel


@pytest.fixture
def scripted_model():
    """Builds a TableModel that says the same in every row: `script[p]` is the token it puts behind position p."""

    def build(script: list[int], vocab_size: int, **options) -> TableModel:
        table = torch.full((len(script), vocab_size), -1e9)  # probability 0 in float32, without infinities
        table[torch.arange(len(script)), torch.tensor(script)] = 0.0
        return TableModel(table, max_context=len(script), **options)

    return build


@pytest.fixture
def lesson_module(monkeypatch):
    """Loads a module of a lesson's folder, or `source` in its place. Lessons name their files alike (checks.py, the
    harness of all): none of them stays behind for the next lesson."""

    def load(folder: Path, name: str, source: str | None = None):
        monkeypatch.syspath_prepend(str(folder))
        for shared in ("checks", "harness"):
            monkeypatch.delitem(sys.modules, shared, raising=False)
        spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        if source is None:
            spec.loader.exec_module(module)
        else:
            exec(compile(source, spec.origin, "exec"), module.__dict__)  # an existing file: Triton looks into it
        for shared in ("checks", "harness"):
            sys.modules.pop(shared, None)
        return module

    return load


@pytest.fixture
def refused(lesson_module):
    """Asserts that a lesson's check of one blank passes the solution, and fails it once `right` in it is `wrong`."""

    def assert_refused(folder: Path, blank: str, right: str, wrong: str) -> None:
        source = (folder / "solution.py").read_text()
        before, start, rest = source.partition(f"def {blank}(")
        body, end, after = rest.partition("\n\n\n")
        assert body.count(right) == 1
        checks = lesson_module(folder, "checks")
        check = getattr(checks, f"check_{blank}")
        check(getattr(lesson_module(folder, "solution"), blank))
        changed = lesson_module(folder, "solution", before + start + body.replace(right, wrong) + end + after)
        with pytest.raises((checks.require.__globals__["Failed"], IndexError)):
            check(getattr(changed, blank))

    return assert_refused


# Triton's interpreter runs kernels on a CPU. Whether it does is decided once a process, when a kernel is defined, so
# the tests marked `interpreted` run in a process of their own and are reported here under their names.


def pytest_configure(config):
    config.addinivalue_line("markers", "interpreted: of Triton kernels, run by Triton's interpreter")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if pyfuncitem.get_closest_marker("interpreted") is None or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    session = pyfuncitem.session
    if not hasattr(session, "interpreted"):
        session.interpreted = run_interpreted(
            [item.nodeid for item in session.items if item.get_closest_marker("interpreted")], session.config.rootpath
        )
    failure = session.interpreted.get((pyfuncitem.path.stem, pyfuncitem.name), "the test did not run")
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def run_interpreted(node_ids: list[str], root: Path) -> dict[tuple[str, str], str]:
    """(file, test) -> "" where it passed, else what it said."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *node_ids]
        done = subprocess.run(
            command, cwd=root, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
        )
        assert report.exists(), done.stdout + done.stderr
        cases = ElementTree.parse(report).iter("testcase")
        return {
            (case.get("classname").split(".")[-1], case.get("name")): "\n".join(
                problem.text or problem.get("message") or "" for problem in case if problem.tag in ("failure", "error")
            )
            for case in cases
        }
