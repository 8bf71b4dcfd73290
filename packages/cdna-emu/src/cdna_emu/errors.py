"""Errors that callers may want to tell apart."""


class EmulationError(Exception):
    """A launch that could not be completed: an unsupported instruction, an exhausted budget, a failed wave."""


class CoreMissingError(ImportError):
    """The compiled core is not there; the message says how to get it."""
