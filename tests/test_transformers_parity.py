"""Llama, Qwen2 and Qwen3 of Hugging Face transformers and our GPT with the same weights are the same function."""

import pytest
import torch

from nanorl.model import GPT, GPTConfig
from nanorl.sampler import Sampler

transformers = pytest.importorskip("transformers", minversion="5.0")  # the first with rope_parameters

# Where Hugging Face's package `kernels` is installed too, transformers imports from the first of that name: ours.
transformers.utils.import_utils.is_kernels_available = lambda *args, **kwargs: False

VOCAB, CONTEXT, THETA, EPS = 50, 64, 5000.0, 1e-5
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Theirs, and what tells it from a Llama in ours.
MODELS = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False),
        {"qk_norm": False},
    ),
    "qwen2": (
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
        {"qk_norm": False, "qkv_bias": True, "tied": True},
    ),
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(**SHAPE, tie_word_embeddings=False, head_dim=12),
        {"head_width": 12},
    ),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [11, 49, 0, 21], [8] * 20, [30, 31]]

# Ours -> theirs; the names inside a block stand behind blocks.N and model.layers.N.
OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head_weight": "lm_head.weight",
}
INNER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}


def their_name(ours: str) -> str:
    if ours in OUTER:
        return OUTER[ours]
    _, layer, name = ours.split(".", 2)
    return f"model.layers.{layer}.{INNER[name]}"


def pair(name: str, dtype: torch.dtype):
    """Their model with random weights, and ours with the same."""
    model_class, config, options = MODELS[name]
    theirs = model_class(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    for weight_name, weight in theirs.named_parameters():
        mean = 1.0 if "norm" in weight_name else 0.0
        torch.nn.init.normal_(weight, mean=mean, std=0.2, generator=generator)
    shape = GPTConfig(
        VOCAB, width=32, layers=3, heads=4, kv_heads=2, ffn=56, max_context=CONTEXT, rope_theta=THETA, norm_eps=EPS
    )
    ours = GPT(GPTConfig(**vars(shape) | {"head_width": 8} | options)).to(dtype)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for weight_name, weight in ours.named_parameters():
            weight.copy_(weights.pop(their_name(weight_name)))
    assert not weights  # each of theirs has found its place
    return theirs, ours


def compute_in_float64(theirs) -> None:
    """Their rotary angles and norms are computed in float32 whatever the dtype; give them all digits."""
    width = theirs.model.layers[0].self_attn.head_dim
    frequencies = THETA ** -(torch.arange(0, width, 2).double() / width)

    def rotary(x, position_ids):
        angles = position_ids[..., None] * frequencies  # (B, T, C/2)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    in_float32 = theirs.model.rotary_emb(torch.zeros(1).double(), torch.arange(CONTEXT)[None])
    for table, exact in zip(in_float32, rotary(None, torch.arange(CONTEXT)[None]), strict=True):
        torch.testing.assert_close(table, exact, rtol=0, atol=1e-5)
    theirs.model.rotary_emb.forward = rotary
    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, norm=module: torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, EPS)


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@torch.no_grad()
def test_logits_equal_those_of_transformers_in_float32(name):
    theirs, ours = pair(name, torch.float32)
    tokens = torch.randint(VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
    logits = ours(tokens) @ ours.head.T
    assert logits.std() > 1
    torch.testing.assert_close(logits, theirs(tokens).logits, rtol=0, atol=1e-5)


@every_model
@torch.no_grad()
def test_logits_equal_those_of_transformers_to_ten_digits_in_float64(name):
    theirs, ours = pair(name, torch.float64)
    compute_in_float64(theirs)
    tokens = torch.randint(VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens) @ ours.head.T, theirs(tokens).logits, rtol=0, atol=1e-10)


@every_model
@pytest.mark.parametrize("cached", [True, False])
@torch.no_grad()
def test_greedy_tokens_of_a_ragged_batch_are_those_of_transformers_one_by_one(name, cached):
    theirs, ours = pair(name, torch.float32)
    rollout = Sampler(ours, cached=cached).generate(PROMPTS, max_new_tokens=30, stop_ids=[], greedy=True)
    for prompt, response in zip(PROMPTS, rollout.tokens.tolist(), strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30)
        assert out[0, len(prompt) :].tolist() == response
