"""The manifest of a directory: what it holds, and the file that differs from it."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
import xxhash

from stable_opd_mcore.models.files import manifest
from stable_opd_mcore.models.files.manifest import (
    MANIFEST,
    find_damage,
    hash_own_files,
    write_manifest,
)
from tests.parallel.launch import run_ranks

pytestmark = pytest.mark.usefixtures("world")

FILES = {
    "__0_0.distcp": b"weights of rank 0",
    "__0_1.distcp": b"",
    "__1_0.distcp": b"weights of rank 1",
    "__10_0.distcp": b"weights of rank 10",
    "rng_rank_00000.safetensors": b"noise",
    "common.pt": b"common",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def entry(content: bytes) -> tuple[int, str]:
    return len(content), xxhash.xxh3_64_hexdigest(content)


def test_a_rank_hashes_the_files_of_its_number(directory, monkeypatch):
    monkeypatch.setattr(manifest, "_BLOCK_BYTES", 4)  # several blocks, the last one not full
    own = ("__0_0.distcp", "__0_1.distcp", "rng_rank_00000.safetensors")
    assert hash_own_files(directory) == {name: entry(FILES[name]) for name in own}


def test_the_manifest_holds_every_file_and_its_own_checksum(directory):
    given = {"__1_0.distcp": (17, "of rank 1")}
    write_manifest(directory, [hash_own_files(directory), given])
    record = json.loads((directory / MANIFEST).read_text())
    expected = {name: list(entry(content)) for name, content in FILES.items()}
    assert record["files"] == expected | {"__1_0.distcp": [17, "of rank 1"]}
    text = json.dumps(record["files"], sort_keys=True).encode()
    assert record["xxh3"] == xxhash.xxh3_64_hexdigest(text)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("common.pt", b"common!", "common.pt has 7 bytes, 6 were written"),
        ("common.pt", b"cOmmon", "common.pt differs from its checksum"),
        ("__0_1.distcp", None, "__0_1.distcp is missing"),
        (MANIFEST, None, f"{MANIFEST} cannot be used ([Errno 2] No such file or directory"),
        (MANIFEST, b"{", f"{MANIFEST} cannot be used (Expecting property name"),
        (MANIFEST, b'{"files": {}, "xxh3": "0"}', "cannot be used (it differs from its own check"),
    ],
)
def test_the_first_difference_is_named(directory, name, content, message):
    write_manifest(directory, [])
    assert find_damage(directory) is None
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    found = find_damage(directory)
    assert found is not None
    assert message in found


def test_a_file_that_cannot_be_read_is_damage(directory):
    (directory / "common.pt").unlink()
    (directory / "common.pt").mkdir()
    size = (directory / "common.pt").stat().st_size
    write_manifest(directory, [{"common.pt": (size, "x")}])
    assert find_damage(directory) == "common.pt cannot be read (Is a directory)"


def damage_in_either_share(rank: int, world_size: int, directory: str) -> None:
    """Rank 0 verifies the largest and the smallest file, rank 1 the other."""
    for name in ("large", "medium", "small"):
        path = Path(directory, name)
        before = path.read_bytes()
        dist.barrier()
        if rank == 0:
            path.write_bytes(before[::-1])
        dist.barrier()
        assert find_damage(Path(directory)) == f"{name} differs from its checksum"
        dist.barrier()
        if rank == 0:
            path.write_bytes(before)
    dist.barrier()
    assert find_damage(Path(directory)) is None


def test_all_ranks_name_the_same_file_whoever_verifies_it(tmp_path):
    for name in ("large", "medium", "small"):
        (tmp_path / name).write_text(name * len(name))
    write_manifest(tmp_path, [])
    run_ranks(2, damage_in_either_share, str(tmp_path))
