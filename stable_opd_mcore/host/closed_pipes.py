"""Standard streams whose reader may end: `stable-opd train CONFIG 2>&1 | head`."""

import io
import os
import sys
from typing import Any


class _ToleratesClosedPipe(io.FileIO):
    """A standard stream that drops what is written after its reader has ended, as `head` does."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            return len(data)


def ignore_closed_pipes() -> None:
    """A run continues when the reader of its standard streams ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # closed, or replaced by the caller
        wrapped = io.TextIOWrapper(
            io.BufferedWriter(_ToleratesClosedPipe(stream.fileno(), "wb", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, wrapped)
