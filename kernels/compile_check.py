"""Compiles every kernel for GPUs that need not be there: `python -m kernels.compile_check`, about a minute.

For each it prints registers a thread, bytes spilled to memory, shared memory and 16-byte loads. It fails where a kernel
does not compile, where a default configuration spills on a data-center GPU of NVIDIA, and where 16-byte loads are
missing: V is never declared divisible by anything here, so what holds is what an odd V gets.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from kernels import flash, rows
from kernels.backend import triton

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
MUST_NOT_SPILL = ("sm_80", "sm_90", "sm_100")
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376, "gfx942": 65_536}  # a block's

POINTERS = {"targets": "*i64", "hidden": "*bf16", "weight": "*bf16", "slab": "*bf16"}  # other pointers: float32
FLOATS = ("inverse_temperature", "softcap")
INTEGERS = ("stride", "ref_stride", "out_stride", "slab_stride", "C", "V", "N", "D", "first")
DIVISIBLE = ("stride", "ref_stride", "out_stride", "slab_stride", "D")  # by 16: empty_logits sees to it, D is so anyway


class Case(NamedTuple):
    name: str
    kernel: object
    constants: dict  # constexpr arguments, and arguments that are None or 0
    types: dict = {}  # noqa: RUF012  pointers that differ from the table above
    options: dict = {"num_warps": rows.WARPS}  # noqa: RUF012


class Report(NamedTuple):
    registers: int
    spilled: int  # bytes; registers on AMD
    shared: int  # bytes
    wide_loads: int  # of 16 bytes or more
    intermediate: str  # Triton's own code, before it knows the GPU


def cases() -> list[Case]:
    """Every kernel in its default configuration, with and without each of its branches."""
    row = {"BLOCK": rows.BLOCK}
    alone = row | {"ref_logits": None, "ref_stride": 0}
    bf16_out = {"out": "*bf16"}
    forward, backward = rows.rows_forward_kernel, rows.rows_backward_kernel
    plain, train = {"softcap": None}, {"softcap": None, "grad_entropy": None, "grad_kl": None}
    found = [
        Case("rows forward", forward, alone | plain),
        Case("rows forward, softcap", forward, alone),
        Case("rows forward, KL", forward, row | plain),
        Case("rows backward", backward, alone | train),
        Case("rows backward to bf16", backward, alone | train, bf16_out),
        Case("rows backward, softcap, KL", backward, row),
    ]
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        _, options = flash.tiles(dtype)
        tile = {key: options.pop(key) for key in ("TOKENS", "WORDS", "DEPTH", "UPCAST")}
        types = {pointer: f"*{name}" for pointer in ("hidden", "weight", "slab")}
        striped = tile | {"STRIPE": flash.STRIPE}
        found.append(Case(f"flash forward {name}", flash.flash_forward_kernel, striped | plain, types, options))
        found.append(Case(f"flash backward {name}", flash.flash_slab_kernel, tile | plain, types, options))
    return found


def compile_for(case: Case, target: str) -> Report:
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name], constants[(i,)] = "constexpr", case.constants[name]
            continue
        pointer = case.types.get(name, POINTERS.get(name, "*fp32"))
        signature[name] = "fp32" if name in FLOATS else "i32" if name in INTEGERS else pointer
        if signature[name] == pointer or name in DIVISIBLE:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(case.kernel, signature, constants, attributes)
    done = triton.compile(source, target=gpu, options=case.options)
    if gpu.backend == "hip":
        code = done.asm["amdgcn"]
        registers, spilled = (int(re.search(rf"\.vgpr_{key}: *(\d+)", code)[1]) for key in ("count", "spill_count"))
        wide = len(re.findall(r"load_dwordx4", code))
    else:
        code = done.asm["ptx"]
        registers, spilled = ptxas(code)
        wide = len(re.findall(r"ld\.global\S*\.v[48]\.[bf]32|cp\.async\.cg", code))
    return Report(registers, spilled, done.metadata.shared, wide, done.asm["ttir"])


def ptxas(code: str) -> tuple[int, int]:
    """Registers a thread and bytes spilled, as NVIDIA's assembler tells."""
    target = re.search(r"\.target (sm_(\d+)\w*)", code)
    blackwell = "-blackwell" if int(target[2]) >= 100 else ""
    program = Path(triton.__file__).parent / "backends/nvidia/bin" / f"ptxas{blackwell}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(code)
        command = [str(program), "-v", f"--gpu-name={target[1]}", "kernel.ptx", "-o", "kernel.cubin"]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", told))
    return int(re.search(r"Used (\d+) registers", told)[1]), spilled


def faults(report: Report, target: str) -> list[str]:
    found = []
    if report.spilled and target in MUST_NOT_SPILL:
        found.append(f"{report.spilled} bytes spilled")
    if report.shared > SHARED_BYTES[target]:
        found.append(f"{report.shared} bytes of shared memory, the GPU has {SHARED_BYTES[target]}")
    if not report.wide_loads:
        found.append("no 16-byte loads")
    return found


def main() -> None:
    if triton is None:
        sys.exit("compile_check needs triton (Linux: pip install triton)")
    print(f"{'kernel':<28}{'target':<8}{'registers':>10}{'spilled':>9}{'shared':>9}{'16-byte loads':>15}")
    wrong = 0
    for case in cases():
        for target in TARGETS:
            try:
                report = compile_for(case, target)
                numbers = f"{report.registers:>10}{report.spilled:>9}{report.shared:>9}{report.wide_loads:>15}"
                found = faults(report, target)
            except Exception as error:  # of a compiler: any type
                numbers, found = "", [f"does not compile: {error}"]
            wrong += bool(found)
            print(f"{case.name:<28}{target:<8}{numbers}{'  FAILS: ' * bool(found)}{', '.join(found)}", flush=True)
    if wrong:
        sys.exit(f"{wrong} of {len(cases()) * len(TARGETS)} fail")


if __name__ == "__main__":
    main()
