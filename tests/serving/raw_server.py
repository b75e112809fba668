"""A server that answers with whatever bytes a test sends, on a socket of this process."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


def read_request(connection: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data or (data[:4] == b"POST" and data.endswith(b"\r\n\r\n")):
        data += connection.recv(65536) or b"\r\n\r\n{}"


@contextlib.contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yields the URL of a server that reads a request, then calls `serve(connection)`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        read_request(connection)
                        serve(connection)

        threading.Thread(target=run, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:  # else the thread would accept connections of the file's next owner
            listener.shutdown(socket.SHUT_RDWR)
