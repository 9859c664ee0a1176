"""Errors that a command ends with: their message is for the user, and no traceback is shown."""


class UsageError(Exception):
    """The arguments are wrong, or ask for something that this machine lacks. Exit code 2."""


class CheckFailed(Exception):
    """Something that was to hold does not. Exit code 1."""
