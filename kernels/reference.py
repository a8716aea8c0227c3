"""The definitions, with all logits at once and autograd behind them: in float64 the truth for everything else here.

Of logits x over V words, with row maximum m, s = sum_j exp(x_j - m), p = softmax(x), and for a second row y of logits
its own m', s' and q = softmax(y):

    log-prob  l = log p_t           = (x_t - m) - log s
    entropy   H = -sum_j p_j log p_j = log s - sum_j p_j (x_j - m)
    exact KL  K = sum_j p_j (log p_j - log q_j) = sum_j p_j ((x_j - m) - (y_j - m')) - log s + log s'

Every sum is over shifted values: the usual H = logsumexp - sum p x is the difference of two big numbers, and at logits
near 1e4 half of its digits are gone in float32.
"""

import torch
from torch import Tensor


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), as in Gemma 2; None for no cap."""
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def logprob_entropy_kl(logits: Tensor, targets: Tensor, ref_logits: Tensor | None = None):
    """(N, V), (N,), (N, V) or None -> log-prob, entropy, KL(logits || ref_logits) or None; each (N,), in nats."""

    def shifted_and_log_sum(x: Tensor) -> tuple[Tensor, Tensor]:
        shifted = x - x.detach().amax(-1, keepdim=True)
        return shifted, shifted.exp().sum(-1, keepdim=True).log()

    shifted, log_sum = shifted_and_log_sum(logits)
    logprobs = shifted - log_sum
    probs = logprobs.exp()
    impossible = probs == 0  # adds 0, whatever it is multiplied by: 0 * inf is 0 here
    entropy = log_sum[:, 0] - (probs * shifted.masked_fill(impossible, 0)).sum(-1)
    kl = None
    if ref_logits is not None:
        ref_shifted, ref_log_sum = shifted_and_log_sum(ref_logits)
        gap = (shifted - ref_shifted).masked_fill(impossible, 0)
        kl = (probs * gap).sum(-1) - log_sum[:, 0] + ref_log_sum[:, 0]
    return logprobs.gather(1, targets[:, None])[:, 0], entropy, kl


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
):
    """kernels.linear_logprob as a formula: log-prob, entropy and KL (None without a reference); each (N,)."""
    kept = targets != ignore_index
    logits = capped(hidden[kept] @ weight.T, softcap) / temperature
    ref_logits = None
    if ref_hidden is not None:
        ref_logits = capped(ref_hidden[kept] @ ref_weight.T, softcap) / temperature
    values = logprob_entropy_kl(logits, targets[kept].long(), ref_logits)
    zeros = torch.zeros_like(targets, dtype=logits.dtype)
    return tuple(None if value is None else zeros.index_put((kept,), value) for value in values)
