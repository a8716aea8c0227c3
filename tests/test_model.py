import dataclasses

import numpy as np
import pytest
import torch

from nanorl.model import GPT, GPTConfig, KVCache, Place, RMSNorm, SwiGLU, frozen_copy, require_separate, rotate

# What tells the checkpoints apart that must fit: Llama, Qwen2, Qwen3, and plain multi-head attention.
FORMS = {
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "tied": True},
    "qwen3": {"head_width": 10},
    "multi_head": {"kv_heads": 4, "ffn": 48},
    "multi_query": {"kv_heads": 1, "rope_theta": 100.0},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def random_tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(20, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- the forward pass against the formulas, written out in numpy


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turned(x, position, config):
    """x (C,) at `position`: the pair (x_i, x_{i + C/2}) as a complex number, turned by position * theta^(-2i / C)."""
    half = config.head_width // 2
    angles = position * config.rope_theta ** (-2 * np.arange(half) / config.head_width)
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag])


def numpy_hidden(model, tokens):
    """tokens (T,) -> (T, D), one position and one head at a time."""
    c, w = model.config, {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    x = w["embedding.weight"][tokens.numpy()]  # (T, D)
    for layer in range(c.layers):

        def of(name, layer=layer):
            return w[f"blocks.{layer}.{name}"]

        normed = rms_norm(x, of("attention_norm.weight"), c.norm_eps)
        heads = {}
        for name, count in (("query", c.heads), ("key", c.kv_heads), ("value", c.kv_heads)):
            y = normed @ of(f"attention.{name}.weight").T + (of(f"attention.{name}.bias") if c.qkv_bias else 0)
            y = y.reshape(len(x), count, c.head_width)
            if c.qk_norm and name != "value":
                y = rms_norm(y, of(f"attention.{name}_norm.weight"), c.norm_eps)
            heads[name] = y
        attended = np.zeros((len(x), c.heads, c.head_width))
        for t in range(len(x)):
            for h in range(c.heads):
                shared = h // (c.heads // c.kv_heads)
                query = turned(heads["query"][t, h], t, c)
                scores = [query @ turned(heads["key"][s, shared], s, c) / np.sqrt(c.head_width) for s in range(t + 1)]
                weights = np.exp(scores - np.max(scores))
                attended[t, h] = weights / weights.sum() @ heads["value"][: t + 1, shared]
        x = x + attended.reshape(len(x), -1) @ of("attention.out.weight").T
        normed = rms_norm(x, of("ffn_norm.weight"), c.norm_eps)
        gate = normed @ of("ffn.gate.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ of("ffn.up.weight").T)) @ of("ffn.down.weight").T
    return rms_norm(x, w["norm.weight"], c.norm_eps)


@every_form
def test_the_forward_pass_is_the_papers_formulas(tiny_gpt, form):
    model = tiny_gpt(dtype=torch.float64, **form)
    tokens = random_tokens(2, 13)
    hidden = model(tokens)
    for row in range(2):
        np.testing.assert_allclose(hidden[row].detach().numpy(), numpy_hidden(model, tokens[row]), rtol=0, atol=1e-12)


def test_rms_norm_by_hand():
    norm = RMSNorm(2, eps=0.5)
    norm.weight.data = torch.tensor([1.0, 10.0])
    x = norm(torch.tensor([[3.0, 4.0]]))  # mean square 12.5, and 0.5 more: the root is sqrt(13)
    torch.testing.assert_close(x, torch.tensor([[3.0, 40.0]]) / 13**0.5)


def test_swiglu_by_hand():
    layer = SwiGLU(GPTConfig(vocab_size=2, width=2, heads=1, ffn=1))
    for part, weight in ((layer.gate, [[1.0, 0.0]]), (layer.up, [[0.0, 3.0]]), (layer.down, [[1.0], [2.0]])):
        part.weight.data = torch.tensor(weight)
    y = 2 / (1 + np.exp(-2)) * (3 * 5)  # x = (2, 5): silu(2) * 15
    torch.testing.assert_close(layer(torch.tensor([2.0, 5.0])), torch.tensor([y, 2 * y]).float())


def test_rotary_positions_turn_each_half_split_pair_by_its_own_angle():
    model = GPT(GPTConfig(vocab_size=2, width=4, heads=1))
    place = model.place(4, None)
    x = rotate(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]), place.cos[:, :, 3:], place.sin[:, :, 3:])
    # Width 4: the pair (1, 3) turns by 3 * 1 at position 3, the pair (2, 4) by 3 * 0.01.
    expected = [np.cos(3) - 3 * np.sin(3), 2 * np.cos(0.03) - 4 * np.sin(0.03)]
    expected += [3 * np.cos(3) + np.sin(3), 4 * np.cos(0.03) + 2 * np.sin(0.03)]
    np.testing.assert_allclose(x.flatten().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-7), (torch.float64, 1e-11)])
