"""Time and memory of log-probs and entropies on a CPU, dense against chunked: `python -m bench.kernels_cpu`, one core.

Each side scores N tokens over V words and takes the gradients to hidden states and head. Dense is what one writes in
plain torch: hidden @ weight.T, log_softmax, gather, entropy, and autograd. Chunked is kernels.linear_logprob, computing
the logits a second time in the backward pass or, with "kept", holding on to all of them. Memory is the peak of bytes
that torch allocated for it, inputs not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from bench.allocations import Allocations
from bench.timing import machine, one_core
from kernels import linear_logprob

SHAPES = [(4096, 256, 50257), (3000, 96, 20)]  # N, D, V: a real vocabulary, and that of chain arithmetic
ROUNDS = {50257: 5, 20: 200}


def dense(hidden, weight, targets):
    logprobs = (hidden @ weight.T).log_softmax(-1)  # (N, V)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def sides(N: int, D: int, V: int) -> dict:
    """Name -> a function that scores and takes the gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, requires_grad=True)
    weight = torch.randn(V, D, generator=generator).mul_(D**-0.5).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    upstream = list(torch.randn(2, N, generator=generator))

    def side(function, **options):
        def run():
            hidden.grad = weight.grad = None
            torch.autograd.backward(function(hidden, weight, targets, **options), upstream)

        return run

    return {
        "dense": side(dense),
        "chunked": side(linear_logprob),
        "chunked, logits kept": side(linear_logprob, keep_logits_bytes=2**40),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"timed ones (default: {ROUNDS} by V)")
    rounds_given = parser.parse_args().rounds
    one_core()
    print(machine())
    for N, D, V in SHAPES:
        runs = sides(N, D, V)
        peak = {}
        for name, run in runs.items():
            with Allocations() as seen:
                run()
            peak[name] = seen.peak
        seconds = {name: [] for name in runs}
        for _ in range(rounds_given or ROUNDS[V]):  # in turns: whatever slows the machine slows all
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
        print(f"\nN={N} D={D} V={V}\n{'':22}{'seconds':>10}{'of dense':>10}{'peak MB':>10}{'of dense':>10}")
        for name in runs:
            ratio = statistics.median(one / other for one, other in zip(seconds[name], seconds["dense"], strict=True))
            print(
                f"{name:22}{statistics.median(seconds[name]):10.4f}{ratio:10.2f}"
                f"{peak[name] / 1e6:10.2f}{peak[name] / peak['dense']:10.3f}"
            )


if __name__ == "__main__":
    main()
