"""Messages between two processes of this machine that trust each other."""

import pickle
from multiprocessing.connection import Connection
from typing import Any


def send_message(connection: Connection, message: Any) -> None:
    """Blocks while the other end does not read. Raises OSError if it is closed."""
    connection.send_bytes(pickle.dumps(message, 5))  # arrays are copied whole, and stay writable


def receive_message(connection: Connection) -> Any:
    """The next message; blocks until there is one. Raises EOFError or OSError at the end."""
    return pickle.loads(connection.recv_bytes())
