"""The kernels on a GPU, in one run of about eight minutes: `python -m bench.kernels_gpu`; prints Markdown.

1. Ceilings of this card: the bandwidth of a copy, and the matrix products of each shape. The goals are ratios to them.
2. Right first: every pair of conditions of tests/kernel_matrix.py, float64 at the real vocabularies, and the bits of a
   row in other company.
3. Medians and peak memory of scoring and training, beside plain torch, torch.compile, Liger, cut-cross-entropy and
   flash-linear-attention as far as they can be imported (pip install liger-kernel cut-cross-entropy fla-core). What
   they compute is less: no entropy, and a loss of their own instead of any.

Without a GPU it says so. `--rehearse` walks through everything on a CPU, at tiny shapes, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", str(int("--rehearse" in sys.argv)))  # read when a kernel is defined

import torch

from bench.allocations import Allocations
from kernels import flash_logprob, linear_kl, linear_logprob, reference, rows

REHEARSE = "--rehearse" in sys.argv
DEVICE = "cpu" if REHEARSE else "cuda"
DTYPE = torch.float32 if REHEARSE else torch.bfloat16  # a CPU's products are float32
SHAPES = [(40, 24, 300)] if REHEARSE else [(8192, D, 151936) for D in (1024, 2048, 4096)] + [(8192, 1024, 50257)]
SECONDS_EACH = 0.1 if REHEARSE else 1.2  # of measuring one thing, warming up not counted
SECONDS_IN_ALL = 450  # after that only what is ours is measured
GIB = 2**30
BEGAN = time.perf_counter()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(run) -> tuple[float, float]:
    """Median milliseconds, and GiB allocated at the peak beyond what was there before."""
    for _ in range(2):
        run()
    gc.collect()
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with Allocations() as seen:
            run()
        peak = seen.peak
    times = []
    until = time.perf_counter() + SECONDS_EACH
    while len(times) < 3 or (time.perf_counter() < until and len(times) < 50):
        if DEVICE == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times), peak / GIB


def inputs(N: int, D: int, V: int):
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, device=DEVICE).to(DTYPE)
    weight = (torch.randn(V, D, generator=generator, device=DEVICE) * 2 / D**0.5).to(DTYPE)
    targets = torch.randint(0, V, (N,), generator=generator, device=DEVICE)
    upstream = torch.randn(2, N, generator=generator, device=DEVICE)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, upstream


def mixed_mm(a, b):
    return torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


# 1. Ceilings.


def matmuls(N: int, D: int, V: int) -> tuple[float, float]:
    """Milliseconds of the forward product, and of that with the two of the backward pass, 2048 tokens at a time."""
    hidden, weight, _, _ = (x.detach() for x in inputs(N, D, V))
    chunk = min(2048, N)
    grad = rows.empty_logits(chunk, V, weight, DTYPE).zero_()
    forward = measure(lambda: [mixed_mm(h, weight.T) for h in hidden.split(chunk)])[0]
    backward = measure(lambda: [(grad[: len(h)] @ weight, mixed_mm(grad[: len(h)].T, h)) for h in hidden.split(chunk)])[
        0
    ]
    return forward, forward + backward


def row_kernels(goals: list) -> None:
    """Bandwidth of the row kernels against that of a copy."""
    C, V = (8, 300) if REHEARSE else (2048, 151936)
    logits = rows.empty_logits(C, V, torch.empty(0, device=DEVICE)).normal_()
    targets = torch.zeros(C, dtype=torch.long, device=DEVICE)
    copy = torch.empty_like(logits)
    results = rows.rows_forward(logits, targets)
    ones = torch.ones(C, device=DEVICE)
    size = logits.numel() * 4
    ours = {
        "a copy": (2 * size, lambda: copy.copy_(logits)),
        "rows_forward": (size, lambda: rows.rows_forward(logits, targets)),
        "rows_forward with KL": (2 * size, lambda: rows.rows_forward(logits, targets, copy)),
        "rows_backward": (2 * size, lambda: rows.rows_backward(logits, targets, results, ones, ones, out=copy)),
    }
    print(f"\n| rows of {V} float32 logits | TB/s | of a copy |\n|---|---|---|")
    ceiling = None
    for name, (bytes_, run) in ours.items():
        rate = bytes_ / measure(run)[0] / 1e9
        ceiling = ceiling or rate
        print(f"| {name} | {rate:.3f} | {rate / ceiling:.2f} |")
        if name in ("rows_forward", "rows_backward"):
            goals.append((f"{name}: share of a copy's bandwidth", rate / ceiling, ">=", 0.85))


# 2. Right first.


def check_matrix() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from kernel_matrix import assert_agree, cases, gradients, make, truth

    torch.use_deterministic_algorithms(True, warn_only=True)  # new, empty tensors hold NaN
    some = cases()[::7] if REHEARSE else cases()
    for case in some:
        logits, ref_logits, targets, upstream = (x.to(DEVICE) for x in make(case.logits, case.N, case.V))
        options = {"temperature": case.temperature, "softcap": case.softcap}
        values, grad = truth(logits, ref_logits, targets, upstream, case)
        results = rows.rows_forward(logits, targets, ref_logits, **options)
        of_ours = rows.rows_backward(logits, targets, results, *gradients(upstream, case), ref_logits, **options)
        assert_agree(results, of_ours, values, grad)
    torch.use_deterministic_algorithms(False)
    print(f"\nRow kernels within 1e-5 of float64 in {len(some)} of the {len(cases())} cases of tests/kernel_matrix.py.")


def check_shape(N: int, D: int, V: int) -> None:
    """Against float64 on a few rows, and the bits of a row under other chunks and beside other rows."""
    some = min(N, 256)
    hidden, weight, targets, upstream = inputs(N, D, V)

    def run(function, h, w, **options):
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
        values = function(h, w, targets[:some], **options)[:2]
        torch.autograd.backward(values, list(upstream[:, :some].to(values[0].dtype)))
        return [x.detach().double() for x in (*values, h.grad, w.grad)]

    exact = run(reference.linear_logprob, hidden[:some].double(), weight.double())
    for function in (linear_logprob, flash_logprob):
        found = run(function, hidden[:some], weight)
        off = [(one - other).abs().max().item() for one, other in zip(found[:2], exact[:2], strict=True)]
        off += [((one - other).norm() / other.norm()).item() for one, other in zip(found[2:], exact[2:], strict=True)]
        print(f"| {D}, {V} | {function.__name__} | " + " | ".join(f"{x:.1e}" for x in off) + " |", flush=True)
        assert max(off[:2]) < 1e-3 and max(off[2:]) < 1e-2, off
    del exact, found
    with torch.no_grad():
        whole = linear_logprob(hidden, weight, targets)[0]
        for function, options in ((linear_logprob, {"chunk": 512}), (linear_logprob, {}), (flash_logprob, {})):
            base = flash_logprob(hidden, weight, targets)[0] if function is flash_logprob else whole
            order = torch.randperm(N, device=DEVICE)[: N // 2 + 3]
            same = torch.equal(base[order], function(hidden[order], weight, targets[order], **options)[0])
            print(f"| | {function.__name__} {options or ''} | same bits beside other rows: {same} | | | |", flush=True)


# 3. Beside others. Each side is a function of the inputs; one that cannot run here says why.


def naive(hidden, weight, targets):
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def naive_with_entropy(hidden, weight, targets):
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def liger_cross_entropy(hidden, weight, targets):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, weight, targets)


def liger_grpo(chunk: int):
    def run(hidden, weight, targets):
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        B = max(1, len(hidden) // 512)  # sequences; the chunk is counted in them
        loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, chunk_size=chunk)
        ids = targets.view(B, -1)
        advantages = torch.linspace(-1, 1, B, device=DEVICE)
        return loss(hidden.view(B, ids.shape[1], -1), weight, ids, torch.ones_like(ids), advantages)[0]

    return run


def cut_cross_entropy(hidden, weight, targets):
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, targets, reduction="none")


def fla_cross_entropy(hidden, weight, targets):
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    return fused_linear_cross_entropy_loss(hidden, targets, weight)


def scoring(function):
    def run(hidden, weight, targets, upstream):
        with torch.no_grad():
            function(hidden, weight, targets)

    return run


def training(function, **options):
    def run(hidden, weight, targets, upstream):
        hidden.grad = weight.grad = None
        values = function(hidden, weight, targets, **options)
        values = values if isinstance(values, tuple) else (values,)
        gradients = [g if v.dim() else torch.ones_like(v) for v, g in zip(values, upstream, strict=False)]
        torch.autograd.backward(values, [g.to(v.dtype) for v, g in zip(values, gradients, strict=True)])

    return run


def with_itself(hidden, weight, targets):
    return linear_kl(hidden, weight, hidden.detach(), weight.detach(), targets)


OURS = {
    ("score with entropy", "linear_logprob"): scoring(linear_logprob),
    ("score with entropy", "flash_logprob"): scoring(flash_logprob),
    ("train", "linear_logprob, logits kept"): training(linear_logprob, keep_logits_bytes=2**40),
    ("train", "linear_logprob, logits computed twice"): training(linear_logprob, keep_logits_bytes=0),
    ("train", "flash_logprob"): training(flash_logprob),
    ("train", "linear_kl"): training(with_itself),
}
OTHERS = {
    ("score", "torch"): scoring(naive),
    ("score", "cut-cross-entropy"): scoring(cut_cross_entropy),
    ("score with entropy", "torch"): scoring(naive_with_entropy),
    ("train", "torch"): training(naive_with_entropy),
    ("train", "cut-cross-entropy"): training(cut_cross_entropy),
    ("train", "Liger cross-entropy"): training(liger_cross_entropy),
    **{("train", f"Liger GRPO, chunk {n}"): training(liger_grpo(n)) for n in (1, 4)},
    ("train", "fla cross-entropy"): training(fla_cross_entropy),
}
if not REHEARSE:
    OTHERS[("score", "torch.compile")] = scoring(torch.compile(naive))
    OTHERS[("score with entropy", "torch.compile")] = scoring(torch.compile(naive_with_entropy))
    OTHERS[("train", "torch.compile")] = training(torch.compile(naive_with_entropy))


def beside_others(shape: tuple[int, int, int], goals: list) -> None:
    N, D, V = shape
    forward, three = matmuls(*shape)
    products = {"score": forward, "score with entropy": forward, "train": three}
    print(f"| {N}, {D}, {V} | products alone | forward, all three | {forward:.2f}, {three:.2f} | 1.00 | |", flush=True)
    arguments = inputs(*shape)
    spent = {}
    for (task, side), run in (OURS | OTHERS).items():
        if (task, side) in OTHERS and time.perf_counter() - BEGAN > SECONDS_IN_ALL:
            continue
        try:
            spent[task, side] = ms, peak = measure(lambda run=run: run(*arguments))
            print(f"| | {task} | {side} | {ms:.2f} | {ms / products[task]:.2f} | {peak:.2f} |", flush=True)
        except Exception as error:  # of any library, whatever it is
            print(f"| | {task} | {side} | {type(error).__name__}: {str(error).splitlines()[0][:60]} | | |", flush=True)
        arguments[0].grad = arguments[1].grad = None
        if DEVICE == "cuda":
            torch.cuda.empty_cache()

    def goal(what: str, found: float, sign: str, bound: float) -> None:
        goals.append((f"{D}, {V}: {what}", found, sign, bound))

    of_d = {1024: (1.45, 1.4), 2048: (1.3, 1.3), 4096: (1.15, 1.2)}.get(D, (1.45, 1.4))
    score, flash = spent["score with entropy", "linear_logprob"], spent["score with entropy", "flash_logprob"]
    kept, twice = (spent["train", f"linear_logprob, logits {how}"] for how in ("kept", "computed twice"))
    goal("score with entropy / one product", score[0] / forward, "<=", of_d[0])
    goal("train, logits kept / three products", kept[0] / three, "<=", of_d[1])
    goal("train, computed twice / four products", twice[0] / (three + forward), "<=", of_d[1])
    goal("train, GiB beyond the weight's gradient in float32", twice[1] - 4 * V * D / GIB, "<=", 2.0)
    goal("flash, score / one product", flash[0] / forward, "<=", 1.6)
    goal("flash, score: share of the memory of the logits", flash[1] * GIB / (2 * N * V), "<=", 0.01)
    liger = [ms for (_, side), (ms, _) in spent.items() if side.startswith("Liger GRPO")]
    if liger:
        goal("times faster than Liger's GRPO at its best chunk", min(liger) / kept[0], ">=", 5.0)


def header() -> None:
    def version(package: str) -> str:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{package} not installed"

    card = "a rehearsal on a CPU, in Triton's interpreter: no figure below is one"
    if not REHEARSE:
        card = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    packages = ("torch", "triton", "liger-kernel", "cut-cross-entropy", "fla-core")
    print(f"{card}; {', '.join(version(package) for package in packages)}; {datetime.date.today()}")
    print("`python -m bench.kernels_gpu`, bfloat16 inputs, medians.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU, in Triton's interpreter")
    parser.parse_args()
    if not REHEARSE and not torch.cuda.is_available():
        sys.exit("bench.kernels_gpu measures a GPU, and torch finds none here; --rehearse walks through it on a CPU")
    goals: list[tuple[str, float, str, float]] = []
    header()
    check_matrix()
    print("\n| D, V | | log-prob | entropy | d hidden | d weight |\n|---|---|---|---|---|---|")
    for shape in SHAPES:
        check_shape(*shape)
    print("\nLargest differences from float64; of gradients the relative norm of the difference.")
    row_kernels(goals)
    print("\n| N, D, V | | | ms | of the products | peak GiB |\n|---|---|---|---|---|---|")
    for shape in SHAPES:
        beside_others(shape, goals)
    print("\n| goal | found | wanted | |\n|---|---|---|---|")
    for what, found, sign, bound in goals:
        met = found <= bound if sign == "<=" else found >= bound
        print(f"| {what} | {found:.3f} | {sign} {bound:g} | {'met' if met else 'missed'} |")
    print(f"\n{time.perf_counter() - BEGAN:.0f} seconds in all.")


if __name__ == "__main__":
    main()
