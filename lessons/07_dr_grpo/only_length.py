"""Half of Dr. GRPO: the division by the response's length is gone, the one by the group's standard deviation is not.

python train_grpo.py --task free_length --loss lessons/07_dr_grpo/only_length.py:dr_grpo_loss
"""

from nanorl.losses import dr_grpo_loss

__all__ = ["dr_grpo_loss"]

advantage_scale = "group"
