"""Which weight is learned by which optimizer, at which rate."""

import copy
import itertools
import math

import pytest
import torch

from nanorl.errors import RunError
from nanorl.model import GPT, GPTConfig
from nanorl.optimizers import Muon, Optimizers, orthogonalize, schedule

GOOD, NAN, INF = torch.tensor(1.0), torch.tensor(math.nan), torch.tensor(math.inf)


def small_model(**config) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{"vocab_size": 6, "width": 8, "layers": 1, "heads": 2, "max_context": 8} | config))


def set_gradients(model: GPT, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = scale * torch.randn(weight.shape, generator=generator)


def names(model: GPT, optimizer: torch.optim.Optimizer) -> list[str]:
    name = {id(weight): name for name, weight in model.named_parameters()}
    return [name[id(weight)] for group in optimizer.param_groups for weight in group["params"]]


def test_muon_learns_the_matrices_of_the_blocks_and_adamw_everything_else():
    model = small_model(qkv_bias=True)
    adamw, muon = Optimizers(model, 0.01).parts
    assert isinstance(muon, Muon) and isinstance(adamw, torch.optim.AdamW)
    attention, ffn = "blocks.0.attention", "blocks.0.ffn"
    assert set(names(model, muon)) == {
        f"{attention}.query.weight",
        f"{attention}.key.weight",
        f"{attention}.value.weight",
        f"{attention}.out.weight",
        f"{ffn}.gate.weight",
        f"{ffn}.up.weight",
        f"{ffn}.down.weight",
    }
    assert set(names(model, adamw)) == {
        "embedding.weight",
        "head_weight",
        "norm.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.ffn_norm.weight",
        f"{attention}.query_norm.weight",
        f"{attention}.key_norm.weight",
        f"{attention}.query.bias",
        f"{attention}.key.bias",
        f"{attention}.value.bias",
    }


@pytest.mark.parametrize("config", [{}, {"tied": True}, {"layers": 3, "qkv_bias": True, "qk_norm": False}])
def test_every_weight_has_exactly_one_optimizer(config):
    model = small_model(**config)
    optimizers = Optimizers(model, 0.01)
    learned = [id(w) for part in optimizers.parts for group in part.param_groups for w in group["params"]]
    assert sorted(learned) == sorted(id(w) for w in model.parameters())
    assert sorted(map(id, optimizers.weights)) == sorted(learned)


def test_the_first_step_of_adamw_is_the_learning_rate_in_each_coordinate():
    model = small_model()
    before = model.head_weight.detach().clone()
    optimizers = Optimizers(model, 0.01)
    set_gradients(model, 1)
    optimizers.step(rate=0.5)
    expected = before - 0.5 * 0.01 * model.head_weight.grad.sign()
    assert torch.allclose(model.head_weight, expected, atol=1e-7, rtol=0)


def test_a_step_of_muon_is_equally_large_in_every_direction_and_as_large_as_one_of_adamw():
    model = small_model(width=16, heads=2, ffn=16)
    matrix = model.blocks[0].ffn.up.weight  # 16 x 16
    before = matrix.detach().clone()
    optimizers = Optimizers(model, 0.01)
    set_gradients(model, 2)
    optimizers.step()
    update = (before - matrix.detach()).double()
    # Orthogonal times 0.2 sqrt(16) (Liu et al. 2025, eq. 4); Newton-Schulz hits 1 within a third.
    sizes = torch.linalg.svdvals(update) / (0.01 * 0.2 * math.sqrt(16))
    assert 0.6 < sizes.min() and sizes.max() < 1.3
    assert torch.linalg.svdvals(matrix.grad.double()).max() > 5 * torch.linalg.svdvals(matrix.grad.double()).min()


def test_there_is_no_weight_decay():
    model = small_model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizers = Optimizers(model, 0.1)
    set_gradients(model, 0, scale=0.0)
    optimizers.step()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_step_at_rate_zero_changes_no_weight():
    model = small_model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizers = Optimizers(model, 0.1)
    set_gradients(model, 0)
    optimizers.step(0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_restored_optimizers_take_the_same_next_step():
    model = small_model()
    optimizers = Optimizers(model, 0.01)
    for seed in range(3):
        set_gradients(model, seed)
        optimizers.step()
    other = small_model()
    other.load_state_dict(model.state_dict())
    restored = Optimizers(other, 0.01)
    restored.load_state_dict(copy.deepcopy(optimizers.state_dict()))  # torch keeps the tensors it is given
    fresh = small_model()
    fresh.load_state_dict(model.state_dict())
    for each, its in ((model, optimizers), (other, restored), (fresh, Optimizers(fresh, 0.01))):
        set_gradients(each, 9)
        its.step(0.7)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, other.get_parameter(name))
        assert not torch.equal(weight, fresh.get_parameter(name))  # the moments matter


def test_a_state_of_other_optimizers_is_refused():
    optimizers = Optimizers(small_model(), 0.01)
    with pytest.raises(ValueError):
        optimizers.load_state_dict({**optimizers.state_dict(), "parts": []})


def test_gradients_are_scaled_down_to_a_common_norm_of_one():
    model = small_model()
    optimizers = Optimizers(model, 0.01)
    set_gradients(model, 3)
    before = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in before.values()))
    assert float(optimizers.update(GOOD, rate=0.0)) == pytest.approx(norm, rel=1e-6)
    for name, weight in model.named_parameters():
        assert torch.allclose(weight.grad, before[name] / norm, rtol=1e-5, atol=0)


