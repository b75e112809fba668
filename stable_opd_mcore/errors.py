"""Errors that the user fixes: the command shows the message without a traceback and exits with 2.

Every message names the file, row or key, what was expected and the remedy. Anything else that
is raised, torch's own ValueError included, is a defect of this project and keeps its traceback.
"""


class UserError(ValueError):
    """Settings, data, layout or environment that must be fixed outside this code.

    A ValueError, because pydantic's validators and torch's callers expect one.
    """


class ConfigError(UserError):
    """A setting: the message says which, in which file, and how to fix it."""


class NotFiniteError(UserError):
    """NaN or infinity in the loss, the gradient or a weight; every rank raises it."""


class DataError(UserError):
    """A file that was read: the message names file, row or line, column and remedy."""
