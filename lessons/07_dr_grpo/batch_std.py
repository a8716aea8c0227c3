"""The other fix of the difficulty bias: one standard deviation for the whole batch, instead of one for each group.

python train_grpo.py --task free_length --loss lessons/07_dr_grpo/batch_std.py:dr_grpo_loss
"""

from nanorl.losses import dr_grpo_loss

__all__ = ["dr_grpo_loss"]

advantage_scale = "batch"