def test_gradients_below_the_limit_keep_every_bit():
    model = small_model()
    optimizers = Optimizers(model, 0.01)
    set_gradients(model, 3, scale=1e-3)
    before = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    assert float(optimizers.update(GOOD, rate=0.0)) < 1
    assert all(torch.equal(weight.grad, before[name]) for name, weight in model.named_parameters())


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    model = small_model()
    optimizers = Optimizers(model, 0.01)
    for value in (math.nan, math.inf, -math.inf):
        set_gradients(model, 3)
        model.blocks[0].ffn.down.weight.grad[0, 0] = value
        assert not math.isfinite(optimizers.update(GOOD, rate=0.0))


def test_zero_grad_forgets_all_gradients():
    model = small_model()
    set_gradients(model, 0)
    Optimizers(model, 0.01).zero_grad()
    assert all(weight.grad is None for weight in model.parameters())


def test_the_rate_is_constant_and_then_falls_linearly_over_the_last_steps():
    assert [schedule(step, 10, decay=0.4) for step in range(10)] == [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert [schedule(step, 4, decay=1.0) for step in range(4)] == [1, 0.75, 0.5, 0.25]


def test_the_learning_rate_rises_over_the_warmup_before_it_falls():
    assert [schedule(step, 8, decay=0.5, warmup=4) for step in range(8)] == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]
    assert [schedule(step, 4, decay=1.0, warmup=4) for step in range(4)] == [0.25, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.4, 1.0])
def test_the_rate_never_rises_and_never_reaches_zero(steps, share):
    rates = [schedule(step, steps, decay=share) for step in range(steps)]
    assert rates[0] <= 1 and all(a >= b for a, b in itertools.pairwise(rates)) and rates[-1] > 0
    if share == 0:
        assert set(rates) == {1.0}


# ---- Muon


def test_muon_takes_the_step_of_torchs_muon_up_to_its_bfloat16():
    torch.manual_seed(0)
    for shape in ((16, 16), (24, 8), (8, 24)):
        ours, theirs = (torch.nn.Parameter(w) for w in torch.randn(shape).expand(2, *shape).clone())
        muon = Muon([ours], lr=0.01)
        reference = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            ours.grad = torch.randn(shape)
            theirs.grad = ours.grad.clone()
            before = ours.detach().clone()
            muon.step()
            reference.step()
            step = (ours - before).norm()
            assert (ours - theirs).norm() < 0.03 * step
            theirs.data.copy_(ours.data)


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (4, 12)])
def test_an_orthogonalized_matrix_keeps_its_directions_and_levels_its_sizes(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ orthogonalize(matrix) @ right.T
    levels = found.diagonal()
    assert (found - torch.diag(levels)).abs().max() < 1e-12
    assert levels.min() > 0.6 and levels.max() < 1.3 and sizes.max() > 2 * sizes.min()


def test_the_order_of_summation_reaches_muons_weights_in_the_last_digits_only():
    gradients = torch.randn(8, 16, 24, generator=torch.Generator().manual_seed(2))
    weights = []
    for order in (range(8), range(7, -1, -1)):
        weight = torch.nn.Parameter(torch.zeros(16, 24))
        weight.grad = sum(gradients[i] for i in order)
        Muon([weight], lr=0.01).step()
        weights.append(weight.detach())
    assert (weights[0] - weights[1]).abs().max() < 1e-5 * weights[0].abs().max()


# ---- updates that change nothing


@pytest.mark.parametrize(("loss", "bad"), [(NAN, None), (INF, None), (-INF, None), (GOOD, math.nan), (GOOD, math.inf)])
def test_an_update_that_is_not_finite_reaches_neither_weights_nor_moments(loss, bad):
    model = small_model()
    optimizers = Optimizers(model, 0.01)
    set_gradients(model, 0)
    optimizers.update(GOOD)
    before = copy.deepcopy((model.state_dict(), optimizers.state_dict()["parts"]))
    set_gradients(model, 1)
    if bad is not None:
        model.blocks[0].ffn.down.weight.grad[0, 0] = bad
    optimizers.update(loss)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[0][name])
    for part, unchanged in zip(optimizers.state_dict()["parts"], before[1], strict=True):
        assert part["state"] and part["state"].keys() == unchanged["state"].keys()
        for index, moments in part["state"].items():
            assert all(torch.equal(moment, unchanged["state"][index][name]) for name, moment in moments.items())
    assert (optimizers.skipped, optimizers.skipped_in_a_row) == (1, 1)
    set_gradients(model, 2)
    optimizers.update(GOOD)
    assert (optimizers.skipped, optimizers.skipped_in_a_row) == (1, 0)


