"""The manifest of a checkpoint directory: the size and checksum of every file in it.

A rank hashes the files that it wrote while they are in its page cache, and verifies an equal share
of all files. xxh3 finds damaged storage and broken copies; it does not protect against forgery.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from stable_opd_mcore.host.json_files import read_json_object
from stable_opd_mcore.parallel.world import broadcast_object, gather_objects

MANIFEST = "manifest.json"
Entries = dict[str, tuple[int, str]]  # file name: bytes, xxh3 (64 bits, hexadecimal)
_BLOCK_BYTES = 4 * 2**20
_RANK_OF_FILE = re.compile(r"__(\d+)_\d+\.distcp|rng_rank_(\d+)\.safetensors")


def hash_own_files(directory: Path) -> Entries:
    """Hash the files of `directory` whose name holds this rank's number."""
    matches = ((path, _RANK_OF_FILE.fullmatch(path.name)) for path in directory.iterdir())
    rank = dist.get_rank()
    return {path.name: _hash(path) for path, m in matches if m and int(m[1] or m[2]) == rank}


def write_manifest(directory: Path, gathered: Sequence[Entries]) -> None:
    """Write the manifest: what every rank hashed, and the files that none did."""
    files = {name: entry for entries in gathered for name, entry in entries.items()}
    for path in filter(Path.is_file, directory.rglob("*")):  # a tokenizer may have a folder
        name = path.relative_to(directory).as_posix()
        if name not in files:
            files[name] = _hash(path)
    record = {"files": files, "xxh3": _hash_of_entries(files)}
    (directory / MANIFEST).write_text(json.dumps(record, indent=1, sort_keys=True))


def listed_files(directory: Path) -> set[str]:
    """The names of the files that the manifest of a directory lists."""
    return set(read_json_object(directory / MANIFEST).get("files") or ())


def find_damage(directory: Path) -> str | None:
    """How a file differs from the manifest, on all ranks; None if all files agree. Collective."""
    fault: str | None = None
    files: Entries = {}
    if dist.get_rank() == 0:
        try:
            files = _read(directory / MANIFEST)
        except (OSError, ValueError, RecursionError) as error:
            fault = f"{MANIFEST} cannot be used ({error})"
    fault, files = broadcast_object((fault, files))
    if fault is not None:
        return fault
    largest_first = sorted(files, key=lambda name: (-files[name][0], name))
    share = largest_first[dist.get_rank() :: dist.get_world_size()]
    faults = gather_objects([_fault(directory / name, files[name]) for name in share])
    return next((fault for part in faults for fault in part if fault is not None), None)


def _read(path: Path) -> Entries:
    record: Any = json.loads(path.read_bytes())
    files = record.get("files") if isinstance(record, dict) else None
    if not isinstance(files, dict) or record.get("xxh3") != _hash_of_entries(files):
        raise ValueError("it differs from its own checksum")
    return {name: (size, checksum) for name, (size, checksum) in files.items()}


def _fault(path: Path, expected: tuple[int, str]) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected[0]:
            return f"{path.name} has {size} bytes, {expected[0]} were written"
        if _hash(path) != expected:
            return f"{path.name} differs from its checksum"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None


def _hash(path: Path) -> tuple[int, str]:
    hasher, size = xxhash.xxh3_64(), 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
            size += count
    return size, hasher.hexdigest()


def _hash_of_entries(files: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(files, sort_keys=True).encode())
