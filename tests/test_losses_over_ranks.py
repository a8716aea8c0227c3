"""The losses on two processes that talk through gloo: what two ranks add up to is what one would have computed."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from nanorl.algorithms import ALGORITHMS, Algorithm
from nanorl.losses import bradley_terry_loss, dpo_loss, ipo_loss, ppo_loss, value_loss
from nanorl.losses.aggregate import sequence_count, sequence_logprobs, token_count

LENGTHS = [6, 1, 4, 5, 0, 2, 3]  # rank 0 takes the first 4 rows: 16 tokens, and rank 1 the others: 10
RANKS = [slice(0, 4), slice(4, 7)]
COLUMNS = 8  # of the features that the policy's log-probs, or a critic's values, are made of


def batch(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows, width = len(LENGTHS), max(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "features": normal(rows, width, COLUMNS),
        "old_logprobs": -1.5 + 0.5 * normal(rows, width),
        "ref_logprobs": -1.5 + 0.5 * normal(rows, width),
        "advantages": normal(rows),
        "mask": torch.arange(width) < torch.tensor(LENGTHS)[:, None],
    }


Rows = dict[str, Tensor]  # some rows of the batch


def of_policy(rows: Rows, logprobs: Tensor, denominator: int | None, algorithm: Algorithm) -> Tensor:
    options = {
        "ref_logprobs": rows["ref_logprobs"],
        "beta": 0.1,
        "denominator": denominator,
        "max_length": max(LENGTHS),
    }
    return algorithm.loss(
        logprobs, rows["old_logprobs"], rows["advantages"], rows["mask"], **algorithm.chosen(**options)
    )[0]


def of_critic(rows: Rows, values: Tensor, denominator: int | None) -> Tensor:
    return value_loss(values, rows["old_logprobs"], rows["ref_logprobs"], rows["mask"], denominator=denominator)[0]


def of_pairs(rows: Rows, logprobs: Tensor, denominator: int | None, loss: Callable) -> Tensor:
    """Each response is preferred to itself read backwards, which has other log-probs."""
    scored = loss is bradley_terry_loss
    given = [logprobs] if scored else [logprobs, rows["ref_logprobs"]]
    pairs = [sequence_logprobs(x, rows["mask"]) for values in given for x in (values, values.flip(1))]
    return loss(*pairs, **({} if scored else {"beta": 1.0}), denominator=denominator)[0]


POLICIES = ALGORITHMS | {"ppo": Algorithm(ppo_loss, advantage_scale="none", mean_over="tokens")}
LOSSES = {  # name -> loss of rows, of what the weights make of their features and of a denominator; what that counts
    name: (partial(of_policy, algorithm=row), token_count if row.mean_over == "tokens" else sequence_count)
    for name, row in POLICIES.items()
}
LOSSES["value"] = (of_critic, token_count)
LOSSES |= {loss.__name__: (partial(of_pairs, loss=loss), len) for loss in (dpo_loss, ipo_loss, bradley_terry_loss)}


def loss_and_gradient(name: str, dtype: torch.dtype, rank: int | None) -> tuple[Tensor, Tensor]:
    """Of the weights. With a rank: of its rows, summed over the ranks."""
    loss_of, count_of = LOSSES[name]
    rows = {key: values if rank is None else values[RANKS[rank]] for key, values in batch(dtype).items()}
    weights = torch.linspace(-0.1, 0.1, COLUMNS, dtype=dtype).requires_grad_()
    count = torch.tensor(count_of(rows["mask"]))
    if rank is not None:
        dist.all_reduce(count)
    loss = loss_of(rows, -1.5 + rows["features"] @ weights, count.item())
    loss.backward()
    loss = loss.detach()
    if rank is not None:
        dist.all_reduce(loss)
        dist.all_reduce(weights.grad)
    return loss, weights.grad


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # this machine's own, also without a network
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(RANKS))
    results = {
        (name, dtype): loss_and_gradient(name, dtype, rank)
        for name in LOSSES
        for dtype in (torch.float32, torch.float64)
    }
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def loopback_is_up() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1).close()
        return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def over_two_ranks(tmp_path_factory) -> list[dict]:
    """Results of rank 0 and rank 1, every loss in one go."""
    if not loopback_is_up():
        pytest.skip("gloo talks over the loopback interface, which is down")
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder),), nprocs=len(RANKS))
    return [torch.load(folder / f"{rank}.pt") for rank in range(len(RANKS))]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["float32", "float64"])
def test_trap_a1_two_ranks_give_loss_and_gradient_of_one(over_two_ranks, name, dtype, tolerance):
    loss, gradient = loss_and_gradient(name, dtype, None)
    assert gradient.abs().max() > 0.01
    for results in over_two_ranks:
        rank_loss, rank_gradient = results[name, dtype]
        torch.testing.assert_close(rank_loss, loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(rank_gradient, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LOSSES)
def test_trap_a1_the_mean_of_what_each_rank_alone_would_compute_is_another_number(name):
    whole, _ = loss_and_gradient(name, torch.float64, None)
    alone = []
    for ours in RANKS:
        rows = {key: values[ours] for key, values in batch(torch.float64).items()}
        outputs = -1.5 + rows["features"] @ torch.linspace(-0.1, 0.1, COLUMNS, dtype=torch.float64)
        alone.append(LOSSES[name][0](rows, outputs, None).item())
    assert abs(sum(alone) / 2 - whole.item()) > 1e-3
