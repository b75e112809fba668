"""A Hugging Face hub on this machine: the routes that downloads use. Not the hub's own code."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub_server(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Yields the URL and the list of requested paths.

    Args:
        repositories: "models/owner/name" or "datasets/owner/name" to the files of its one commit,
            which is also "main".
    """
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            for repository, files in repositories.items():
                if path in (f"/api/{repository}/revision/{r}" for r in ("main", COMMIT)):
                    siblings = [{"rfilename": name} for name in files]
                    values = {"id": repository.split("/", 1)[1], "sha": COMMIT}
                    return self._answer(json.dumps(values | {"siblings": siblings}).encode())
                if path == f"/api/{repository}/tree/{COMMIT}":
                    tree = [
                        {"type": "file", "path": n, "size": len(b), "oid": COMMIT}
                        for n, b in files.items()
                    ]
                    return self._answer(json.dumps(tree).encode())
                start = f"/{repository.removeprefix('models/')}/resolve/{COMMIT}/"
                if path.startswith(start) and path.removeprefix(start) in files:
                    return self._answer(files[path.removeprefix(start)])
            return self._answer(b'{"error": "not here"}', 404)

        do_HEAD = do_GET

        def _answer(self, content: bytes, status: int = 200) -> None:
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Send this process's downloads to the server; what HF_ENDPOINT does before the import."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))
