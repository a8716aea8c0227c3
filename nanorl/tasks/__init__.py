"""What to learn. A task makes problems, shows how they may be answered, and verifies answers."""

from nanorl.tasks.chain import ChainArithmetic
from nanorl.tasks.free_length import FreeLength

TASKS = {"chain": ChainArithmetic, "free_length": FreeLength}