def test_five_bad_updates_in_a_row_are_an_error_and_four_are_not():
    model = small_model()
    optimizers = Optimizers(model, 0.01)
    set_gradients(model, 0)
    for _ in range(3):
        for _ in range(4):
            optimizers.update(NAN)
        optimizers.update(GOOD)
    for _ in range(4):
        optimizers.update(INF)
    with pytest.raises(RunError, match=r"5 updates in a row .* \(loss inf, gradient norm .*--learning-rate"):
        optimizers.update(INF)
    assert optimizers.skipped == 17


def test_a_batch_without_a_gradient_leaves_the_weights_bit_for_bit():
    model = small_model()
    optimizers = Optimizers(model, 0.01)
    set_gradients(model, 0)
    optimizers.update(GOOD)  # momentum alone could carry them on
    before = copy.deepcopy(model.state_dict())
    set_gradients(model, 1, scale=0.0)
    assert optimizers.update(GOOD) == 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert optimizers.skipped == 0


# ---- float32 masters of bfloat16 weights


def test_bfloat16_weights_are_their_float32_masters_rounded():
    model = small_model().to(torch.bfloat16)
    optimizers = Optimizers(model, 1e-5)  # every update is far below what bfloat16 resolves
    start = [m.detach().clone() for m in optimizers.masters]
    for seed in range(20):
        (model(torch.tensor([[seed % 6, 1, 2]])).float() ** 3).sum().backward()
        optimizers.update(GOOD)
        optimizers.zero_grad()
    moved = [(m - s).abs().max() for m, s in zip(optimizers.masters, start, strict=True)]
    assert max(moved) > 1e-4
    for weight, m in zip(optimizers.weights, optimizers.masters, strict=True):
        assert m.dtype == torch.float32 and torch.equal(weight, m.to(torch.bfloat16)) and weight.grad is None


def test_masters_sum_the_gradients_of_micro_batches_in_float32():
    model = small_model().to(torch.bfloat16)
    Optimizers(model, 0.01)  # a warm start's; its hooks must not take what is the next ones'
    optimizers = Optimizers(model, 0.01)
    index = next(i for i, weight in enumerate(optimizers.weights) if weight is model.head_weight)
    for _ in range(3):
        (model.head_weight * torch.tensor([1.0, 2**-9] * 4, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(optimizers.masters[index].grad, torch.tensor([3.0, 3 * 2**-9] * 4).expand(6, 8))


def test_masters_survive_saving_and_loading():
    model = small_model().to(torch.bfloat16)
    optimizers = Optimizers(model, 1e-5)
    (model(torch.tensor([[0, 1, 2]])).float() ** 3).sum().backward()
    optimizers.update(GOOD)
    other = Optimizers(small_model().to(torch.bfloat16), 1e-5)
    other.load_state_dict(copy.deepcopy(optimizers.state_dict()))
    for mine, its in zip(optimizers.masters, other.masters, strict=True):
        assert torch.equal(mine, its)
