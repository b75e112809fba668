"""The key's file: who may read it, and errors that name it."""

import stat

import pytest

from stable_opd_mcore.serving.api_key import make_api_key, read_api_key


def test_a_key_is_made_once_with_mode_0600(tmp_path):
    path = tmp_path / "keys/key"
    make_api_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = read_api_key(path)
    assert key is not None
    assert len(key) >= 32
    make_api_key(path)
    assert read_api_key(path) == key
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_without_a_path_there_is_no_key_and_a_bad_path_is_named(tmp_path):
    assert read_api_key(None) is None
    with pytest.raises(ValueError, match=r"api_key_file=.*key: No such file.*stable-opd serve"):
        read_api_key(tmp_path / "key")
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ValueError, match=r"api_key_file=.*key: the file is empty"):
        read_api_key(tmp_path / "key")
    (tmp_path / "key").unlink()
    make_api_key(tmp_path / "key")  # as `stable-opd serve` does
    assert read_api_key(tmp_path / "key")
    contents = {b"a\nb": "one word", "ß".encode(): "one word", b"\xff": "a text"}
    for content, message in contents.items():
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(ValueError, match=f"key: not {message}") as error:
            read_api_key(tmp_path / "key")
        assert "a\nb" not in str(error.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_may_read_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    path.write_text("secret")
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"mode {mode:04o} lets .*: chmod 600 {path}") as error:
        read_api_key(path)
    assert "secret" not in str(error.value)
    path.chmod(0o600)
    assert read_api_key(path) == "secret"
