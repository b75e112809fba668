"""Downloads of one commit from a hub on this machine."""

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.hub import download, is_hub_id
from tests.hub_server import COMMIT, hub_server, use_hub

FILES = {
    "data/train-0.parquet": b"rows",
    "all/train-0.parquet": b"other rows",
    "load.py": b"raise SystemExit",
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server({"datasets/me/set": FILES}) as (url, asked):
        use_hub(monkeypatch, url, tmp_path / "cache")
        yield asked


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_only_the_named_files_of_a_commit_are_downloaded(hub, revision):
    folder, commit = download("me/set", "dataset", ["data/train-*.parquet"], revision)
    assert commit == COMMIT
    assert [p.name for p in folder.rglob("*") if p.is_file()] == ["train-0.parquet"]
    assert (folder / "data" / "train-0.parquet").read_bytes() == b"rows"
    assert not any("load.py" in path for path in hub if "resolve" in path)


def test_what_is_not_there_is_named(hub):
    with pytest.raises(UserError, match="me/set: no file that matches x"):
        download("me/set", "dataset", ["x"], None)
    with pytest.raises(UserError, match="me/none: cannot be downloaded at revision main"):
        download("me/none", "dataset", ["x"], None)
    with pytest.raises(UserError, match="me/set: cannot be downloaded at revision v2"):
        download("me/set", "dataset", ["x"], "v2")


def test_without_a_network_the_cached_commit_serves(hub, monkeypatch, tmp_path):
    download("me/set", "dataset", ["data/*"], None)
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    folder, commit = download("me/set", "dataset", ["data/*"], COMMIT)
    assert commit == COMMIT
    assert (folder / "data" / "train-0.parquet").is_file()


def test_paths_are_not_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "here").mkdir(parents=True)
    assert is_hub_id("Qwen/Qwen2.5-Math-7B")
    for path in ("models/here", "/a/b", "./a/b", "~/a", "a", "a/b/c", "a b/c", ""):
        assert not is_hub_id(path)
