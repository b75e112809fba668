"""An HTTP server in a thread of this process, whose replies a test gives. Not SGLang."""

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from typing import NamedTuple


class Request(NamedTuple):
    method: str
    path: str
    headers: Message
    body: bytes


@contextlib.contextmanager
def http_server(
    reply: Callable[[Request], tuple[int, bytes] | tuple[int, bytes, Mapping[str, str]]],
) -> Iterator[str]:
    """Yields the URL of a server that answers with the status, body and headers of `reply`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet: a second one would wait 40 ms for an ACK

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content, *more = reply(Request(self.command, self.path, self.headers, body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for name, value in dict(*more).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
