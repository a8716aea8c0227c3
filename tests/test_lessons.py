"""The lessons hold what they promise: all files there, code that has not drifted, exercises that check themselves."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from nanorl.advantages import group_advantages
from nanorl.losses import grpo_loss

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted(path for path in (ROOT / "lessons").iterdir() if re.match(r"\d\d_", path.name))
PAGES = [ROOT / "lessons" / "README.md", *(lesson / "README.md" for lesson in LESSONS)]
REINFORCE, GRPO = ROOT / "lessons" / "00_rl_loop", ROOT / "lessons" / "06_grpo"

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.name)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.parent.name)


def run(script: Path, folder: Path) -> subprocess.CompletedProcess:
    """As a reader does, without an installed nanorl."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, os.path.relpath(script, folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def load(path: Path, monkeypatch, source: str | None = None):
    """The lesson's module from `path`, or from `source` in its place, beside the lesson's own checks."""
    for folder in (path.parent.parent, path.parent):
        monkeypatch.syspath_prepend(str(folder))
    for name in ("checks", "reinforce", "harness"):  # another lesson's may have been loaded before
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    if source is None:
        spec.loader.exec_module(module)
    else:
        exec(compile(source, str(path), "exec"), module.__dict__)
    for name in ("checks", "reinforce", "harness"):
        sys.modules.pop(name, None)
    return module


def shown_code(page: str) -> list[tuple[str | None, str]]:
    """(file named in the comment above, text) of each Python block."""
    block = re.compile(r"(?:<!-- from (\S+) -->\n)?```python\n(.*?)```", re.S)
    return [(match[1], match[2]) for match in block.finditer(page)]


def occurs_in(code: str, source: str) -> bool:
    """Whether the lines of `code` stand together in `source`, at any indentation."""
    wanted = textwrap.dedent(code).strip("\n").splitlines()
    lines = source.splitlines()
    windows = ("\n".join(lines[i : i + len(wanted)]) for i in range(len(lines) - len(wanted) + 1))
    return any(textwrap.dedent(window).splitlines() == wanted for window in windows)


# ---- text


@every_lesson
def test_every_lesson_has_all_its_files_and_shows_its_figure(lesson):
    for name in ("README.md", "exercise.py", "solution.py", "checks.py", "figure.py"):
        assert (lesson / name).is_file(), f"{lesson.name} lacks {name}"
    figures = [path.name for path in lesson.glob("*.png")]
    text = (lesson / "README.md").read_text()
    assert figures
    assert all(f"]({name})" in text for name in figures)
    assert f"python lessons/{lesson.name}/figure.py" in text  # the command that drew it


@every_page
def test_code_shown_in_a_lesson_stands_verbatim_in_the_file_it_names(page):
    for name, code in shown_code(page.read_text()):
        assert name, f"no '<!-- from FILE -->' above this block of {page}:\n{code}"
        assert occurs_in(code, (ROOT / name).read_text()), f"{page} shows code that is not in {name}:\n{code}"


def test_a_line_that_has_drifted_or_is_left_out_is_noticed():
    source = "def f(x):\n    y = 2 * x\n    if y:\n        return y\n"
    assert occurs_in("y = 2 * x\nif y:\n    return y\n", source)
    assert not occurs_in("y = 3 * x\n", source)
    assert not occurs_in("y = 2 * x\n    return y\n", source)
    assert not occurs_in("2 * x\n", source)
    assert shown_code("<!-- from a.py -->\n```python\nx\n```\ntext\n```python\ny\n```\n") == [
        ("a.py", "x\n"),
        (None, "y\n"),
    ]


@every_page
def test_relative_links_and_commands_of_a_lesson_point_to_files_that_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
    local = [link for link in links if not link.startswith(("http://", "https://"))]
    assert local
    assert [link for link in local if not (page.parent / link).exists()] == []
    scripts = re.findall(r"python ([\w/.]+\.py)", text)
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_index_lists_the_whole_course_and_links_the_lessons_that_exist():
    text = (ROOT / "lessons" / "README.md").read_text()
    assert re.findall(r"^\| (\d\d) \|", text, re.M) == [f"{n:02d}" for n in range(19)]
    assert re.findall(r"\]\((\d\d_\w+)/README\.md\)", text) == [lesson.name for lesson in LESSONS]