def test_rotary_angles_are_exact_far_into_a_long_context(dtype, tolerance):
    model = GPT(GPTConfig(vocab_size=2, width=8, heads=1, layers=1, max_context=200_000)).to(dtype)
    cache = KVCache(model.config, 2, 200_000, like=model.head)
    cache.lengths += torch.tensor([0, 123_455])
    place = model.place(2, cache)
    angles = 123_456 * 10_000.0 ** -np.array([0, 0.25, 0.5, 0.75])
    np.testing.assert_allclose(place.cos[1, 0, 1].double().numpy(), np.cos(angles), rtol=0, atol=tolerance)
    np.testing.assert_allclose(place.sin[1, 0, 1].double().numpy(), np.sin(angles), rtol=0, atol=tolerance)
    assert (place.bias == 0).sum(-1).flatten().tolist() == [1, 2, 123_456, 123_457]


def test_attention_depends_on_relative_positions_only(tiny_gpt):
    model = tiny_gpt()
    attention = model.blocks[0].attention
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(3))

    everywhere = model.place(96, None)

    def attend(positions):
        cos, sin = everywhere.cos[:, :, positions], everywhere.sin[:, :, positions]
        return attention(x, Place(cos, sin), 0)

    at_the_start = attend(slice(0, 9))
    torch.testing.assert_close(attend(slice(70, 79)), at_the_start, rtol=0, atol=1e-5)
    assert (attend(slice(0, 18, 2)) - at_the_start).abs().max() > 1e-2


# ---- who sees whom


