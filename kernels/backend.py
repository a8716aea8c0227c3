"""Which path serves: Triton on a GPU, the same algorithm in torch everywhere else."""

import logging
import os
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a Mac, Windows: the kernels can still be read, and torch serves
    triton = None
    tl = SimpleNamespace(constexpr=lambda value: value)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run as Python, on CPU tensors; for tests
jit = triton.jit if triton else lambda function: function
log = logging.getLogger("kernels")
said: set[str] = set()


def say_once(message: str, level: int = logging.WARNING) -> None:
    if message not in said:
        said.add(message)
        log.log(level, message)


def use_triton(*inputs: Tensor) -> bool:
    """Whether the Triton kernels serve these tensors; says once why not, as a warning where a GPU lies idle."""
    device = inputs[0].device.type
    wide = next((str(x.dtype) for x in inputs if x.dtype not in (torch.float32, torch.bfloat16)), None)
    if triton is None:
        reason = f"triton is not installed; torch serves on {device}"
    elif device != "cuda" and not (INTERPRETED and device == "cpu"):
        reason = f"Triton has no {device}; torch serves there"
    elif wide:
        reason = f"the Triton kernels compute in float32, not in {wide}; torch serves"
    else:
        return True
    say_once(reason, logging.WARNING if device != "cpu" else logging.INFO)
    return False
