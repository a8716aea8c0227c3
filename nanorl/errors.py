"""What ends a run early, on purpose."""


class RunError(Exception):
    """Something the user can mend: shown as a message, without a traceback."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the run's state is on disk."""
