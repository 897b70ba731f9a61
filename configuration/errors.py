"""What a user is meant to read: our errors, and not what optional packages say of hardware that nobody asked for."""

import logging


class NormalignError(Exception):
    """Something the user can put right. The message is one paragraph: what is wrong, where, and what to do."""


class RunStopped(NormalignError):
    """A run that was told to stop, and did so in order; the program ends with the status of a process that SIGTERM ends."""

    exit_status = 143


def quiet_optional_packages() -> None:
    """Keeps back what bitsandbytes and DeepSpeed warn of when they are merely there: that a machine has no GPU."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # DeepSpeed sets the level of its logger itself
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
