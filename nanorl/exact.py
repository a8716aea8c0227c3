"""A world small enough to list, so that every expectation is a sum and nothing needs to be sampled.

Three tokens, three steps: with all responses y in hand and a table of logits as the policy,

    J  = sum_y pi(y) R(y)                        the expected reward; autograd gives the true policy gradient
    KL = sum_y pi(y) log(pi(y) / pi_ref(y))      of whole responses, and its true gradient
    pi*(y) = pi_ref(y) exp(R(y) / beta) / Z      the best of all policies for J - beta KL (Ziebart et al. 2008;
                                                 Rafailov et al. 2023, eq. 4)

An estimator that is claimed to be unbiased can be averaged over all that could be sampled, and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from nanorl.kl import exact_kl


class World:
    """All N responses of `steps` tokens, or fewer if one token, `stop`, ends a response: (N, T) as in a Rollout.

    The policy is a table of logits (S, V) in float64: a row for each of the S prefixes a response may have.
    """

    def __init__(self, vocabulary: int = 3, steps: int = 3, *, stop: int | None = None):
        def cut(tokens: tuple[int, ...]) -> tuple[int, ...]:
            return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens

        self.vocabulary = vocabulary
        self.responses = list(dict.fromkeys(cut(tokens) for tokens in product(range(vocabulary), repeat=steps)))
        self.prefixes = list(dict.fromkeys(y[:t] for y in self.responses for t in range(len(y))))
        number = {prefix: row for row, prefix in enumerate(self.prefixes)}
        N = len(self.responses)
        self.tokens, self.states = torch.zeros(2, N, steps, dtype=torch.long)  # (N, T) each
        self.mask = torch.zeros(N, steps, dtype=torch.bool)
        for row, response in enumerate(self.responses):
            for t, token in enumerate(response):
                self.tokens[row, t], self.states[row, t], self.mask[row, t] = token, number[response[:t]], True

    def random_logits(self, seed: int) -> Tensor:
        """(S, V): a policy far enough from uniform for mistakes to show."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(len(self.prefixes), self.vocabulary, generator=generator, dtype=torch.float64)

    def logprobs(self, logits: Tensor) -> Tensor:
        """(S, V) -> (N, T): of each token of each response, 0 outside the mask."""
        return torch.where(self.mask, logits.log_softmax(-1)[self.states, self.tokens], 0.0)

    def probs(self, logits: Tensor) -> Tensor:
        """(S, V) -> (N,): of each response."""
        return self.logprobs(logits).sum(1).exp()

    def expected_reward(self, logits: Tensor, rewards: Tensor) -> Tensor:
        """J, a scalar; rewards (N,)."""
        return (self.probs(logits) * rewards).sum()

    def kl(self, logits: Tensor, ref_logits: Tensor) -> Tensor:
        """KL(policy || reference) of whole responses in nats, a scalar."""
        log_ratio = (self.logprobs(logits) - self.logprobs(ref_logits)).sum(1)  # (N,)
        return (self.probs(logits) * log_ratio).sum()

    def visits(self, logits: Tensor) -> Tensor:
        """(S, V) -> (S,): how likely each prefix is to come up. Those of one length sum to 1, or less with a stop."""
        logprobs = self.logprobs(logits)
        reached = logprobs.cumsum(1) - logprobs  # (N, T): log-prob of the prefix before each token
        found = logits.new_zeros(len(self.prefixes))
        return found.index_put((self.states[self.mask],), reached[self.mask].exp())  # rows that share one agree

    def kl_of_tokens(self, logits: Tensor, ref_logits: Tensor, kl: Callable = exact_kl) -> Tensor:
        """The sum of each next token's KL over the prefixes the policy visits: the value of `kl`, by the chain rule.

        Its gradient is another: it leaves out that a token decides which prefixes come next, as every per-token KL in
        a loss does (Tang & Munos 2025, arXiv:2506.09477). `kl`: of logits (S, V), (S, V) -> (S,), to take another.
        """
        return (self.visits(logits).detach() * kl(logits, ref_logits)).sum()

    def optimum(self, ref_logits: Tensor, rewards: Tensor, beta: float) -> Tensor:
        """pi*, (N,)."""
        return (self.probs(ref_logits).log() + rewards / beta).softmax(0)

    def expected_loss(
        self,
        logits: Tensor,
        rewards: Tensor,
        advantages: Callable[[Tensor], Tensor],
        loss: Callable,
        *,
        size: int = 2,
        old_logits: Tensor | None = None,
    ) -> Tensor:
        """`loss` of the loss contract, averaged over every group of `size` responses that may be sampled.

        advantages: rewards (size,) -> (size,). `old_logits`: the policy that samples, if it is another. The gradient of
        the result is the expectation of the estimator.
        """
        logprobs, old = self.logprobs(logits), self.logprobs(logits if old_logits is None else old_logits).detach()
        probs = old.sum(1).exp()  # (N,)
        total = logits.new_zeros(())
        for group in product(range(len(probs)), repeat=size):
            rows = torch.tensor(group)
            value, _ = loss(logprobs[rows], old[rows], advantages(rewards[rows]), self.mask[rows])
            total = total + probs[rows].prod() * value
        return total


def total_variation(p: Tensor, q: Tensor) -> float:
    """Half the sum of |p - q|: the largest difference in the probability of any event."""
    return ((p - q).abs().sum() / 2).item()


def policy_gradient(
    world: World,
    ref_logits: Tensor,
    rewards: Tensor,
    beta: float,
    *,
    updates: int,
    learning_rate: float,
    samples: int | None = None,
    seed: int = 0,
) -> Tensor:
    """The policy's logits (S, V) after gradient ascent on J - beta KL, from the reference on.

    By the true gradient, or from `samples` responses an update: REINFORCE with the KL in the reward (k1) and the
    leave-one-out baseline. At the optimum R - beta log(pi / pi_ref) is the same for all responses, so every advantage
    is 0 and the noise dies out by itself: a constant learning rate converges.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = ref_logits.clone().requires_grad_()
    ref_logprobs = world.logprobs(ref_logits).sum(1)  # (N,)
    for _ in range(updates):
        if samples is None:
            objective = world.expected_reward(logits, rewards) - beta * world.kl(logits, ref_logits)
        else:
            rows = torch.multinomial(world.probs(logits).detach(), samples, replacement=True, generator=generator)
            logprobs = world.logprobs(logits)[rows].sum(1)  # (samples,)
            returns = rewards[rows] - beta * (logprobs.detach() - ref_logprobs[rows])
            advantages = (returns - returns.mean()) * samples / (samples - 1)  # minus the mean of the others
            objective = (advantages * logprobs).mean()
        (gradient,) = torch.autograd.grad(objective, logits)
        logits = (logits + learning_rate * gradient).detach().requires_grad_()
    return logits.detach()
