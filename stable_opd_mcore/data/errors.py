"""The one error of everything read from files: data the user must mend."""

from __future__ import annotations


class DataError(ValueError):
    """Names the file, the row or line, the column, and the remedy."""
