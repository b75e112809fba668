"""A Hugging Face hub on this machine: the routes that downloads and uploads use. Not the hub's own
code."""

import base64
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


@contextlib.contextmanager
def upload_server(token: str) -> Iterator[tuple[str, dict[str, dict[str, bytes]], list[bytes]]]:
    """Yields the URL, the files of each repository, and the bodies of requests to create one. It
    takes this token, and files of any size within the commit."""
    files: dict[str, dict[str, bytes]] = {}
    created: list[bytes] = []

    def reply(request: Request) -> tuple[int, bytes]:
        path = urlsplit(request.path).path
        if path == "/api/agent-harnesses":  # huggingface_hub asks it before the first request
            return 404, b"{}"
        if request.headers.get("Authorization") != f"Bearer {token}":
            return 401, b'{"error": "Invalid credentials"}'
        asked = [json.loads(line) for line in request.body.splitlines()]
        if path == "/api/repos/create":
            created.append(request.body)
            name = f"{asked[0]['organization']}/{asked[0]['name']}"
            files.setdefault(name, {})
            return 200, json.dumps({"url": f"{url}/{name}", "name": name, "id": "1"}).encode()
        name = "/".join(path.split("/")[3:5])
        if path == f"/api/models/{name}/preupload/main":
            wanted = [{"path": each["path"], "uploadMode": "regular"} for each in asked[0]["files"]]
            answer = [each | {"shouldIgnore": False} for each in wanted]
            return 200, json.dumps({"files": answer}).encode()
        if path == f"/api/models/{name}/commit/main":
            values = [each["value"] for each in asked if each["key"] == "file"]
            files[name] |= {each["path"]: base64.b64decode(each["content"]) for each in values}
            commit = {"commitUrl": f"{url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
            return 200, json.dumps(commit).encode()
        return 200, b"{}"  # the check of a card's metadata

    with http_server(reply) as url:
        yield url, files, created


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Send this process's downloads to the server; what HF_ENDPOINT does before the import."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))