@every_form
@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_a_later_token_changes_no_earlier_hidden_state(tiny_gpt, form, cached):
    model = tiny_gpt(**form)
    tokens = random_tokens(3, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 20

    def hidden(tokens):
        return model(tokens, KVCache(model.config, 3, 12, like=model.head) if cached else None)

    before, after = hidden(tokens), hidden(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-3  # and every later one


@every_form
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_trap_c1_padding_on_the_right_changes_nothing(tiny_gpt, form, dtype, tolerance):
    model = tiny_gpt(dtype=dtype, **form)
    tokens = random_tokens(3, 10)
    alone = model(tokens)
    for amount in (1, 5, 40):
        padded = [model(torch.cat([tokens, torch.full((3, amount), pad_id)], 1))[:, :10] for pad_id in (0, 2, 19)]
        torch.testing.assert_close(padded[0], alone, rtol=0, atol=tolerance)
        assert torch.equal(padded[0], padded[1]) and torch.equal(padded[0], padded[2])


@pytest.mark.parametrize("form", [{}, {"qk_norm": False, "qkv_bias": True}])
def test_grouped_query_attention_is_multi_head_attention_with_repeated_keys_and_values(tiny_gpt, form):
    grouped = tiny_gpt(dtype=torch.float64, kv_heads=2, **form)
    full = GPT(dataclasses.replace(grouped.config, kv_heads=4)).double()
    weights = grouped.state_dict()
    for name in weights:
        if ".key." in name or ".value." in name:  # (2 * 8, ...) -> (4 * 8, ...): each head twice, next to each other
            weights[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = random_tokens(2, 15)
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=0, atol=1e-12)


# ---- the cache


@every_form
@pytest.mark.parametrize("pieces", [[14], [1] * 14, [5, 1, 1, 4, 3]])
@torch.no_grad()
def test_reading_in_pieces_with_a_cache_equals_reading_at_once(tiny_gpt, form, pieces):
    model = tiny_gpt(dtype=torch.float64, **form)
    tokens = random_tokens(3, 14)
    cache = KVCache(model.config, 3, 14, like=model.head)
    hidden = torch.cat([model(part, cache) for part in tokens.split(pieces, 1)], 1)
    torch.testing.assert_close(hidden, model(tokens), rtol=0, atol=1e-12)
    assert cache.lengths.tolist() == [14, 14, 14]


@torch.no_grad()
def test_rows_of_a_cache_grow_independently_and_their_padding_leaves_no_trace(tiny_gpt):
    model = tiny_gpt(dtype=torch.float64)
    tokens = random_tokens(3, 20)
    cache = KVCache(model.config, 3, 20, like=model.head)
    cache.make_room(20)
    for layer in range(2):  # whatever stands in the slots that are not yet written
        cache.keys[layer].fill_(1e3)
        cache.values[layer].fill_(-1e3)
    read = torch.zeros(3, dtype=torch.long)
    hidden = torch.zeros(3, 20, 32, dtype=torch.float64)
    for grow in ([4, 1, 6], [0, 3, 1], [5, 5, 5], [0, 0, 2], [1, 0, 1]):
        width = max(grow)
        part = torch.full((3, width), 17)  # 17: padding
        for row, n in enumerate(grow):
            part[row, :n] = tokens[row, read[row] : read[row] + n]
        out = model(part, cache, torch.tensor(grow))
        for row, n in enumerate(grow):
            hidden[row, read[row] : read[row] + n] = out[row, :n]
        read += torch.tensor(grow)
    assert cache.lengths.tolist() == read.tolist() == [10, 9, 15]
    whole = model(tokens)
    for row, n in enumerate(read.tolist()):
        torch.testing.assert_close(hidden[row, :n], whole[row, :n], rtol=0, atol=1e-12)


@torch.no_grad()
def test_selecting_rows_of_a_cache_repeats_and_reorders_them(tiny_gpt):
    model = tiny_gpt(dtype=torch.float64)
    tokens = random_tokens(3, 9)
    cache = KVCache(model.config, 3, 9, like=model.head)
    model(tokens[:, :8], cache)
    rows = torch.tensor([2, 0, 0])
    cache.select(rows)
    hidden = model(tokens[rows, 8:], cache)
    torch.testing.assert_close(hidden[:, 0], model(tokens)[rows, 8], rtol=0, atol=1e-12)


@torch.no_grad()
def test_trap_c5_too_many_tokens_are_an_error_that_names_both_numbers(tiny_gpt):
    model = tiny_gpt(max_context=16)
    assert model(random_tokens(1, 16)).shape == (1, 16, 32)
    with pytest.raises(ValueError, match="17 tokens do not fit: at most 16"):
        model(random_tokens(1, 17))
    cache = KVCache(model.config, 2, 10, like=model.head)
    model(random_tokens(2, 8), cache, torch.tensor([8, 3]))
    with pytest.raises(ValueError, match="11 tokens do not fit: at most 10"):  # the start counts, not the chunk alone
        model(random_tokens(2, 3), cache)
    assert cache.lengths.tolist() == [8, 3]
    model(random_tokens(2, 2), cache)
    assert cache.lengths.tolist() == [10, 5]


# ---- parameters


def test_norms_biases_and_an_untied_head_are_parameters_only_where_the_form_has_them():
    def names(**form):
        return {name.split("attention.", 1)[-1] for name, _ in GPT(GPTConfig(20, layers=1, **form)).named_parameters()}

    plain = names()
    assert not any("bias" in name for name in plain)
    assert plain - names(qk_norm=False) == {"query_norm.weight", "key_norm.weight"}
    assert names(qkv_bias=True) - plain == {"query.bias", "key.bias", "value.bias"}
    assert plain - names(tied=True) == {"head_weight"}


@pytest.mark.parametrize(
    "form, name",
    [
        ({}, "query_norm.weight"),
        ({}, "key_norm.weight"),
        ({"qkv_bias": True}, "query.bias"),
        ({"qkv_bias": True}, "key.bias"),
        ({"qkv_bias": True}, "value.bias"),
    ],
)
def test_query_key_norms_and_biases_change_the_result(tiny_gpt, form, name):
    model = tiny_gpt(**form)
    tokens = random_tokens(2, 8)
    before = model(tokens)
    # One component alone: a bias that is the same in all components of a key would cancel in the softmax.
    model.get_parameter(f"blocks.0.attention.{name}").data[1] += 3.0
    assert (model(tokens) - before).abs().max() > 1e-2


def test_normed_queries_and_keys_have_no_scale(tiny_gpt):
    tokens = random_tokens(2, 8)
    for qk_norm in (True, False):
        model = tiny_gpt(qk_norm=qk_norm)
        before = model(tokens)
        for block in model.blocks:
            block.attention.query.weight.data *= 10
            block.attention.key.weight.data *= 0.5
        change = (model(tokens) - before).abs().max()
        assert change < 1e-4 if qk_norm else change > 1e-1


def test_a_tied_head_is_the_embedding():
    tied, untied = GPT(GPTConfig(20, tied=True)), GPT(GPTConfig(20))
    assert tied.head is tied.embedding.weight
    assert untied.head is untied.head_weight and untied.head.shape == (20, 96)
    assert untied.head.data_ptr() != untied.embedding.weight.data_ptr()


def test_loading_another_models_weights_makes_the_same_model(tiny_gpt):
    model, other = tiny_gpt(seed=1), tiny_gpt(seed=2)
    tokens = random_tokens(2, 8)
    assert not torch.allclose(model(tokens), other(tokens))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), other(tokens))


