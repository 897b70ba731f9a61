"""The error that a user is meant to read."""


class NormalignError(Exception):
    """Something the user can put right. The message is one paragraph: what is wrong, where, and what to do."""
