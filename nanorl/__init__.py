"""nanorl: reinforcement learning for language models, from scratch.

Start with `train_grpo.py`, which reads from top to bottom as the algorithm's pseudo-code, and follow its imports.
"""

__version__ = "0.1.0"
