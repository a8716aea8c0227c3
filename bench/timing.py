"""Timing two implementations against each other on a machine that does other things too.

Runs take turns (A B A B ...), so that whatever slows the machine slows both; medians are compared as ratios.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import torch


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after one uncounted round."""
    seconds = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def one_core() -> None:
    """Pin this process to one core and one thread, the same for both sides."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def bf16_instructions() -> bool:
    """Whether the processor multiplies bfloat16 by itself; otherwise it is emulated and slow."""
    try:
        flags = open("/proc/cpuinfo").read()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        name = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    instructions = "with" if bf16_instructions() else "without"
    return f"{name}, {instructions} bfloat16 instructions, torch {torch.__version__}, {torch.get_num_threads()} thread"


def matmul_rate(rows: int, width: int, ffn: int, dtype: torch.dtype) -> float:
    """FLOP/s of the product that dominates a model of this shape, measured now."""
    a, b = torch.randn(rows, width, dtype=dtype), torch.randn(ffn, width, dtype=dtype)
    repeat = max(1, int(2e9 / (2 * rows * width * ffn)))

    def run():
        for _ in range(repeat):
            torch.nn.functional.linear(a, b)

    return 2 * rows * width * ffn * repeat / interleaved({"matmul": run}, rounds=3)["matmul"]
