"""The two sizes at which nanorl is compared with what people use, and both sides' models at those sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanorl.model import GPT, GPTConfig, frozen_copy
from nanorl.reward_model import RewardModel


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    groups: int
    group_size: int
    prompt: int  # tokens
    new: int  # tokens
    steps: int  # timed ones of a training loop
    micro_batch: int  # rows of a training step of ours that are scored at a time: it changes time and memory alone

    @property
    def rows(self) -> int:
        return self.groups * self.group_size


SIZES = {
    "S": Size(
        width=256,
        layers=6,
        heads=4,
        ffn=688,
        vocab=512,
        groups=8,
        group_size=8,
        prompt=16,
        new=64,
        steps=8,
        micro_batch=32,
    ),
    "T": Size(
        width=96,
        layers=3,
        heads=4,
        ffn=256,
        vocab=96,
        groups=16,
        group_size=8,
        prompt=12,
        new=24,
        steps=30,
        micro_batch=64,
    ),
}


def make_gpt(size: Size) -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(
            vocab_size=size.vocab,
            width=size.width,
            layers=size.layers,
            heads=size.heads,
            ffn=size.ffn,
            max_context=size.prompt + size.new,
            qk_norm=False,
        )
    )


def make_reference(policy: GPT) -> GPT:
    """Another model than the policy, or the first loss would be log 2 whatever is computed."""
    reference = frozen_copy(policy)
    generator = torch.Generator().manual_seed(2)
    for weight in reference.parameters():
        weight += 0.01 * torch.randn(weight.shape, generator=generator)
    return reference


def make_reward_model(size: Size) -> RewardModel:
    """With a head that is not 0, for the same reason."""
    model = RewardModel.from_policy(make_gpt(size))
    torch.nn.init.normal_(model.score_weight, std=0.1, generator=torch.Generator().manual_seed(2))
    return model


def make_llama(size: Size, *, score: bool = False):
    """The same architecture in transformers; `score`: with a head that says one number."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        intermediate_size=size.ffn,
        vocab_size=size.vocab,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
    )
    return (LlamaForSequenceClassification if score else LlamaForCausalLM)(config)


def make_prompts(size: Size, n: int) -> list[list[int]]:
    """n different prompts of `size.prompt` random ids, none of them a control token."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4, size.vocab, (n, size.prompt), generator=generator).tolist()
