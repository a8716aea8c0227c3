"""Sampling speed against transformers' `generate`: `python -m bench.sampler [S] [T]`, on one core.

Both sides sample exactly `new` tokens for each row, from the full distribution at temperature 1, with the same
architecture and size. "grouped": each prompt is answered `group_size` times; "distinct": every row has its own prompt.
`generate` has no notion of a group and reads every row's prompt.
"""

from __future__ import annotations

import sys

import torch

from bench.sizes import SIZES, Size, make_gpt, make_llama, make_prompts
from bench.timing import interleaved, machine, matmul_rate, one_core
from nanorl.sampler import Sampler

ROUNDS = 15


def transformers_sampler(size: Size, prompts: list[list[int]]):
    from transformers import GenerationConfig

    model = make_llama(size).eval()
    model.generation_config.eos_token_id = None  # never stop early
    ids = torch.tensor(prompts)
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None, max_new_tokens=size.new
    )

    def run():
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert out.shape == (size.rows, size.prompt + size.new)

    return run


def main(names: list[str]) -> None:
    one_core()
    print(machine())
    for name in names:
        size = SIZES[name]
        model = make_gpt(size)
        sampler = Sampler(model)
        few, many = make_prompts(size, size.groups), make_prompts(size, size.rows)
        runs = {
            "transformers": transformers_sampler(size, many),
            "grouped": lambda sampler=sampler, few=few, size=size: sampler.generate(
                few, samples_per_prompt=size.group_size, max_new_tokens=size.new, stop_ids=[]
            ),
            "distinct": lambda sampler=sampler, many=many, size=size: sampler.generate(
                many, max_new_tokens=size.new, stop_ids=[]
            ),
        }
        seconds = interleaved(runs, ROUNDS)
        tokens = size.rows * size.new
        weights = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
        floor = 2 * weights * tokens / matmul_rate(size.rows, size.width, size.ffn, torch.float32)
        print(f"\n{name}: {size}\n{'':14}{'seconds':>9}{'tokens/s':>10}{'x floor':>9}{'times faster':>14}")
        for run, spent in seconds.items():
            ratio = seconds["transformers"] / spent
            print(f"{run:14}{spent:9.3f}{tokens / spent:10.0f}{spent / floor:9.2f}{ratio:14.2f}")
        print(f"floor: the decoding matrix products alone, {floor:.3f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or list(SIZES))
