"""Generation with a cache: the model reads each prompt once, then only the token it has just written.

python lessons/01_gpt_and_sampler/with_cache.py
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for a checkout that is not installed

from nanorl.model import GPT, GPTConfig, KVCache
from nanorl.rollout import pad


@torch.inference_mode()
def generate(
    model: GPT, prompts: list[list[int]], new_tokens: int, stop_id: int, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, T), their log-probs (B, T) and the mask (B, T). `uniforms` (B, new_tokens) in [0, 1); None: greedy."""
    rows = torch.arange(len(prompts))
    open_ = torch.ones(len(prompts), dtype=torch.bool)  # (B,) no stop token yet
    written = []
    cache = KVCache(model.config, len(prompts), max(map(len, prompts)) + new_tokens, like=model.head)
    tokens, lengths = pad(prompts, model.head.device)  # what is to be read: (B, L), (B,)
    for t in range(new_tokens):
        hidden = model(tokens, cache, lengths)  # (B, L, D)
        logits = hidden[rows, lengths - 1] @ model.head.T  # (B, V): behind each row's last real token
        logprobs = logits.log_softmax(-1)
        if uniforms is None:
            chosen = logprobs.argmax(-1)  # (B,)
        else:  # inverse CDF: the first token whose cumulative probability exceeds the uniform number
            cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
            chosen = torch.searchsorted(cdf, uniforms[:, t, None] * cdf[:, -1:], right=True).squeeze(1)
        written.append((chosen * open_, logprobs[rows, chosen] * open_, open_))
        open_ = open_ & (chosen != stop_id)
        if not open_.any():
            break
        tokens, lengths = chosen[:, None], torch.ones_like(lengths)
    return tuple(torch.stack(columns, dim=1) for columns in zip(*written, strict=True))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(GPTConfig(vocab_size=100, width=128, max_context=512))  # fresh weights: it writes nonsense
    read = []
    model.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    began = time.process_time()
    tokens, _, _ = generate(model, [[1, 2, 3, 4]], 300, stop_id=-1, uniforms=torch.rand(1, 300).double())  # never stops
    seconds = time.process_time() - began
    print(f"{tokens.shape[1]} new tokens, {sum(read)} read, {seconds:.1f} s; the last ones:", *tokens[0, -8:].tolist())
