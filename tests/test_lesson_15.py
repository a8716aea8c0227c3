"""Lesson 15: its numbers are those of the code, and its checks refuse wrong answers, wrong kernels too."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch

from bench.allocations import Allocations
from bench.kernels_cpu import dense
from kernels import backend, compile_check, linear, reference, rows

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "15_kernels"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break
LN2 = math.log(2)
ROW = torch.tensor([[0.0, LN2, 3 * LN2, -torch.inf]], dtype=torch.float64)
UNIFORM, TARGET = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([1])


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


def row_of(start: str, page: str = README) -> list[float]:
    """The numbers of the cells behind the first one, in the only table row that begins with `start`."""
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {start} |"))
    return [float(x) for x in re.findall(r"-?(?:inf|\d+(?:\.\d+)?)", row.replace(",", "").split("|", 2)[2])]


def between(name: str) -> str:
    return README.split(f"<!-- {name} -->\n")[1].split(f"<!-- end of {name} -->")[0]


# ---- by hand


def test_the_running_sums_of_the_row_worked_by_hand(load):
    add_block = load("solution").add_block
    state = [torch.tensor([x], dtype=torch.float64) for x in (-math.inf, 0.0, 0.0)]
    assert row_of("before") == [-math.inf, 0, 0]
    for start, block in (("after [0, ln 2]", ROW[:, :2]), ("after [3 ln 2, -inf]", ROW[:, 2:])):
        state = add_block(*state, block)
        assert [x.item() for x in state] == pytest.approx(row_of(start), abs=5e-7)
    d = LN2 - 3 * LN2
    moved = [3 * LN2, math.exp(d) * 1.5, math.exp(d) * (-LN2 / 2 + 1.5 * d)]
    assert moved == pytest.approx(row_of("moved by d = -1.386294"), abs=5e-7)
    assert math.log(2 / 11) == pytest.approx(-1.704748, abs=5e-7) and "= -1.704748 = ln (2/11)" in PROSE


def test_values_of_the_row_worked_by_hand_in_the_code_and_in_the_text():
    probs = [1 / 11, 2 / 11, 8 / 11]
    entropy = -sum(p * math.log(p) for p in probs)
    logprob, H, _, _, kl, _, _ = rows.rows_forward(ROW, TARGET, UNIFORM)[:, 0].tolist()
    assert (logprob, H, kl) == pytest.approx((math.log(2 / 11), entropy, math.log(4) - entropy), abs=1e-12)
    assert f"0.606504 / 1.375 = {entropy:.6f}" in PROSE and f"= {math.log(4) - entropy:.6f}." in PROSE


def test_the_table_of_gradients_is_that_of_autograd_and_each_row_sums_to_0():
    x = ROW.clone().requires_grad_()
    values = reference.logprob_entropy_kl(x, TARGET, UNIFORM)
    for start, value in zip(
        ("the log-prob", "the entropy", "the KL against the uniform reference"), values, strict=True
    ):
        (found,) = torch.autograd.grad(value, x, retain_graph=True)
        assert found[0].tolist() == pytest.approx(row_of(start), abs=5e-7)
        assert found.sum().abs() < 1e-12
    for i in range(3):
        upstream = [torch.ones(1, dtype=torch.float64) if j == i else None for j in range(3)]
        results = rows.rows_forward(ROW, TARGET, UNIFORM)
        found = rows.rows_backward(ROW.clone(), TARGET, results, *upstream, UNIFORM)
        (expected,) = torch.autograd.grad(values[i], x, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_textbook_entropy_loses_its_digits_at_logits_of_10_000_and_ours_does_not():
    x = 3 * torch.randn(16, 50257, generator=torch.Generator().manual_seed(0)) + 1e4
    truth = reference.logprob_entropy_kl(x.double(), torch.zeros(16, dtype=torch.long))[1]
    textbook = x.logsumexp(-1) - (x.softmax(-1) * x).sum(-1)
    ours = rows.rows_forward(x, torch.zeros(16, dtype=torch.long))[1]
    assert 0.01 < (textbook.double() - truth).abs().max() < 0.04 and "off by 0.019" in PROSE
    assert (ours.double() - truth).abs().max() < 4e-6 and "against 0.000002" in PROSE


def test_the_answers_behind_the_questions(load):
    nothing = [torch.tensor([x], dtype=torch.float64) for x in (-math.inf, 0.0, 0.0)]
    blocks = [torch.tensor([b], dtype=torch.float64).log() for b in ([3.0], [1.0, 4.0])]
    m, s, a = functools.reduce(lambda state, x: load("solution").add_block(*state, x), blocks, nothing)
    assert (m.exp().item(), s.item(), a.item()) == pytest.approx((4, 2, -0.562335), abs=1e-6)
    assert (s.log() - a / s).item() == pytest.approx(0.974315, abs=5e-7)
    uniform = torch.zeros(1, 7, dtype=torch.float64, requires_grad=True)
    entropy = reference.logprob_entropy_kl(uniform, torch.tensor([0]))[1]
    assert torch.autograd.grad(entropy, uniform)[0].abs().max() < 1e-15
    figure = load("figure")
    assert figure.of_dense(figure.ON_GPU._replace(D=4096)).intensity > 200 > 184


# ---- sizes and counts that the text names


def test_sizes_named_in_the_text():
    assert f"{8192 * 151936 * 4 / 1e9:.2f} GB in float32" in PROSE and round(5 * 8192 * 151936 * 4 / 1e9) == 25
    assert 14134 * 151936 < 2**31 < 14135 * 151936 and "14,135 rows" in PROSE
    assert (linear.CHUNK_TOKENS, linear.GPU_CHUNK_TOKENS) == (512, 2048)
    assert "512 tokens on a CPU, 2,048 on a GPU" in PROSE
    assert rows.BLOCK == 4096 and rows.ALIGNED == 64
    assert "multiple of 64" in PROSE and "no multiple of 4,096" in PROSE
    assert torch.finfo(torch.bfloat16).eps * 16 == 1 / 8 and round(math.exp(1 / 16) - 1, 2) == 0.06


def test_the_table_of_memory_is_what_is_counted(load):
    figure = load("figure")
    for V in figure.VOCABULARIES[:3]:
        once, *shown, share = row_of(f"{V:,}", between("memory"))
        found = [figure.peak_bytes(V, options) for options, _, _ in figure.SIDES.values()]
        assert once == pytest.approx(4e-6 * figure.N * V, abs=0.005)
        assert [x / 1e6 for x in found] == pytest.approx(shown, abs=0.006)
        assert share == pytest.approx(100 * found[-1] / found[0], abs=0.06)
    once, in_dense, kept, _, share = row_of("151,936", between("memory"))
    assert round(in_dense / once) == 5 and "five times the logits" in PROSE and "five tensors of that size" in PROSE
    assert 1 < kept / once < 1.2 and round(share) == 4 and "that is 4 % of dense" in PROSE


def test_dense_scoring_holds_five_tensors_as_large_as_the_logits():
    hidden, weight = torch.randn(32, 4, requires_grad=True), torch.randn(2000, 4, requires_grad=True)
    with Allocations() as seen:
        torch.autograd.backward(dense(hidden, weight, torch.zeros(32, dtype=torch.long)), [torch.ones(32)] * 2)
    assert seen.peak / (32 * 2000 * 4) == pytest.approx(5, abs=0.2)


def test_traffic_is_counted_as_worked_out_by_hand(load):
    figure = load("figure")
    x, w = torch.zeros(4, 8, device="meta"), torch.zeros(16, 8, device="meta")
    with figure.Traffic() as seen:
        logits = x @ w.T  # reads 32 and 128 numbers, writes 64
        logits.view(8, 8)  # moves nothing
        logits.exp()  # reads 64, writes 64
    assert (seen.bytes, seen.flop) == (4 * (32 + 128 + 64 + 64 + 64), 2 * 4 * 8 * 16 + 64)


def test_the_roofline_names_what_the_counts_say(load):
    figure = load("figure")
    shape, (flops, bandwidth) = figure.ON_GPU, figure.H200
    assert round(flops / bandwidth) == 184 and "790 TFLOP/s in bfloat16 products and 4.3 TB/s, bends at 184" in PROSE
    logits = shape.N * shape.V
    assert figure.of_dense(shape).bytes / logits == pytest.approx(120, abs=1) and "120 bytes a logit" in PROSE
    head, row = figure.of_head(shape), figure.of_rows(shape)
    assert row.intensity == 1.5 and "1.5 FLOP per byte" in PROSE
    assert figure.of_chunked(shape).flop == pytest.approx(8 * logits * shape.D, rel=0.01)
    assert figure.of_dense(shape).flop == pytest.approx(6 * logits * shape.D, rel=0.01)
    assert figure.of_dense(shape).intensity < 184 < figure.of_chunked(shape).intensity < head.intensity
    shown = between("roofline")
    for name, (work, _) in figure.KERNELS.items():
        here, measured, roof, there, floor = row_of(name, shown)
        assert here == pytest.approx(work(figure.ON_CPU).intensity, abs=0.06)
        assert there == pytest.approx(work(shape).intensity, abs=0.06)
        least = max(work(shape).flop / flops, work(shape).bytes / bandwidth)
        assert floor == pytest.approx(1e3 * least, abs=0.006)
        assert measured < roof
    assert row_of("chunked, all of it", shown)[-1] < row_of("dense, all of it", shown)[-1]
    assert "at least 0.29 ms, the product before it 1.61 ms" in PROSE
    assert (row_of("row pass", shown)[-1], row_of("the head's product", shown)[-1]) == (0.29, 1.61)
    product, copy = (float(x) for x in re.findall(r"at\s([\d.]+) G", shown.splitlines()[0]))
    assert 3 <= product / copy < 4.5 and "bends at 3 to 4 FLOP per byte" in PROSE


# ---- exercises


def test_the_symptom_of_the_silent_bug_is_as_described(load):
    broken = load("exercise").logprobs_that_fall_short

    def total(V: int, shift: float) -> float:
        logits = torch.full((1, V), shift, dtype=torch.float64).expand(V, V)
        return broken(logits, torch.arange(V), 256).exp().sum().item()

    assert total(1024, 0) == pytest.approx(1, abs=1e-12) == total(1024, -20)
    assert round(total(1000, 0), 3) == 0.977 and round(total(1000, -20), 7) == 0.0000001
    off = math.log(1 / total(1000, -20))
    assert round(off) == 16 and "off by 16 nats" in PROSE


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("add_block", "m_new.masked_fill(m_new == -torch.inf, 0)", "m_new"),
        ("add_block", ".masked_fill(m == -torch.inf, 0)", ""),
        ("add_block", "(a + s * moved)", "a"),
        ("add_block", "moved.exp() * s +", "s +"),
        ("add_block", "shifted.masked_fill(e == 0, 0)", "shifted"),
        ("rows_forward", "logits.split(block, dim=1)", "logits.split(logits.shape[1], dim=1)"),
        ("rows_forward", "- m) - log_sum", "- (m + log_sum))"),
        ("rows_forward", "log_sum - a / s", "log_sum + a / s"),
        ("rows_forward", "logits.new_full((len(logits),), -torch.inf)", "logits.new_zeros(len(logits))"),
        ("merge", ".masked_fill(m == -torch.inf, 0)", ""),
        ("merge", "(a + s * moved)", "a"),
        ("merge", "(share * s)", "s"),
        ("rows_backward", "-probs * (", "probs * ("),
        ("rows_backward", "(logprobs + entropy)", "(logprobs + 1)"),
        ("rows_backward", "logprobs.masked_fill(probs == 0, 0)", "logprobs"),
        ("rows_backward", "targets[:, None], grad_logprob[:, None])", "targets[:, None], -grad_logprob[:, None])"),
        ("linear_backward", "grad_weight += ", "grad_weight = "),
        ("linear_backward", "range(0, len(hidden), chunk)", "range(0, len(hidden) - chunk, chunk)"),
        ("linear_backward", "slice(start, start + chunk)", "slice(0, len(hidden))"),
        ("logprobs_that_fall_short", "other=-torch.inf", "other=-1e2"),
        ("logprobs_that_fall_short", ", other=-torch.inf", ""),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)


# Triton reads a kernel's source from its file, so a changed one gets a file of its own.


@pytest.fixture
def kernel(load, lesson_module, tmp_path):
    def changed(right: str = "", wrong: str = ""):
        source = (LESSON / "solution.py").read_text()
        before, start, rest = source.partition("@jit\ndef row_kernel(")
        body, end, after = rest.partition("\n\n\n")
        assert not right or body.count(right) == 1
        (tmp_path / "changed.py").write_text(before + start + body.replace(right, wrong) + end + after)
        load("checks")  # leaves the lesson's folder on the path
        return lesson_module(tmp_path, "changed").row_kernel

    return changed


@pytest.mark.interpreted
def test_the_kernel_of_the_solution_passes_in_the_interpreter_and_a_blank_one_counts_as_blank(load, kernel):
    check = load("checks").check_row_kernel
    check(kernel())
    with pytest.raises(NotImplementedError):
        check(load("exercise").row_kernel)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "right, wrong",
    [
        (', other=-float("inf")', ", other=0.0"),
        (', mask=columns < V, other=-float("inf")', ""),
        ("logits += row * V", "logits += row * BLOCK"),
        ('tl.where(m_new == -float("inf"), 0.0, m_new)', "m_new"),
        ('tl.where(m == -float("inf"), 0.0, m - finite)', "m - finite"),
        ("(a + s * moved)", "a"),
        ("tl.exp(moved) * s", "s"),
        ("tl.where(e == 0, 0.0, e * (x - finite))", "e * (x - finite)"),
        ("results + 2 * row + 1", "results + row + 3"),
    ],
)
def test_the_check_refuses_a_wrong_kernel(load, kernel, right, wrong):
    checks = load("checks")
    with pytest.raises(checks.Failed):
        checks.check_row_kernel(kernel(right, wrong))


@pytest.mark.skipif(backend.triton is None, reason="triton is not installed")
def test_the_kernel_of_the_solution_compiles_for_a_gpu_without_spilling(kernel, monkeypatch):
    monkeypatch.setitem(compile_check.POINTERS, "results", "*fp32")
    case = compile_check.Case("lesson 15", kernel(), {"BLOCK": 1024}, options={"num_warps": 4})
    assert compile_check.compile_for(case, "sm_90").spilled == 0


def test_without_the_interpreter_the_kernel_is_skipped_with_a_word_and_all_else_is_checked(load, monkeypatch, capsys):
    checks = load("checks")
    monkeypatch.setitem(checks.check_row_kernel.__globals__, "triton", None)
    solution = load("solution")
    with pytest.raises(SystemExit) as end:
        checks.run("Lesson 15", vars(solution), checks.CHECKS)
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "skipped row_kernel: triton is not installed" in said
    assert "6 of 7 passed, 1 skipped" in said
