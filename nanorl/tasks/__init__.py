"""What to learn. A task makes problems, shows how they may be answered, and verifies answers."""

from nanorl.tasks.chain import ChainArithmetic

TASKS = {"chain": ChainArithmetic}
