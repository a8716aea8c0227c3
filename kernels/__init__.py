"""Per-token log-probs and entropies without the (tokens, vocabulary) matrix of logits."""

from kernels.linear import linear_logprob

__all__ = ["linear_logprob"]
