"""Checks of lesson 00, shared by exercise.py and solution.py."""

from __future__ import annotations

import sys
from pathlib import Path

import reinforce
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import gradient, require, require_close, run

__all__ = ["CHECKS", "run"]

NAN = float("nan")


def check_token_logprobs(token_logprobs):
    """log_softmax over the vocabulary (not log of softmax, which overflows), then pick the entry of the chosen token:
    Tensor.gather along the last dimension."""
    logits = torch.tensor([[[0.0, 0.0], [2.0, 0.0]]], dtype=torch.double, requires_grad=True)
    got = token_logprobs(logits, torch.tensor([[1, 0]]))
    require_close(got, [[-0.693147180560, -0.126928011043]], "logits [[0, 0], [2, 0]], tokens [1, 0]")
    require(got.requires_grad, "the log-probs carry no gradient to the logits, so nothing could be learned")
    far = torch.tensor([[[1000.0, 0.0]]], dtype=torch.double)
    require_close(token_logprobs(far, torch.tensor([[1]])), [[-1000.0]], "logits [1000, 0], token 1")


def check_grad_log_prob(grad_log_prob):
    """log softmax(x)[a] = x[a] - log(sum of exp(x)). Differentiate the two terms by each logit: the first gives 1 or 0,
    the second gives probabilities."""
    got = grad_log_prob(torch.tensor([0.0, 0.0], dtype=torch.double), 0)
    require_close(got, [0.5, -0.5], "logits [0, 0], token 0")
    logits = torch.tensor([0.2, -0.1, 0.4, 1.5], dtype=torch.double)
    for token in range(4):
        variable = logits.clone().requires_grad_()
        want = gradient(variable.log_softmax(-1)[token], variable, "")
        require_close(grad_log_prob(logits.clone(), token), want, f"logits {logits.tolist()}, token {token}")


def check_expected_gradient(expected_gradient):
    """Go through all V tokens, with grad_log_prob for each, and weigh by the token's probability. The baseline must not
    change the result: the grad log-probs average to zero under their own probabilities."""
    even = torch.zeros(2, dtype=torch.double)
    got = expected_gradient(even, torch.tensor([10.0, 11.0], dtype=torch.double), 0.0)
    require_close(got, [-0.25, 0.25], "logits [0, 0], rewards [10, 11], baseline 0")
    logits = torch.tensor([0.2, -0.1, 0.4], dtype=torch.double, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=torch.double)
    want = gradient((logits.softmax(-1) * rewards).sum(), logits, "")  # of the expected reward itself
    for baseline in (0.0, 0.5, 100.0):
        got = expected_gradient(logits.detach().clone(), rewards.clone(), baseline)
        require_close(got, want, f"logits [0.2, -0.1, 0.4], rewards [1, 0, 0.5], baseline {baseline:g}")


def check_leave_one_out(leave_one_out):
    """The mean of the others is (sum of the group - own reward) / (G - 1). Sum along the last dimension: one row of
    `rewards` is one prompt."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 5.0, 7.0, 5.0]], dtype=torch.double)
    want = [[1.0, -1 / 3, -1 / 3, -1 / 3], [-8 / 3, 0.0, 8 / 3, 0.0]]
    require_close(leave_one_out(rewards.clone()), want, "rewards [[1, 0, 0, 0], [3, 5, 7, 5]]")
    require_close(leave_one_out(rewards + 100), want, "the same rewards + 100: the advantages stay")


def check_reinforce_loss(reinforce_loss):
    """Minus, because an optimizer goes down and the reward shall go up. Sum over the tokens where mask is 1, mean over
    the B responses. Choose with torch.where rather than multiply: NaN * 0 is NaN."""
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, NAN, NAN]], dtype=torch.double, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.double)
    advantages = torch.tensor([0.5, -0.5], dtype=torch.double)
    case = "log-probs [[-1, -2, -3], [-0.5, padding]], advantages [0.5, -0.5]"
    loss = reinforce_loss(logprobs, advantages, mask)
    require_close(loss, 1.375, case)  # -(0.5 * -6 + -0.5 * -0.5) / 2
    want = [[-0.25, -0.25, -0.25], [0.25, 0.0, 0.0]]
    require_close(gradient(loss, logprobs, case), want, case + ", gradient")


def check_together(token_logprobs, leave_one_out, reinforce_loss):
    """The pieces pass alone but do not learn together: look at the shapes that flow from one into the next."""
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(10, 10, dtype=torch.double, requires_grad=True)
    for _ in range(80):
        prompts = torch.randint(10, (16,), generator=generator).repeat_interleave(4)  # 16 prompts, 4 responses each
        with torch.no_grad():
            tokens = reinforce.sample(table, prompts, generator)  # (64, 4)
        rewards = reinforce.reward(prompts, tokens)  # (64,)
        states = torch.cat([prompts[:, None], tokens[:, :-1]], dim=1)
        logprobs = token_logprobs(table[states], tokens)
        loss = reinforce_loss(logprobs, leave_one_out(rewards.view(16, 4)).flatten(), torch.ones_like(logprobs))
        (step,) = torch.autograd.grad(loss, table)
        table = (table - reinforce.LEARNING_RATE * step).detach().requires_grad_()
    reached = rewards.mean().item()
    require(reached > 0.9, f"after 80 updates the counting task's mean reward is {reached:.2f}; 0.9 was expected")


CHECKS = [
    check_token_logprobs,
    check_grad_log_prob,
    check_expected_gradient,
    check_leave_one_out,
    check_reinforce_loss,
    check_together,
]
