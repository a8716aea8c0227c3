"""Compiling kernels for GPUs that are not there. All of them on all GPUs: `python -m kernels.compile_check`."""

from __future__ import annotations

import re

import pytest

from kernels import compile_check
from kernels.compile_check import SHARED_BYTES, TARGETS, Case, Report, cases, compile_for, faults

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def not_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def forward() -> Case:
    return next(case for case in cases() if case.name == "rows forward")


def test_the_row_kernel_compiles_without_a_gpu_and_has_nothing_to_fault(forward):
    report = compile_for(forward, "sm_90")
    assert faults(report, "sm_90") == [] and 0 < report.registers <= 255 and report.wide_loads


def test_row_offsets_are_computed_in_64_bits(forward):
    """row * stride passes 2^31 at 14,000 rows of 152,000 words; in 32 bits it would wrap to another row."""
    code = compile_for(forward, "sm_90").intermediate
    row = re.search(r"(%\S+) = arith\.extsi %\S+ : i32 to i64", code)[1]
    assert re.search(rf"arith\.muli {re.escape(row)}, %\S+ : i64", code)
    assert not re.search(r"tt\.addptr %logits\S*, %\S+ : !tt\.ptr<f32>, i32", code)


def test_rows_that_do_not_begin_aligned_have_no_16_byte_loads_and_are_faulted(forward, monkeypatch):
    monkeypatch.setattr(compile_check, "DIVISIBLE", ())
    assert faults(compile_for(forward, "sm_80"), "sm_80") == ["no 16-byte loads"]


def test_registers_that_do_not_suffice_are_counted_as_spilled_and_faulted(forward):
    crowded = forward._replace(options=forward.options | {"maxnreg": 24})
    report = compile_for(crowded, "sm_80")
    assert report.spilled > 0
    assert [fault for fault in faults(report, "sm_80") if re.fullmatch(r"\d+ bytes spilled", fault)]


def test_a_spill_is_let_pass_where_no_one_trains_and_too_much_shared_memory_nowhere():
    spilling = Report(registers=255, spilled=8, shared=0, wide_loads=4, intermediate="")
    assert [bool(faults(spilling, target)) for target in TARGETS] == [True, True, True, False, False]
    for target in TARGETS:
        assert faults(spilling._replace(spilled=0, shared=SHARED_BYTES[target] + 1), target)


@pytest.mark.parametrize("case", [case for case in cases() if "fp32" not in case.name], ids=lambda case: case.name)
def test_kernels_compile_where_every_size_is_1(case):
    """Triton makes constants of integers that are 1, and a constant cannot do all that a number can."""
    ones = {name: 1 for name in compile_check.INTEGERS if name in case.kernel.arg_names}
    compile_for(case._replace(constants=ones | case.constants), "sm_90")


def test_every_kernel_of_the_package_is_checked():
    from kernels import flash, rows

    defined = {value for module in (flash, rows) for name, value in vars(module).items() if name.endswith("_kernel")}
    assert {id(case.kernel) for case in cases()} == {id(kernel) for kernel in defined}
