"""The losses, one file an algorithm: pure functions from tensors to (loss, metrics)."""

from nanorl.losses.grpo import grpo_loss

__all__ = ["grpo_loss"]
