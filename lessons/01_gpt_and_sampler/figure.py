"""Draws the figure of lesson 01 from measurements on one core, about three minutes.

    python lessons/01_gpt_and_sampler/figure.py

Time is CPU time: what the process computes, not what it waits while others compute. All cases are measured in turn,
several times, and medians are drawn.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import with_cache
import without_cache

from nanorl.model import GPT, GPTConfig, KVCache
from nanorl.plots import save

PROMPT, NEW = 8, 504  # tokens
REPEATS = 7  # of a whole generation, for each of the two files
NEIGHBORS = 9  # positions whose median makes a point of the curve
CONTEXT = 256  # tokens already read, in the right panel
SHORT_REPEATS = 31  # of a single forward call, in the right panel
GENERATE = {"without cache": without_cache.generate, "with cache": with_cache.generate}
COLORS = {"without cache": "tab:red", "with cache": "tab:blue"}
COMMAND = "python lessons/01_gpt_and_sampler/figure.py"


def generation(model: GPT, generate: Callable) -> tuple[list[float], list[int]]:
    """Seconds from one token to the next (NEW), and tokens passed through the model for each (NEW)."""
    began, read = [], []

    def note(module, args) -> None:
        began.append(time.process_time())
        read.append(args[0].numel())

    hook = model.register_forward_pre_hook(note)
    generate(model, [list(range(PROMPT))], NEW, stop_id=-1)  # greedy, never stops
    began.append(time.process_time())
    hook.remove()
    return [b - a for a, b in itertools.pairwise(began)], read


def smooth(values: list[float]) -> list[float]:
    """The median of each position and its neighbors."""
    half = NEIGHBORS // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def readings(model: GPT) -> dict[str, tuple[int, Callable]]:
    """Name -> (tokens that one call reads, the call): a prompt at once, or the next token of several responses."""

    def prefill() -> None:
        model(torch.zeros(1, CONTEXT, dtype=torch.long), KVCache(model.config, 1, CONTEXT, like=model.head))

    def decode(rows: int) -> Callable:
        cache = KVCache(model.config, rows, CONTEXT + 1, like=model.head)
        cache.lengths += CONTEXT
        token = torch.zeros(rows, 1, dtype=torch.long)

        def call() -> None:
            model(token, cache)
            cache.lengths -= 1

        return call

    cases = {f"prefill,\n{CONTEXT}\ntokens": (CONTEXT, prefill)}
    for rows in (1, 8, 64):
        cases[f"decode,\n{rows} row" + "s" * (rows > 1)] = (rows, decode(rows))
    return cases


@torch.inference_mode()
def tokens_per_second(model: GPT) -> dict[str, float]:
    cases = readings(model)
    seconds = {name: [] for name in cases}
    for _ in range(SHORT_REPEATS):
        for name, (_, call) in cases.items():
            began = time.process_time()
            call()
            seconds[name].append(time.process_time() - began)
    return {name: tokens / statistics.median(seconds[name]) for name, (tokens, _) in cases.items()}


def draw(path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=512, width=192, layers=4, heads=4, max_context=PROMPT + NEW))
    rates = tokens_per_second(model)
    measured = {name: [] for name in GENERATE}
    for _ in range(REPEATS):
        for name, generate in GENERATE.items():
            seconds, read = generation(model, generate)
            measured[name].append((seconds, read))

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.4), width_ratios=[4, 4, 3.4])
    positions = range(PROMPT, PROMPT + NEW)
    growth = {}
    for name, color in COLORS.items():
        times = [statistics.median(times) * 1e3 for times in zip(*(s for s, _ in measured[name]), strict=True)]
        drawn = smooth(times)
        left.plot(positions, drawn, color=color, label=name)
        passed = torch.tensor(measured[name][0][1]).cumsum(0)
        middle.plot(positions, passed / 1000, color=color, label=f"{name}: {passed[-1]:,} in all")
        early, late = statistics.median(times[32:64]), statistics.median(times[-32:])
        growth[name] = late / early
        print(f"{name}: {passed[-1]:,} tokens read, {sum(times) / 1e3:.2f} s in all")
        print(f"    positions {PROMPT + 32} to {PROMPT + 63}: {early:.2f} ms, the last 32: {late:.2f} ms")
    left.set(title="Time", xlabel="position of the new token", ylabel="CPU time per token (ms)", ylim=(0, None))
    middle.set(title="Work", xlabel="position of the new token", ylabel="tokens read so far (thousands)")
    left.legend(loc="upper left")
    middle.legend(loc="upper left")
    bars = right.bar(range(len(rates)), list(rates.values()), color=["0.5", *["tab:blue"] * 3])
    right.bar_label(bars, fmt="{:,.0f}", fontsize=9)
    right.set_xticks(range(len(rates)), list(rates), fontsize=9)
    right.set(title="Many tokens in one call", ylabel="tokens per second of CPU time")
    right.margins(y=0.12)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(
        f"Without a cache, token 500 takes {growth['without cache']:.0f} times as long as token 50; "
        f"with one, {growth['with cache']:.1f} times"
    )
    parameters = sum(weight.numel() for weight in model.parameters())
    save(
        figure,
        path,
        f"One row, greedy; a GPT of {parameters / 1e6:.1f} M parameters, float32, one CPU core; medians of {REPEATS} "
        f"interleaved runs and of {NEIGHBORS} neighbors. Drawn by: {COMMAND}",
    )
    for name, rate in rates.items():
        print(name.replace("\n", " "), f"{rate:,.0f} tokens/s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(Path(__file__).with_name("time_per_token.png"))
