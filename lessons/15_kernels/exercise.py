"""Exercises of lesson 15: one pass over rows of logits, its gradient by hand, a chunk of tokens at a time, the same in
Triton, and a silent bug. Fill the blanks, run this file: it checks itself.

    python lessons/15_kernels/exercise.py

N rows (tokens), V words, D hidden units. Logits may be -inf (a word that cannot be chosen), never in the whole row.
"""

import checks
import torch
from checks import jit, tl
from torch import Tensor

# ---- Part 1: in torch


def add_block(m: Tensor, s: Tensor, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The running maximum m, s = sum e^(x-m) and a = sum e^(x-m) (x-m) of each row, once one more block is seen.

    Before the first block m is -inf, s and a are 0. A block may be all -inf, the first one too.
    m, s, a (N,), block x (N, width) -> m, s, a (N,)
    """
    raise NotImplementedError


def rows_forward(logits: Tensor, targets: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Log-prob of the target and entropy of each row, from blocks of `block` columns.

    No tensor may be larger than one block, and no digit may be lost to large logits.
    logits (N, V), targets (N,) -> log-prob (N,), entropy (N,)
    """
    raise NotImplementedError


def merge(m: Tensor, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, s and a of the whole vocabulary, from those of its stripes; where a stripe is all -inf, m is -inf, s and a 0.

    m, s, a (stripes, N) -> m, s, a (N,)
    """
    raise NotImplementedError


def rows_backward(logits: Tensor, targets: Tensor, grad_logprob: Tensor, grad_entropy: Tensor) -> Tensor:
    """The gradient to the logits, without autograd.

    logits (N, V), targets (N,), gradients of the loss to log-prob and entropy (N,) -> (N, V)
    """
    raise NotImplementedError


def linear_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, grad_logprob: Tensor, grad_entropy: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """The gradients to hidden states and head, where the logits are hidden @ weight.T; without autograd.

    Never more logits at a time than those of `chunk` tokens.
    hidden (N, D), weight (V, D), targets, grad_logprob, grad_entropy (N,) -> (N, D), (V, D)
    """
    raise NotImplementedError


# ---- Part 2: the same in Triton. Checked where triton is installed, in its interpreter: no GPU needed.


@jit
def row_kernel(logits, targets, results, V, BLOCK: tl.constexpr):
    """One program a row: writes log-prob and entropy of row i to results[i, 0] and results[i, 1].

    logits (N, V) float32, targets (N,) int64, results (N, 2) float32, all without gaps: row i of the logits begins at
    logits + i * V. BLOCK is a power of 2, V any number.
    """
    raise NotImplementedError


# ---- Part 3: a silent bug. The function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def load(rows: Tensor, columns: Tensor, mask: Tensor, other: float = 0.0) -> Tensor:
    """What tl.load does: rows[:, columns] where the mask is true, `other` where it is not and nothing is read."""
    return torch.where(mask, rows[:, columns.clamp(max=rows.shape[1] - 1)], other)


def logprobs_that_fall_short(logits: Tensor, targets: Tensor, block: int) -> Tensor:
    """Log-probs of the targets, block by block as a kernel reads them. logits (N, V), targets (N,) -> (N,)

    The symptom: with 1,024 words and blocks of 256 all is right to the last digit. With 1,000 words and the logits of
    a fresh model, all next to 0, the probabilities of a row sum to 0.977. Taking 20 off every logit should change no
    probability; then they sum to 0.0000001.
    """
    V = logits.shape[1]
    m = logits.new_full((len(logits),), -torch.inf)
    s = torch.zeros_like(m)
    for start in range(0, V, block):
        columns = start + torch.arange(block)
        x = load(logits, columns, columns < V)
        m_before, m = m, torch.maximum(m, x.amax(1))
        s = (m_before - m).exp() * s + (x - m[:, None]).exp().sum(1)
    return logits.gather(1, targets[:, None])[:, 0] - m - s.log()


if __name__ == "__main__":
    checks.run("Lesson 15: kernels", globals(), checks.CHECKS)
