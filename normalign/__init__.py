"""The front door of normalign: the public names of all rooms."""

__version__ = "0.1.0"
