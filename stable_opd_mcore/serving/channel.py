"""Messages between two processes of this machine that trust each other.

A message is pickled; its large arrays travel through shared memory that has no name, so that it is
freed with the last array that uses it, whatever happens to the processes.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
from itertools import accumulate
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

_SHARED_BYTES = 2**18  # from this size on an array travels through shared memory
_ALIGNMENT = 64


class Channel:
    """One end of a pair of sockets. `send` is safe to use from many threads, `receive` from one."""

    def __init__(self, file: int) -> None:
        self._connection = Connection(file)
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Blocks while the other end does not read.

        Raises:
            OSError: the other end is closed.
        """
        large: list[memoryview] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < _SHARED_BYTES:
                return True
            large.append(view)
            return False

        data = pickle.dumps(message, 5, buffer_callback=is_small)
        sizes = np.array([view.nbytes for view in large], np.int64)
        with self._lock:
            self._connection.send_bytes(sizes.tobytes())
            self._connection.send_bytes(data)
            if large:
                with open(os.memfd_create("arrays"), "wb") as file:
                    for view in large:
                        file.write(view)
                        file.write(bytes(-view.nbytes % _ALIGNMENT))
                    file.flush()
                    reduction.send_handle(self._connection, file.fileno(), None)

    def receive(self) -> Any:
        """The next message. Blocks until there is one.

        Raises:
            EOFError, OSError: the other end is closed.
        """
        sizes = np.frombuffer(self._connection.recv_bytes(), np.int64).tolist()
        data = self._connection.recv_bytes()
        if not sizes:
            return pickle.loads(data)
        file = reduction.recv_handle(self._connection)
        ends = list(accumulate(size + -size % _ALIGNMENT for size in sizes))
        try:
            shared = memoryview(mmap.mmap(file, ends[-1]))
        finally:
            os.close(file)
        starts = [0, *ends[:-1]]
        parts = [shared[a : a + size] for a, size in zip(starts, sizes, strict=True)]
        return pickle.loads(data, buffers=parts)
