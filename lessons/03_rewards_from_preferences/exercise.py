"""Exercises of lesson 03: the loss of a reward model, where its score is read, how sure it may be, and two silent bugs.
Fill the blanks, run this file: it checks itself.

    python lessons/03_rewards_from_preferences/exercise.py

N pairs, or B responses in rows of T tokens: prompt, response, and padding on either side. `mask` is 1 for a token of
prompt or response and 0 for padding, which may hold anything, NaN included.
"""

from __future__ import annotations

import checks
import torch
from torch import Tensor

# ---- Part 1: four blanks


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-1/N sum log sigmoid(chosen - rejected). Finite for any finite scores, and so is its gradient.

    chosen, rejected (N,): the scores of each pair -> scalar
    """
    raise NotImplementedError


def bradley_terry_gradient(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives of that loss by the chosen scores and by the rejected ones, without autograd.

    chosen, rejected (N,) -> (N,), (N,)
    """
    raise NotImplementedError


def outcome_scores(hidden: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """What the head says behind the last token of each row that is no padding; rows may be padded on either side.

    hidden (B, T, D): the state behind each token, weight (D,), mask (B, T) -> (B,)
    """
    raise NotImplementedError


def calibration_error(chosen: Tensor, rejected: Tensor, bins: int = 5) -> float:
    """How far a model's certainty is from the truth. It is sure of its favourite with p = sigmoid(|chosen - rejected|).
    Sort the pairs into `bins` equal bins of p between 0.5 and 1 (the lower edge belongs to a bin, 1 to the last); in
    each, compare the mean p with the share of pairs whose chosen score is the higher one. The mean over pairs of that
    distance.

    chosen, rejected (N,) -> a number
    """
    raise NotImplementedError


# ---- Part 2: two silent bugs. Each function below runs, raises nothing, and is wrong in one place. Find it, mend it.


def scores_that_depend_on_their_company(scores: Tensor, lengths: Tensor) -> Tensor:
    """The score of each response. Rows are padded on the right; scores (B, T) of each token, lengths (B,) of prompt and
    response together -> (B,).

    The symptom: scored one by one, the responses show a model that is right on 85 % of the pairs, as it should be. In
    batches of mixed lengths it is 72 %, and another order of the pairs gives another number. The longest response of
    each batch always gets the score it gets alone.
    """
    rows = torch.arange(len(scores))
    last = lengths.max() - 1
    return scores[rows, last]


def scores_that_tie(scores: Tensor, ids: Tensor, mask: Tensor, eos_id: int) -> Tensor:
    """The score of each response, read at the token that ends it. ids, scores, mask (B, T) -> (B,).

    The symptom: on questions and answers it trains well, alone and in batches of any lengths. On conversations of
    several turns, each of which ends with the stop token, the loss is 0.693147 on every pair and never moves. Elsewhere
    it is so on pairs of two responses that were both cut off at the length limit.
    """
    ends = ids == eos_id  # (B, T)
    first = ends.int().argmax(1)  # (B,)
    return scores.gather(1, first[:, None]).squeeze(1)


if __name__ == "__main__":
    checks.run("Lesson 03: rewards from preferences", globals(), checks.CHECKS)
