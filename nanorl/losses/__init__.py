"""The losses, one file an algorithm: pure functions from tensors to (loss, metrics)."""

from nanorl.losses.cispo import cispo_loss
from nanorl.losses.dapo import dapo_loss
from nanorl.losses.dr_grpo import dr_grpo_loss
from nanorl.losses.grpo import grpo_loss
from nanorl.losses.gspo import gspo_loss
from nanorl.losses.reinforce import reinforce_loss

__all__ = ["cispo_loss", "dapo_loss", "dr_grpo_loss", "grpo_loss", "gspo_loss", "reinforce_loss"]
