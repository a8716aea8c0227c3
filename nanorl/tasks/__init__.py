"""What to learn. A task makes problems, shows how they may be answered, and verifies or judges answers."""

from nanorl.tasks.chain import ChainArithmetic
from nanorl.tasks.free_length import FreeLength
from nanorl.tasks.reviews import Reviews

TASKS = {"chain": ChainArithmetic, "free_length": FreeLength, "reviews": Reviews}
PREFERENCE_TASKS = {"reviews": Reviews}  # those that come with people who compare responses
