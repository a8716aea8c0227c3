"""nanorl: reinforcement learning for language models, from scratch.

Start with `train_grpo.py`, which reads from top to bottom as the algorithm's pseudo-code, and follow its imports.
"""

import importlib.util
from pathlib import Path

__version__ = "0.1.0"

# Hugging Face publishes another package named `kernels`. Say so, rather than fail somewhere deep inside.
_kernels = importlib.util.find_spec("kernels")
if _kernels is None or Path(_kernels.origin or "").parent.parent != Path(__file__).parent.parent:
    raise ImportError(
        f"nanorl needs its own package `kernels`, but Python finds {_kernels and _kernels.origin}: "
        "run from nanorl's folder, or uninstall the other one (pip uninstall kernels)"
    )
