"""Per-token log-probs, entropies and exact KLs without the (tokens, vocabulary) matrix of logits."""

from kernels.flash import flash_logprob
from kernels.linear import linear_kl, linear_logprob

__all__ = ["flash_logprob", "linear_kl", "linear_logprob"]
