"""Draws the figure of lesson 15 from fresh measurements, and writes their tables into README.md.

    python lessons/15_kernels/figure.py

About 20 seconds of one core; up to a gigabyte of memory. Bytes are counted, times are measured on this CPU. The floors
of an H200 are computed from its ceilings, and marked as computed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.allocations import Allocations
from bench.kernels_cpu import dense
from bench.timing import machine
from kernels import linear_logprob, rows
from nanorl.plots import save

COMMAND = "python lessons/15_kernels/figure.py"
N, D, CHUNK = 256, 16, 16  # of the left panel: small, so that the vocabulary is what counts
VOCABULARIES = [256, 1024, 4096, 16384, 50257, 151936]
SIDES = {  # name -> options of linear_logprob (None: dense), color, marker
    "dense": (None, "tab:red", "o"),
    "all logits kept": ({"keep_logits_bytes": 2**40}, "tab:orange", "s"),
    "chunked": ({"keep_logits_bytes": 0}, "tab:blue", "o"),
}
ROUNDS = 3  # the best of them is taken: whatever else the machine does only slows


class Shape(NamedTuple):
    """N tokens, D hidden units, V words, tokens of a chunk, type of hidden states and head."""

    N: int
    D: int
    V: int
    chunk: int
    dtype: torch.dtype


ON_CPU = Shape(512, 256, 50257, 128, torch.float32)
ON_GPU = Shape(8192, 2048, 151936, 2048, torch.bfloat16)
H200 = (790e12, 4.3e12)  # FLOP/s of a bfloat16 matrix product, bytes/s of memory, as reported for this card
FORWARD, BACKWARD = 6, 8  # operations on each logit: x - m, max, exp, e (x - m), two sums; and see rows_backward


# ---- memory


def inputs(shape: Shape, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Hidden states, head, targets, and the gradients of the loss to log-probs and entropies."""
    torch.manual_seed(0)
    hidden = torch.randn(shape.N, shape.D, dtype=shape.dtype, device=device).requires_grad_()
    weight = torch.randn(shape.V, shape.D, dtype=shape.dtype, device=device).mul_(shape.D**-0.5).requires_grad_()
    targets = torch.randint(0, shape.V, (shape.N,), device=device)
    return hidden, weight, targets, list(torch.randn(2, shape.N, device=device))


def score_and_backward(shape: Shape, options: dict | None, given: tuple) -> None:
    hidden, weight, targets, upstream = given
    hidden.grad = weight.grad = None
    if options is None:
        values = dense(hidden, weight, targets)
    else:
        values = linear_logprob(hidden, weight, targets, chunk=shape.chunk, **options)
    torch.autograd.backward(values, upstream)


def peak_bytes(V: int, options: dict | None) -> int:
    shape = Shape(N, D, V, CHUNK, torch.float32)
    given = inputs(shape)
    with Allocations() as seen:
        score_and_backward(shape, options, given)
    return seen.peak


# ---- work and traffic


