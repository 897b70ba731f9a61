"""The error that a user is meant to read."""


class NormalignError(Exception):
    """Something the user can put right. The message is one paragraph: what is wrong, where, and what to do."""


class RunStopped(NormalignError):
    """A run that was told to stop, and did so in order; the program ends with the status of a process that SIGTERM ends."""

    exit_status = 143
