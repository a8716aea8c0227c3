"""Per-token log-probs, entropies and exact KLs without the (tokens, vocabulary) matrix of logits."""

from kernels.linear import linear_kl, linear_logprob, linear_logprob_kl

__all__ = ["linear_kl", "linear_logprob", "linear_logprob_kl"]