class Traffic(TorchDispatchMode):
    """Counts, of each operation, the bytes it reads and writes and its floating-point operations.

    As if each went through memory, which is what happens to tensors that fit no cache. A view moves nothing.
    """

    def __init__(self):
        super().__init__()
        self.bytes = self.flop = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        read = [x for x in tree_leaves((arguments, keywords)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        storages = {x.untyped_storage()._cdata for x in read}
        if name in ("gather", "scatter_add", "scatter_add_"):
            self.bytes += 3 * min(x.numel() for x in read) * 4  # a few numbers at few places
        elif function._schema.is_mutable or any(x.untyped_storage()._cdata not in storages for x in written):
            self.bytes += sum(min(x.numel() * x.itemsize, x.untyped_storage().nbytes()) for x in read + written)
            if name == "mm":
                self.flop += 2 * read[0].numel() * read[1].shape[1]
            elif name not in ("_to_copy", "clone", "copy_", "zeros", "new_zeros"):
                self.flop += max(x.numel() for x in read + written)
        return result


class Work(NamedTuple):
    flop: float
    bytes: float

    @property
    def intensity(self) -> float:
        return self.flop / self.bytes


def of_dense(shape: Shape) -> Work:
    """Counted, on tensors that have a shape and no numbers."""

    def plain(hidden, weight, targets):
        logprobs = (hidden @ weight.T).float().log_softmax(-1)
        return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)

    hidden, weight, targets, upstream = inputs(shape, "meta")
    with Traffic() as seen:
        torch.autograd.backward(plain(hidden, weight, targets), upstream)
    return Work(seen.flop, seen.bytes)


def of_head(shape: Shape) -> Work:
    """The logits of one chunk, written in float32."""
    C, (_, D, V, _, dtype) = shape.chunk, shape
    return Work(2 * C * D * V, (C * D + V * D) * dtype.itemsize + 4 * C * V)


def of_rows(shape: Shape) -> Work:
    """The forward pass over rows of float32 logits: each is read once."""
    return Work(FORWARD * shape.chunk * shape.V, 4 * shape.chunk * shape.V)


def of_chunked(shape: Shape) -> Work:
    """All chunks: logits, row pass, logits again, row pass back over them, two products with their gradient."""
    C, (_, D, V, _, dtype) = shape.chunk, shape
    head, forward = of_head(shape), of_rows(shape)
    size = dtype.itemsize
    bytes_ = 2 * head.bytes + forward.bytes
    bytes_ += (4 + size) * C * V  # the row pass back: logits in, gradients out
    bytes_ += size * (2 * C * V + V * D + 2 * C * D) + 2 * 4 * V * D  # the head's float32 gradient is read and written
    chunks = shape.N // C
    return Work(chunks * (4 * head.flop + forward.flop + BACKWARD * C * V), chunks * bytes_)


KERNELS = {  # name -> its work, color
    "row pass": (of_rows, "tab:green"),
    "dense, all of it": (of_dense, "tab:red"),
    "chunked, all of it": (of_chunked, "tab:blue"),
    "the head's product": (of_head, "k"),
}


def best_seconds(run) -> float:
    """Of one thread's work; the time in which other programs had the core is not counted."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return min(seconds)


def measured_ceilings() -> tuple[float, float]:
    """FLOP/s of a square matrix product and bytes/s of a copy, one thread, float32."""
    a, b = torch.randn(2, 1024, 1024)
    flops = 2 * 1024**3 / best_seconds(lambda: a @ b)
    source = torch.randn(2**24)  # 64 MB: in no cache
    copy = torch.empty_like(source)
    copy.copy_(source)  # its pages exist now
    return flops, 2 * 4 * len(source) / best_seconds(lambda: copy.copy_(source))


def measured_seconds(shape: Shape) -> dict[str, float]:
    given = inputs(shape)
    hidden, weight, targets, _ = given
    with torch.no_grad():
        part = hidden[: shape.chunk].detach()
        logits = part @ weight.T
        return {
            "row pass": best_seconds(lambda: rows.rows_forward(logits, targets[: shape.chunk])),
            "the head's product": best_seconds(lambda: torch.mm(part, weight.T, out=logits)),
        } | whole_seconds(shape, given)


@torch.enable_grad()
def whole_seconds(shape: Shape, given: tuple) -> dict[str, float]:
    return {
        f"{name}, all of it": best_seconds(lambda options=SIDES[name][0]: score_and_backward(shape, options, given))
        for name in ("dense", "chunked")
    }


# ---- figure


def draw(path: Path) -> None:
    figure, (memory, roof) = plt.subplots(1, 2, figsize=(13, 5.6))
    peaks = {name: [peak_bytes(V, options) for V in VOCABULARIES] for name, (options, _, _) in SIDES.items()}
    for name, (_, color, marker) in SIDES.items():
        megabytes = [peak / 1e6 for peak in peaks[name]]
        memory.plot(VOCABULARIES, megabytes, color=color, marker=marker, label=name)
    memory.plot(VOCABULARIES, [4e-6 * N * V for V in VOCABULARIES], "0.6", ls="--", lw=1, label="the logits, once")
    share = peaks["chunked"][-1] / peaks["dense"][-1]
    memory.set(xscale="log", yscale="log", xlabel="words in the vocabulary", ylabel="peak of allocated memory (MB)")
    memory.set_title(f"Score and backward: chunked needs {share:.0%} of dense")
    memory.legend()

    cpu, seconds = measured_ceilings(), measured_seconds(ON_CPU)
    draw_roof(roof, cpu, "k", "-", "this CPU core: measured")
    draw_roof(roof, H200, "0.6", "--", "H200: computed, nothing ran there")
    for name, (work, color) in KERNELS.items():
        here, there = work(ON_CPU), work(ON_GPU)
        roof.plot(here.intensity, here.flop / seconds[name], "o", color=color, label=name)
        roof.plot(there.intensity, attainable(there, H200), "o", color=color, mfc="w")
    roof.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP per byte of memory traffic)")
    roof.set(ylabel="FLOP/s", title=title(H200))
    roof.legend(loc="center right", bbox_to_anchor=(1, 0.56), fontsize=9)
    for axes in (memory, roof):
        axes.grid(alpha=0.3)
    shapes = f"Left: N={N}, D={D}, {CHUNK} tokens a chunk. Right, filled: {tell(ON_CPU)}; hollow: {tell(ON_GPU)}."
    save(figure, path, f"{shapes} Drawn by: {COMMAND}")

    page = path.with_name("README.md")
    write_between(page, "memory", memory_table(peaks))
    write_between(page, "roofline", roofline_table(cpu, seconds))
    print(memory_table(peaks), roofline_table(cpu, seconds), sep="\n\n")


def attainable(work: Work, ceilings: tuple[float, float]) -> float:
    flops, bandwidth = ceilings
    return min(flops, work.intensity * bandwidth)


def draw_roof(axes, ceilings: tuple[float, float], color: str, line: str, label: str) -> None:
    flops, bandwidth = ceilings
    at = [0.5, flops / bandwidth, 2000]
    axes.plot(at, [min(flops, x * bandwidth) for x in at], color=color, ls=line, label=label)


def title(ceilings: tuple[float, float]) -> str:
    bound = [of(ON_GPU).intensity < ceilings[0] / ceilings[1] for of in (of_dense, of_chunked)]
    assert bound == [True, False]
    return "GPU, computed: dense is bound by memory, chunked is not"


def tell(shape: Shape) -> str:
    return f"N={shape.N:,}, D={shape.D:,}, V={shape.V:,}, {shape.chunk} a chunk, {str(shape.dtype)[6:]}"


def memory_table(peaks: dict[str, list[int]]) -> str:
    lines = [
        "| V | the logits, once | " + " | ".join(SIDES) + " | chunked, of dense |",
        "|" + "---|" * (len(SIDES) + 3),
    ]
    for i, V in enumerate(VOCABULARIES):
        cells = [f"{peaks[name][i] / 1e6:.2f}" for name in SIDES]
        share = peaks["chunked"][i] / peaks["dense"][i]
        lines.append(f"| {V:,} | {4e-6 * N * V:.2f} | " + " | ".join(cells) + f" | {100 * share:.1f} % |")
    return "\n".join(lines)


def roofline_table(cpu: tuple[float, float], seconds: dict[str, float]) -> str:
    lines = [
        f"{machine()}: a product of 1,024 x 1,024 matrices at {cpu[0] / 1e9:.1f} GFLOP/s, a copy at"
        f" {cpu[1] / 1e9:.1f} GB/s.",
        "",
        "| | FLOP per byte, CPU shape | GFLOP/s, measured | the roof there | FLOP per byte, GPU shape |"
        " least time on an H200, computed |",
        "|" + "---|" * 6,
    ]
    for name, (work, _) in KERNELS.items():
        here, there = work(ON_CPU), work(ON_GPU)
        lines.append(
            f"| {name} | {here.intensity:.1f} | {here.flop / seconds[name] / 1e9:.1f} |"
            f" {attainable(here, cpu) / 1e9:.1f} | {there.intensity:.1f} |"
            f" {1e3 * there.flop / attainable(there, H200):.2f} ms |"
        )
    return "\n".join(lines)


def write_between(page: Path, name: str, text: str) -> None:
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(Path(__file__).with_name("kernels.png"))
