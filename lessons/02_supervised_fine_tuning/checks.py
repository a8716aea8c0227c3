"""Checks of lesson 02, shared by exercise.py and solution.py. Values by hand, and against nanorl's own functions."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import gradient, require, require_close, run

from nanorl.losses.aggregate import token_mean
from nanorl.model import GPT, GPTConfig
from nanorl.rollout import Rollout
from nanorl.scorer import score

__all__ = ["CHECKS", "run"]

NAN = float("nan")
EOS = 9
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6]]  # the stop token 9 may stand in a prompt, too
RESPONSES = [[1, 5], [7, 7, 7, 7], []]


def row_losses() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (3, 6, 10) over the whole rows of the demonstrations above, and their lengths."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 6, 10, generator=generator, dtype=torch.double).requires_grad_()
    prompt_lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    lengths = prompt_lengths + torch.tensor([len(response) + 1 for response in RESPONSES])
    return logits, prompt_lengths, lengths


IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [1, 7, 7, 7, 7, 9], [5, 9, 2, 6, 9, 9]])
TRAINED = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 0]])


def loss_by_loop(logits: torch.Tensor) -> torch.Tensor:
    """Of the demonstrations above, one token at a time."""
    places = TRAINED.nonzero().tolist()
    return -sum(logits[b, i - 1].log_softmax(-1)[IDS[b, i]] for b, i in places) / len(places)


def check_cross_entropy(cross_entropy):
    """log_softmax and gather, as in lesson 00; then minus, and the mean over the tokens with mask 1: divide by
    mask.sum(). A NaN that is only multiplied by 0, or chosen away after the log_softmax, comes back in the gradient:
    pick the rows first, logits[mask.bool()]."""
    logits = torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [NAN, NAN]]], dtype=torch.double, requires_grad=True)
    tokens, mask = torch.tensor([[0, 1], [0, 0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.double)
    case = "logits [[[2, 0], [0, 0]], [[0, 2], padding]], tokens [[0, 1], [0, -]]"
    loss = cross_entropy(logits, tokens, mask)
    require_close(loss, (0.126928011043 + 0.693147180560 + 2.126928011043) / 3, case)
    p = 0.880797077978
    want = [[[p - 1, 1 - p], [0.5, -0.5]], [[-p, p], [0.0, 0.0]]]
    require_close(gradient(loss, logits, case), torch.tensor(want, dtype=torch.double) / 3, case + ", gradient")


def check_make_batch(make_batch):
    """A row is [*prompt, *response, eos_id]. Work out `trained` from lengths, not from ids: the stop token may be
    padding, and it may stand in a prompt."""
    ids, trained = make_batch([list(p) for p in PROMPTS], [list(r) for r in RESPONSES], EOS)
    case = f"prompts {PROMPTS}, responses {RESPONSES}, stop token {EOS}"
    require_close(ids, IDS, case + ", ids")
    require_close(trained, TRAINED, case + ", trained")
    ids, trained = make_batch([[1, 2]], [[3]], 0)
    require_close(ids, [[1, 2, 3, 0]], "one demonstration, ids")
    require_close(trained, [[0, 0, 1, 1]], "one demonstration, trained")


def check_micro_batch_losses(micro_batch_losses):
    """One denominator: the number of trained tokens of the WHOLE batch divides the sum of each micro-batch. Choose with
    torch.where before summing: NaN * 0 is NaN."""
    values = torch.tensor([[1.0, 1.0] + [NAN] * 4, [-1.0] * 6], dtype=torch.double, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0, 0, 0, 0], [1.0] * 6], dtype=torch.double)
    for size, want in ((1, [0.25, -0.75]), (2, [-0.5])):
        losses = micro_batch_losses(values, mask, size)
        case = f"values 1, 1 and six times -1, micro-batches of {size}"
        require(len(losses) == len(want), f"{case}: expected {len(want)} losses, got {len(losses)}")
        require_close(torch.stack(list(losses)), want, case)
        found = gradient(sum(losses), values, case)
        require_close(found, [[0.125] * 2 + [0.0] * 4, [0.125] * 6], case + ", gradient of the sum")
    generator = torch.Generator().manual_seed(2)
    values, mask = torch.randn(7, 5, generator=generator, dtype=torch.double), torch.ones(7, 5, dtype=torch.double)
    mask[torch.arange(5) >= torch.tensor([5, 1, 2, 4, 1, 3, 5])[:, None]] = 0.0
    for size in (1, 2, 3, 4, 7):
        got = sum(micro_batch_losses(values.clone(), mask, size))
        require_close(got, token_mean(values, mask), f"7 random rows, micro-batches of {size}, sum of the losses")


def check_mixture_loss(mixture_loss):
    """-share log q - (1 - share) log(1 - q) with q = sigmoid(logit). For a large logit 1 - q is rounded to 0 and its
    log to -inf: use logsigmoid, and 1 - sigmoid(z) = sigmoid(-z)."""

    def at(share: float, logit: float) -> tuple[torch.Tensor, torch.Tensor]:
        variable = torch.tensor(logit, dtype=torch.double, requires_grad=True)
        loss = mixture_loss(share, variable)
        require(bool(torch.isfinite(loss)), f"share {share:g}, logit {logit:g}: the loss is {loss.item()}")
        return loss, gradient(loss, variable, f"share {share:g}, logit {logit:g}")

    for share, logit, want, slope in (
        (0.3, math.log(0.3 / 0.7), 0.610864302055, 0.0),  # the floor: the model thinks as often as it is shown
        (0.3, 0.0, math.log(2), 0.2),
        (0.5, math.log(3.0), 0.836988216786, 0.25),  # q = 3/4: -(log 0.75 + log 0.25) / 2
        (0.3, 1000.0, 700.0, 0.7),
        (1.0, -1000.0, 1000.0, -1.0),
    ):
        loss, found = at(share, logit)
        require_close(loss, want, f"share {share:g}, logit {logit:g}")
        require_close(found, slope, f"share {share:g}, logit {logit:g}, gradient (it is q - share)")


def check_muon_direction(muon_direction):
    """momentum = U S V^T; put 1 in the place of all of S: U V^T, without another transpose, since torch.linalg.svd
    returns V^T already. full_matrices=False keeps the shape."""
    got = muon_direction(torch.tensor([[3.0, 0.0], [0.0, -0.01]], dtype=torch.double))
    require_close(got, [[0.2 * 2**0.5, 0.0], [0.0, -0.2 * 2**0.5]], "momentum [[3, 0], [0, -0.01]]")
    momentum = torch.randn(3, 8, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    got = muon_direction(momentum.clone())
    case = "a random 3 x 8 matrix"
    require_close(got @ got.T, 0.32 * torch.eye(3, dtype=torch.double), f"{case}, result x its transpose")  # 0.2^2 x 8
    along = 0.2 * 8**0.5 * torch.linalg.matrix_norm(momentum, "nuc")  # no other such matrix points as far along it
    require_close((got * momentum).sum(), along, f"{case}, scalar product with the momentum")
    require_close(muon_direction(momentum.T.clone()), got.T, "its transpose")


def check_loss_that_falls_too_well(loss_that_falls_too_well):
    """What does the model know when it is asked for ids[b, i]? Write down, for a row of four tokens, which logits are
    compared with which id. And what must move with them?"""
    logits, _, _ = row_losses()
    case = "three demonstrations, random logits"
    loss = loss_that_falls_too_well(logits, IDS, TRAINED)
    want = loss_by_loop(logits)
    require_close(loss, want.detach(), f"{case}. The symptom is still there")
    require_close(gradient(loss, logits, case), gradient(want, logits, ""), case + ", gradient")


def check_loss_that_starts_too_late(loss_that_starts_too_late):
    """Column i of `logprobs` is about one token, column i of `trained` is meant for one. Is it the same one? Take a
    prompt of one token and a response of two, and list the columns."""
    logits, prompt_lengths, lengths = row_losses()
    case = "three demonstrations, random logits"
    loss = loss_that_starts_too_late(logits, IDS, prompt_lengths, lengths)
    want = loss_by_loop(logits)
    require_close(loss, want.detach(), f"{case}. The symptom is still there")
    require_close(gradient(loss, logits, case), gradient(want, logits, ""), case + ", gradient")


def check_together(cross_entropy, make_batch, micro_batch_losses):
    """The pieces pass alone, but do not make the loss of nanorl's warm start: look at the shapes that flow from one
    into the next."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=10, width=16, max_context=16)).double()
    ids, trained = make_batch([list(p) for p in PROMPTS], [list(r) for r in RESPONSES], EOS)
    logits = model(ids)[:, :-1] @ model.head.T  # (B, L - 1, V)
    loss = cross_entropy(logits, ids[:, 1:], trained[:, 1:])
    rollout = Rollout.from_responses(PROMPTS, [[*response, EOS] for response in RESPONSES])
    values = -score(model, rollout)[0]
    want = token_mean(values, rollout.mask)
    require_close(loss, want.detach(), "your loss of three demonstrations, against nanorl's")
    cut = sum(micro_batch_losses(values, rollout.mask.double(), 2))
    require_close(cut, loss.detach(), "the sum of your micro-batch losses, against your loss of the whole")
    found, expected = (torch.autograd.grad(x, model.embedding.weight)[0] for x in (loss, cut))
    require_close(found, expected, "its gradient to the embedding, against that of your micro-batch losses")


CHECKS = [
    check_cross_entropy,
    check_make_batch,
    check_micro_batch_losses,
    check_mixture_loss,
    check_muon_direction,
    check_loss_that_falls_too_well,
    check_loss_that_starts_too_late,
    check_together,
]
