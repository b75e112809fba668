"""A Hugging Face hub on this machine: the routes that downloads use. Not the hub's own code."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.serving.http_server import Request, http_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub_server(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Yields the URL and the list of requested paths.

    Args:
        repositories: "models/owner/name" or "datasets/owner/name" to the files of its one commit,
            which is also "main".
    """
    asked: list[str] = []

    def reply(request: Request) -> tuple[int, bytes, dict[str, str]]:
        path = unquote(urlsplit(request.path).path)
        asked.append(path)
        found = found_at(path)
        if found is None:
            at_commit = (f"/{n.removeprefix('models/')}/resolve/{COMMIT}/" for n in repositories)
            code = "EntryNotFound" if path.startswith(tuple(at_commit)) else "RepoNotFound"
            return 404, b'{"error": "not here"}', {"X-Error-Code": code}
        tag = f'"{hashlib.sha256(found).hexdigest()}"'
        return 200, found, {"ETag": tag, "X-Repo-Commit": COMMIT}

    def found_at(path: str) -> bytes | None:
        for repository, files in repositories.items():
            if path in (f"/api/{repository}/revision/{r}" for r in ("main", COMMIT)):
                siblings = [{"rfilename": name} for name in files]
                values = {"id": repository.split("/", 1)[1], "sha": COMMIT}
                return json.dumps(values | {"siblings": siblings}).encode()
            if path == f"/api/{repository}/tree/{COMMIT}":
                tree = [
                    {"type": "file", "path": n, "size": len(b), "oid": COMMIT}
                    for n, b in files.items()
                ]
                return json.dumps(tree).encode()
            start = f"/{repository.removeprefix('models/')}/resolve/{COMMIT}/"
            if path.startswith(start) and path.removeprefix(start) in files:
                return files[path.removeprefix(start)]
        return None

    with http_server(reply) as url:
        yield url, asked


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Send this process's downloads to the server; what HF_ENDPOINT does before the import."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))
