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
    qk_norm: bool = True  # RMSNorm over each head's query and key, as in Qwen3; Llama and Qwen2 have none
    tied: bool = False  # the head is the embedding

    def __post_init__(self):
        def default(name: str, value: int) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # the dataclass is frozen

        def at_least_one(*names: str) -> None:
            for name in names:
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

        at_least_one("vocab_size", "width", "layers", "heads", "max_context")
        if self.head_width is None and self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of {self.heads} heads: change one or give head_width"
            )
        default("kv_heads", self.heads)
        default("head_width", self.width // self.heads)
        default("ffn", 32 * math.ceil(self.width * 8 / 3 / 32))
        at_least_one("kv_heads", "head_width", "ffn")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_width % 2:
            raise ValueError(f"head_width must be even for rotary positions, not {self.head_width}")


class KVCache:
    """Keys and values of the tokens already read. Each row has a length of its own, so rows need no left padding.

    `lengths` (B,): tokens each row holds, at most `capacity`. Slots at or beyond a row's length may hold anything
    finite: no query sees them, and the next tokens overwrite them. There are as many slots as were needed so far and up
    to `SPARE` more: with slots for the whole capacity, attention would go through memory that nobody has written.

    Training reads through it too: a prompt once, `select` to repeat it for each of its responses, then the responses.
    Gradients pass, since the writing in place falls on the fresh copy that `select` makes.
    """

    SPARE = 32

    def __init__(self, config: GPTConfig, rows: int, capacity: int, like: Tensor):
        nothing = like.new_zeros(rows, config.kv_heads, 0, config.head_width, dtype=attention_dtype(like))
        self.keys, self.values = [nothing] * config.layers, [nothing] * config.layers
        self.lengths = torch.zeros(rows, dtype=torch.long, device=like.device)
        self.capacity = capacity

    @property
    def size(self) -> int:
        """Slots of each row."""
        return self.keys[0].shape[2]

    def make_room(self, size: int) -> None:
        """Have at least that many slots."""
        if size > self.size:
            new = min(size + self.SPARE, self.capacity) - self.size
            self.keys = [F.pad(k, (0, 0, 0, new)) for k in self.keys]  # zeros: 0 * garbage could be NaN
            self.values = [F.pad(v, (0, 0, 0, new)) for v in self.values]

    def slots_of(self, positions: Tensor) -> Tensor:
        """Where tokens at `positions` (B, T) stand in keys and values flattened to (B * K * size, C): (B * K * T)."""
        B, K, size, _ = self.keys[0].shape
        rows = torch.arange(B * K, device=positions.device).view(B, K, 1)
        return (rows * size + positions[:, None]).flatten()

    def append(self, layer: int, key: Tensor, value: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Write (B, K, T, C) keys and values at `place.slots`; returns all that some query may see."""
        keys, values = self.keys[layer], self.values[layer]
        for cached, new in ((keys, key), (values, value)):
            cached.view(-1, new.shape[-1]).index_copy_(0, place.slots, new.flatten(0, 2))
        seen = place.bias.shape[-1]
        return keys[:, :, :seen], values[:, :, :seen]

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the given rows, in that order."""
        self.keys = [k.index_select(0, rows) for k in self.keys]
        self.values = [v.index_select(0, rows) for v in self.values]
        self.lengths = self.lengths[rows]


@dataclass
class Place:
    """Where the tokens of one call stand, shared by all layers."""

    cos: Tensor  # (B or 1, 1, T, C/2)
    sin: Tensor  # (B or 1, 1, T, C/2)
    bias: Tensor | None = None  # (B, 1, T, L) added to the scores: 0, or -inf where a query may not see a key
    slots: Tensor | None = None  # (B * K * T) of the cache, see KVCache.slots_of
    cache: KVCache | None = None


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def attention_dtype(weight: Tensor) -> torch.dtype:
    """Of queries, keys, values and the cache: on a CPU attention is slower in bfloat16 than in float32."""
    return weight.dtype if weight.is_cuda else torch.promote_types(weight.dtype, torch.float32)


class Rotation(torch.autograd.Function):
    """Turns each pair (x_i, x_{i + C/2}) by its angle. The gradient is turned back: a third of the operations, and of
    the memory, that autograd would take."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return Rotation.apply(grad, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, C); cos, sin (B or 1, 1, T, C/2), without gradient."""
    return Rotation.apply(x, cos, sin)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Softmax attention: q (B, H, T, C), k and v (B, K, L, C) -> (B, H, T, C). Each K serves H / K heads. Without
    bias a query sees the keys up to its own."""
    B, H, T, C = q.shape
    K = k.shape[1]
    if T > 1 or q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=K != H)
    # One query a row on a CPU: two small products, four times as fast as the blockwise algorithm.
    q = q.view(B, K, H // K, C) / math.sqrt(C)
    scores = q @ k.transpose(-1, -2)  # (B, K, H / K, L)
    if bias is not None:
        scores += bias
    return (scores.softmax(-1) @ v).view(B, H, T, C)


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
        q, k = rotate(q.to(place.cos.dtype), place.cos, place.sin), rotate(k.to(place.cos.dtype), place.cos, place.sin)
        v = v.to(place.cos.dtype)
        if place.cache is not None:
            k, v = place.cache.append(layer, k, v, place)  # (B, K, L, C)
        y = attend(q, k, v, place.bias)  # (B, H, T, C)
        return self.out(y.transpose(1, 2).reshape(B, T, -1).to(x.dtype))


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
        c, device = self.config, self.head.device
        positions = torch.arange(T, device=device)[None]  # (1, T)
        if cache is not None:
            positions = cache.lengths[:, None] + positions  # (B, T)
        end = T if cache is None else int(positions.max()) + 1
        limit = c.max_context if cache is None else cache.capacity
        if end > limit:
            raise ValueError(f"{end} tokens do not fit: at most {limit} (the model's context, or the cache's capacity)")
        # In float64, then rounded once: at position 10,000 a float32 angle is off by a thousandth.
        frequencies = c.rope_theta ** -(torch.arange(0, c.head_width, 2, device=device).double() / c.head_width)
        angles = positions[:, None, :, None] * frequencies  # (B or 1, 1, T, C/2)
        dtype = attention_dtype(self.head)
        place = Place(angles.cos().to(dtype), angles.sin().to(dtype))
        if cache is not None:
            cache.make_room(end)
            place.cache, place.slots = cache, cache.slots_of(positions)
            # One query a row attends to all slots: its small products take twice as long for a part of a tensor.
            unseen = torch.arange(cache.size if T == 1 else end, device=device) > positions[..., None]  # (B, T, L)
            place.bias = torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, -torch.inf)[:, None]
        return place

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