@every_page
def test_mathematics_has_no_bar_inside_a_table_and_no_bare_less_than_sign(page):
    # a bar ends the cell of a GitHub table, and "<t" inside $...$ is taken for a tag
    for line in page.read_text().splitlines():
        mathematics = re.findall(r"\$([^$]+)\$", line)
        assert not any("<" in piece for piece in mathematics), line
        if line.startswith("|"):
            assert not any("|" in piece for piece in mathematics), line


# ---- exercises


@every_lesson
def test_the_solution_passes_its_checks_from_the_lesson_folder(lesson):
    result = run(lesson / "solution.py", lesson)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "failed" not in result.stdout
    assert result.stderr == ""


@every_lesson
def test_the_exercise_as_shipped_fails_with_hints_and_without_a_traceback(lesson):
    result = run(lesson / "exercise.py", ROOT)
    assert result.returncode == 1
    assert result.stderr == ""
    assert "passed  " not in result.stdout
    assert result.stdout.count("hint: ") == len(re.findall(r"^  (?:blank|failed) ", result.stdout, re.M)) > 0


@every_lesson
def test_an_exercise_imports_no_answer(lesson):
    tree = ast.parse((lesson / "exercise.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"__future__", "checks", "math", "torch", "torch.nn.functional"}


@every_lesson
def test_exercise_and_solution_define_the_same_functions(lesson):
    def signatures(name: str) -> list[tuple[str, str]]:
        tree = ast.parse((lesson / name).read_text())
        return [(node.name, ast.unparse(node.args)) for node in tree.body if isinstance(node, ast.FunctionDef)]

    assert signatures("exercise.py") == signatures("solution.py")


@pytest.mark.parametrize(
    "lesson, blank, right, wrong",
    [
        (REINFORCE, "token_logprobs", "logits.log_softmax(-1)", "logits.softmax(-1).log()"),
        (REINFORCE, "grad_log_prob", "-logits.softmax(-1)", "logits.softmax(-1)"),
        (REINFORCE, "expected_gradient", "probs[a] * (", "(1 / len(logits)) * ("),
        (REINFORCE, "leave_one_out", "(rewards.shape[-1] - 1)", "rewards.shape[-1]"),
        (REINFORCE, "leave_one_out", "rewards.sum(-1, keepdim=True)", "rewards.sum()"),
        (REINFORCE, "reinforce_loss", "-(advantages", "(advantages"),
        (REINFORCE, "reinforce_loss", ".sum(1).mean()", ".mean()"),
        (REINFORCE, "reinforce_loss", "torch.where(mask.bool(), logprobs, 0.0)", "logprobs * mask"),
        (GRPO, "group_advantages", "std(-1, keepdim=True)", "std(-1, keepdim=True, correction=0)"),
        (GRPO, "group_advantages", "rewards.mean(-1, keepdim=True)", "rewards.mean()"),
        (GRPO, "group_advantages", "torch.where(equal, 0.0, z)", "z"),
        (GRPO, "clipped_objective", "torch.minimum(ratio * advantages, r", "torch.maximum(ratio * advantages, r"),
        (GRPO, "clipped_objective", "return torch.minimum(ratio * advantages, ratio", "return (ratio"),
        (GRPO, "kl_k3", "d = ref_logprobs.detach() - logprobs", "d = logprobs - ref_logprobs.detach()"),
        (GRPO, "kl_k3", "ref_logprobs.detach()", "ref_logprobs"),
        (GRPO, "sequence_mean", "(chosen.sum(1) / mask.sum(1)).mean()", "chosen.sum() / mask.sum()"),
        (GRPO, "sequence_mean", "chosen.sum(1) / mask.sum(1)", "chosen.mean(1)"),
        (GRPO, "grpo_loss", "(logprobs - old_logprobs.detach())", "(logprobs - old_logprobs)"),
        (GRPO, "grpo_loss", "objective - beta", "objective + beta"),
        (GRPO, "grpo_loss", "torch.where(mask.bool(), x, 0.0)", "x"),
        (GRPO, "loss_that_never_learns", "logprobs.detach()\n", "logprobs\n"),
        (GRPO, "loss_that_depends_on_its_neighbors", "(objective * mask).sum(1) / mask.sum(1)", "objective.mean(1)"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_the_checks_refuse_a_wrong_answer(monkeypatch, lesson, blank, right, wrong):
    source = (lesson / "solution.py").read_text()
    before, start, rest = source.partition(f"def {blank}(")  # change this function alone
    body, end, after = rest.partition("\n\n\n")
    assert right in body
    changed = before + start + body.replace(right, wrong) + end + after
    checks = load(lesson / "checks.py", monkeypatch)
    check = getattr(checks, f"check_{blank}")
    check(getattr(load(lesson / "solution.py", monkeypatch), blank))  # the right answer passes
    with pytest.raises(checks.require.__globals__["Failed"]):
        check(getattr(load(lesson / "solution.py", monkeypatch, changed), blank))


def test_an_error_in_an_answer_is_reported_with_its_line_and_not_as_a_traceback(tmp_path):
    source = (GRPO / "solution.py").read_text()
    marker = "d = ref_logprobs.detach() - logprobs"
    assert marker in source
    broken = tmp_path / "exercise.py"
    path = f"import sys; sys.path.insert(0, {str(GRPO)!r})\n"
    broken.write_text(source.replace("import checks\n", path + "import checks\n").replace(marker, "d = missing"))
    result = run(broken, tmp_path)
    assert result.returncode == 1
    assert "NameError: name 'missing' is not defined (line" in " ".join(result.stdout.split())
    assert "Traceback" not in result.stdout + result.stderr


# ---- what the lessons say


def test_lesson_00_a_baseline_makes_reinforce_blind_to_a_constant_added_to_every_reward(monkeypatch):
    reinforce = load(REINFORCE / "reinforce.py", monkeypatch)
    table, history = reinforce.reinforce(0, baseline=True, updates=40)
    shifted, _ = reinforce.reinforce(0, baseline=True, added=1.0, updates=40)
    torch.testing.assert_close(shifted, table, rtol=0, atol=1e-9)
    assert history[0]["reward"] < 0.2 < 0.8 < history[-1]["reward"]
    assert abs(history[0]["loss"]) < 1e-9 < 0.01 < history[0]["grad_norm"]  # loss 0, and learning
    without, _ = reinforce.reinforce(0, baseline=False, updates=40)
    without_shifted, _ = reinforce.reinforce(0, baseline=False, added=1.0, updates=40)
    assert (without - without_shifted).abs().max() > 0.1


@pytest.mark.parametrize("right, good, bad", [(1, 2.47, -0.35), (4, 0.94, -0.94), (7, 0.35, -2.47)])
def test_lesson_06_table_of_advantages_in_a_group_of_8(right, good, bad):
    advantages = group_advantages(torch.tensor([1.0] * right + [0.0] * (8 - right)), torch.zeros(8, dtype=torch.long))
    assert (round(advantages[0].item(), 2), round(advantages[-1].item(), 2)) == (good, bad)
    sign = {True: "+", False: ""}
    row = f"| {right} | {sign[good > 0]}{good:.2f} | {sign[bad > 0]}{bad:.2f} |"
    assert row in (GRPO / "README.md").read_text()


def test_lesson_06_gradient_of_a_thinking_and_a_direct_token_worked_by_hand():
    mask = torch.arange(25) < torch.tensor([25, 3, 3, 3])[:, None]
    logprobs = torch.full((4, 25), -1.0, dtype=torch.double, requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, -0.5, -0.5], dtype=torch.double)
    loss, _ = grpo_loss(logprobs, logprobs.detach(), advantages, mask)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.abs() < 1e-12
    torch.testing.assert_close(gradient[:2, 0], torch.tensor([-0.0150, 0.0417], dtype=torch.double), rtol=0, atol=5e-5)


def test_lesson_06_the_first_silent_bug_has_loss_0_and_gradient_0_as_its_symptom_says(monkeypatch):
    exercise = load(GRPO / "exercise.py", monkeypatch)
    logprobs = torch.randn(4, 3, dtype=torch.double, requires_grad=True)
    loss = exercise.loss_that_never_learns(logprobs, torch.tensor([1.5, -0.5, -0.5, -0.5], dtype=torch.double))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.abs() < 1e-12 and not gradient.any()


def test_lesson_06_the_second_silent_bug_shrinks_the_gradient_when_a_long_response_joins(monkeypatch):
    exercise = load(GRPO / "exercise.py", monkeypatch)

    def grad_norm(width: int) -> float:  # two responses of 2 tokens, and one with advantage 0 that is `width` long
        mask = (torch.arange(width) < torch.tensor([2, 2, width])[:, None]).double()
        logprobs = torch.full((3, width), -1.0, dtype=torch.double, requires_grad=True)
        advantages = torch.tensor([1.0, -1.0, 0.0], dtype=torch.double)
        loss = exercise.loss_that_depends_on_its_neighbors(logprobs, logprobs.detach(), advantages, mask)
        return torch.autograd.grad(loss, logprobs)[0].norm().item()

    assert grad_norm(20) == pytest.approx(grad_norm(2) / 10)
