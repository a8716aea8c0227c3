"""The other half of Dr. GRPO: the division by the group's standard deviation is gone, the one by the length is not.

python train_grpo.py --task free_length --loss lessons/07_dr_grpo/only_std.py:grpo_loss
"""

from nanorl.losses import grpo_loss

__all__ = ["grpo_loss"]

advantage_scale = "none"
