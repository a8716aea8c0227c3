"""TRL's trainers beside ours: the same weights, the same ids, and turns inside their own training loop."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_DISABLED", "true")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import torch

from bench.sizes import Size
from bench.timing import bf16_instructions
from nanorl.model import GPT

WARMUP = 2  # steps that are not counted
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU_TIME = "count the processor's seconds instead of the clock's: steadier on a busy machine"
EOS = 2
CONTROL = ["<pad>", "<bos>", "<eos>", "<unk>"]
INSIDE_BLOCK = {  # ours -> Llama's in transformers
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head_weight": "lm_head.weight",
    "score_weight": "score.weight",
}


def precisions() -> Iterator[tuple[str, bool]]:
    """What is timed: our dtype, and whether TRL takes bfloat16. Against bfloat16 of ours both of TRL's,
    of which the faster counts."""
    yield "float32", False
    if bf16_instructions():
        yield from (("bfloat16", False), ("bfloat16", True))


@torch.no_grad()
def copy_weights(ours: GPT, theirs: torch.nn.Module) -> torch.nn.Module:
    """Make `theirs`, a Llama of transformers, the same function as `ours`; returns it."""
    weights = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        if name in OUTSIDE:
            their_name = OUTSIDE[name]
        else:
            _, layer, inside, kind = *name.split(".", 2)[:2], *name.split(".", 2)[2].rsplit(".", 1)
            their_name = f"model.layers.{layer}.{INSIDE_BLOCK[inside]}.{kind}"
        weights.pop(their_name).copy_(weight)
    if weights:
        raise ValueError(f"nothing was copied to {', '.join(weights)}")
    return theirs


def make_tokenizer(size: Size):
    """A word for each id, w4 for 4, words standing apart by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = CONTROL + [f"w{i}" for i in range(len(CONTROL), size.vocab)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def in_turns(
    make_trainer: Callable[[Any], Any], run: Callable[[int], object], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Train with `make_trainer(callback)` to its end, and after each of its steps do `run(step)`: seconds of each."""
    from transformers import PrinterCallback, TrainerCallback

    seconds = {"nanorl": [], "trl": []}

    class Turns(TrainerCallback):
        def on_train_begin(self, *_, **__):
            gc.collect()
            gc.freeze()  # collections would otherwise search all that was imported, in whoever's turn it is
            self.began = clock()

        def on_step_end(self, args, state, *_, **__):
            seconds["trl"].append(clock() - self.began)
            began = clock()
            run(len(seconds["nanorl"]))
            self.began = clock()
            seconds["nanorl"].append(self.began - began)

    trainer = make_trainer(Turns())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return seconds
