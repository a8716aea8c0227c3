"""Exercises of lesson 02: supervised fine-tuning piece by piece, and two silent bugs. Fill the blanks, then run this
file: it checks itself.

    python lessons/02_supervised_fine_tuning/exercise.py

B demonstrations, T tokens, V tokens in the vocabulary.
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor

# ---- Part 1: five blanks


def cross_entropy(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Minus the mean log-prob of all tokens whose mask is 1. Elsewhere the logits may hold anything, NaN included.

    logits (B, T, V): logits[b, t] predict tokens[b, t], the shift is done; tokens, mask (B, T) -> scalar
    """
    raise NotImplementedError


def make_batch(prompts: list[list[int]], responses: list[list[int]], eos_id: int) -> tuple[Tensor, Tensor]:
    """Prompt, response and stop token of each demonstration in one row, padded on the right with the stop token, since
    this tokenizer has no padding token. Beside it, which tokens are trained: the response and its one stop token.

    B lists each -> ids (B, L) integers, trained (B, L) bool, L the longest row
    """
    raise NotImplementedError


def micro_batch_losses(values: Tensor, mask: Tensor, size: int) -> list[Tensor]:
    """The losses of the micro-batches, `size` rows each and the last perhaps fewer. Their SUM is the mean of `values`
    over all tokens of the batch whose mask is 1, so that it does not matter how the batch was cut.

    values, mask (B, T) -> scalars
    """
    raise NotImplementedError


def mixture_loss(share: float, logit: Tensor) -> Tensor:
    """The expected cross-entropy of the first token: a share of the demonstrations thinks, the rest does not, and the
    model thinks with probability sigmoid(logit). Finite for every finite logit.

    logit: scalar -> scalar
    """
    raise NotImplementedError


def muon_direction(momentum: Tensor) -> Tensor:
    """What Muon makes of a matrix's momentum: the same singular vectors, every singular value 1, then times
    0.2 sqrt(max(rows, columns)), which gives it the size of an Adam update. (Muon gets there by iterating; you may use
    torch.linalg.svd.)

    (rows, columns), of full rank -> (rows, columns)
    """
    raise NotImplementedError


# ---- Part 2: two silent bugs. Each function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def loss_that_falls_too_well(logits: Tensor, ids: Tensor, trained: Tensor) -> Tensor:
    """The mean cross-entropy of the trained tokens. Prompt and response stand in one row; the model has read the whole
    row and logits[b, i] is what it says after reading ids[b, i]. logits (B, L, V), ids, trained (B, L).

    The symptom: the loss falls from 2.8 to 0.00 within thirty steps, far below the 0.23 where others end. But the
    model cannot answer: it repeats the prompt's last token, `3+4*2=` ====================, and never stops.
    """
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)  # (B, L)
    return -(logprobs * trained).sum() / trained.sum()


def loss_that_starts_too_late(logits: Tensor, ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> Tensor:
    """The mean cross-entropy of the response tokens: those at places prompt_lengths[b] to lengths[b] - 1 of row b, the
    last of them the stop token. What follows is padding (the stop token again). logits (B, L, V) as above, ids (B, L),
    prompt_lengths, lengths (B,).

    The symptom: the loss ends somewhat lower than it should. Responses begin with a digit, where they
    should begin with `<` or `>`. Give the model one of these, and it goes on as well as any other.
    """
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (B, L - 1)
    place = torch.arange(logprobs.shape[1])
    trained = (place >= prompt_lengths[:, None]) & (place < lengths[:, None])
    return -(logprobs * trained).sum() / trained.sum()


if __name__ == "__main__":
    checks.run("Lesson 02: supervised fine-tuning", globals(), checks.CHECKS)
