"""The policy: a decoder-only transformer in its present-day form.

RMSNorm (Zhang & Sennrich 2019), rotary positions (Su et al. 2021, the half-split layout of Llama), grouped-query
attention (Ainslie et al. 2023) with the options that tell Llama, Qwen2 and Qwen3 apart, SwiGLU (Shazeer 2020).

One forward serves training and cached decoding. It returns hidden states; whoever needs logits or log-probs applies
`model.head` (V, D) himself, so that the (B, T, V) logits need never exist during training.

Shapes: B rows, T tokens of this call, L cached tokens, D width, H heads, K key/value heads, C head width, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int
    width: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int | None = None  # None: one per head; fewer: grouped-query attention
    head_width: int | None = None  # None: width / heads
    ffn: int | None = None  # None: 8/3 of the width, rounded up to a multiple of 32
    max_context: int = 64  # tokens, prompt and response together
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm over each head's query and key
    tied: bool = False  # the head is the embedding

    def __post_init__(self):
        def default(name: str, value: int) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # the dataclass is frozen

        if self.head_width is None and self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of {self.heads} heads: change one or give head_width"
            )
        default("kv_heads", self.heads)
        default("head_width", self.width // self.heads)
        default("ffn", 32 * math.ceil(self.width * 8 / 3 / 32))
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_width", "ffn", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_width % 2:
            raise ValueError(f"head_width must be even for rotary positions, not {self.head_width}")


class KVCache:
    """Keys and values of the tokens already read. Each row has a length of its own, so rows need no left padding.

    `lengths` (B,): tokens each row holds. Slots at or beyond a row's length may hold anything finite: no query sees
    them, and the next tokens overwrite them.
    """

    def __init__(self, config: GPTConfig, rows: int, capacity: int, like: Tensor):
        if capacity > config.max_context:
            raise ValueError(f"a cache of {capacity} tokens exceeds the context of {config.max_context}")
        shape = (config.layers, rows, config.kv_heads, capacity, config.head_width)  # zeros: 0 * garbage could be NaN
        self.keys = list(torch.zeros(shape, dtype=like.dtype, device=like.device))
        self.values = list(torch.zeros(shape, dtype=like.dtype, device=like.device))
        self.lengths = torch.zeros(rows, dtype=torch.long, device=like.device)
        self.capacity = capacity

    def append(self, layer: int, key: Tensor, value: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Write (B, K, T, C) keys and values at `place.positions`; returns all that some query may see."""
        keys, values = self.keys[layer], self.values[layer]
        rows = torch.arange(len(key), device=key.device)[:, None]
        keys[rows, :, place.positions] = key.transpose(1, 2)
        values[rows, :, place.positions] = value.transpose(1, 2)
        seen = place.visible.shape[-1]
        return keys[:, :, :seen], values[:, :, :seen]

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the given rows, in that order."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]
        self.lengths = self.lengths[rows]


@dataclass
class Place:
    """Where the tokens of one call stand, shared by all layers."""

    positions: Tensor  # (B or 1, T)
    cos: Tensor  # (B or 1, 1, T, C/2)
    sin: Tensor  # (B or 1, 1, T, C/2)
    visible: Tensor | None  # (B, 1, T, L) bool: which keys a query may see; None: plainly causal
    cache: KVCache | None


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + C/2}) by its angle. x (B, H, T, C); cos, sin (B or 1, 1, T, C/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        q_width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width
        self.query = nn.Linear(config.width, q_width, bias=config.qkv_bias)
        self.key = nn.Linear(config.width, kv_width, bias=config.qkv_bias)
        self.value = nn.Linear(config.width, kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(q_width, config.width, bias=False)
        normed = config.qk_norm
        self.query_norm = RMSNorm(config.head_width, config.norm_eps) if normed else nn.Identity()
        self.key_norm = RMSNorm(config.head_width, config.norm_eps) if normed else nn.Identity()

    def forward(self, x: Tensor, place: Place, layer: int) -> Tensor:
        B, T, _ = x.shape
        c = self.config
        q = self.query_norm(self.query(x).view(B, T, c.heads, c.head_width)).transpose(1, 2)  # (B, H, T, C)
        k = self.key_norm(self.key(x).view(B, T, c.kv_heads, c.head_width)).transpose(1, 2)  # (B, K, T, C)
        v = self.value(x).view(B, T, c.kv_heads, c.head_width).transpose(1, 2)  # (B, K, T, C)
        q, k = rotate(q, place.cos, place.sin), rotate(k, place.cos, place.sin)
        if place.cache is not None:
            k, v = place.cache.append(layer, k, v, place)  # (B, K, L, C)
        grouped = c.heads != c.kv_heads
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=place.visible, is_causal=place.visible is None, enable_gqa=grouped
        )
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, place: Place, layer: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), place, layer)
        return x + self.ffn(self.ffn_norm(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tied:
            self.head_weight = nn.Parameter(torch.empty(config.vocab_size, config.width))
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_width, 2).double() / config.head_width)
        angles = torch.outer(torch.arange(config.max_context).double(), frequencies)  # (max_context, C/2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self.initialise()

    @property
    def head(self) -> Tensor:
        """(V, D): hidden states times its transpose are the logits."""
        return self.embedding.weight if self.config.tied else self.head_weight

    @torch.no_grad()
    def initialise(self) -> None:
        """Normal with std 0.02; what writes into the residual stream is scaled down by its depth (GPT-2)."""
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02)

    def place(self, T: int, cache: KVCache | None) -> Place:
        positions = torch.arange(T, device=self.cos.device)[None]  # (1, T)
        end, limit, visible = T, self.config.max_context, None
        if cache is not None:
            positions = cache.lengths[:, None] + positions  # (B, T)
            end, limit = int(positions.max()) + 1, cache.capacity
        if end > limit:
            raise ValueError(f"{end} tokens do not fit: at most {limit} (the model's context, or the cache's capacity)")
        if cache is not None:
            visible = (torch.arange(end, device=positions.device) <= positions[..., None])[:, None]  # (B, 1, T, L)
        return Place(positions, self.cos[positions][:, None], self.sin[positions][:, None], visible, cache)

    def forward(self, tokens: Tensor, cache: KVCache | None = None, lengths: Tensor | None = None) -> Tensor:
        """tokens (B, T), padded on the right with any id -> hidden states (B, T, D).

        Attention is causal, so no real token sees the padding behind it. With a cache the tokens continue each row at
        its own length, and the row grows by `lengths` (B,), the number of real tokens in it (None: all T). Raises
        ValueError when they do not fit.
        """
        T = tokens.shape[1]
        place = self.place(T, cache)
        x = self.embedding(tokens)  # (B, T, D)
        for layer, block in enumerate(self.blocks):
            x = block(x, place, layer)
        if cache is not None:
            cache.lengths = cache.lengths + (T if lengths is None else lengths)
        return self.norm(x)


def frozen_copy(model: GPT) -> GPT:
    """The reference policy: the weights as they are now, in storage of their own, without gradients."""
    reference = copy.deepcopy(model).requires_grad_(False)
    require_separate(model, reference)
    return reference


def require_separate(policy: GPT, reference: GPT) -> None:
    """Raises ValueError if the two share a weight or the reference could learn: their KL would stay 0 or drift."""
    own = {weight.data_ptr() for weight in policy.parameters()}
    for name, weight in reference.named_parameters():
        if weight.data_ptr() in own:
            raise ValueError(
                f"policy and reference share the weight {name}: make the reference with frozen_copy(policy)"
            )
        if weight.requires_grad:
            raise ValueError(f"the reference's weight {name} is trainable: make it with frozen_copy(policy)")
