"""The losses, one file an algorithm: pure functions from tensors to (loss, metrics)."""

from nanorl.losses.bradley_terry import bradley_terry_loss
from nanorl.losses.cispo import cispo_loss
from nanorl.losses.dapo import dapo_loss
from nanorl.losses.dpo import dpo_loss, ipo_loss
from nanorl.losses.dr_grpo import dr_grpo_loss
from nanorl.losses.grpo import grpo_loss
from nanorl.losses.gspo import gspo_loss
from nanorl.losses.ppo import ppo_loss, value_loss
from nanorl.losses.reinforce import reinforce_loss

__all__ = [
    "bradley_terry_loss",
    "cispo_loss",
    "dapo_loss",
    "dpo_loss",
    "dr_grpo_loss",
    "grpo_loss",
    "gspo_loss",
    "ipo_loss",
    "ppo_loss",
    "reinforce_loss",
    "value_loss",
]