@every_form
def test_a_gradient_reaches_every_parameter(tiny_gpt, form):
    model = tiny_gpt(**form)
    (model(random_tokens(2, 8)) @ model.head.T).pow(2).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and torch.isfinite(weight.grad).all() and weight.grad.abs().max() > 0, name


def test_fresh_weights_are_small_and_those_that_write_into_the_residual_stream_smaller():
    torch.manual_seed(0)
    model = GPT(GPTConfig(500, width=128, layers=8, qkv_bias=True))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            assert (weight == 0).all()
        elif weight.dim() == 1:
            assert (weight == 1).all()
        else:
            # Two writers in each of 8 layers: 0.02 / sqrt(16) = 0.005.
            std = 0.005 if ".out." in name or ".down." in name else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.05), name


# ---- the configuration


def test_the_configuration_fills_in_what_follows_from_the_rest():
    config = GPTConfig(vocab_size=17)
    assert (config.kv_heads, config.head_width, config.ffn) == (4, 24, 256)  # 96 * 8 / 3 = 256
    assert GPTConfig(17, width=100, heads=5).ffn == 288  # 266.7, up to a multiple of 32
    assert GPTConfig(17, width=30, heads=4, head_width=6, kv_heads=2, ffn=7).ffn == 7


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"width": 30}, "width 30 is not a multiple of 4 heads"),
        ({"heads": 4, "kv_heads": 3}, r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ({"kv_heads": 8}, r"heads \(4\) must be a multiple of kv_heads \(8\)"),
        ({"head_width": 7}, "head_width must be even for rotary positions, not 7"),
        ({"width": 20}, "head_width must be even for rotary positions, not 5"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, not 0"),
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"kv_heads": 0}, "kv_heads must be at least 1, not 0"),
        ({"max_context": 0}, "max_context must be at least 1, not 0"),
        ({"ffn": -1}, "ffn must be at least 1, not -1"),
        ({"heads": 0}, "heads must be at least 1, not 0"),
        ({"width": -4}, "width must be at least 1, not -4"),
    ],
)
def test_an_impossible_configuration_is_an_error_that_names_the_value(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{"vocab_size": 17} | wrong)


# ---- the reference policy


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_copy_has_its_own_weights_and_never_moves(tiny_gpt, tied):
    policy = tiny_gpt(tied=tied)
    tokens = random_tokens(2, 8)
    reference = frozen_copy(policy)
    before = reference(tokens)
    assert torch.equal(before, policy(tokens))
    assert not any(weight.requires_grad for weight in reference.parameters())
    assert all(weight.requires_grad for weight in policy.parameters())
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 1.0
    assert torch.equal(reference(tokens), before)


def test_a_reference_that_shares_a_weight_or_could_learn_is_an_error(tiny_gpt):
    policy = tiny_gpt()
    with pytest.raises(ValueError, match=r"share the weight head_weight|share the weight embedding\.weight"):
        require_separate(policy, policy)
    reference = frozen_copy(policy)
    reference.norm.weight = policy.norm.weight
    with pytest.raises(ValueError, match=r"share the weight norm\.weight.*frozen_copy\(policy\)"):
        require_separate(policy, reference)
    reference = frozen_copy(policy)
    reference.blocks[1].ffn.up.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"blocks\.1\.ffn\.up\.weight is trainable.*frozen_copy\(policy\)"):
        require_separate(policy, reference)
