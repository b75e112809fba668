"""Damage the newest checkpoint of a run with each kind of damage in each kind of file, and resume.

Prints a row for each case. The metrics and weights of the resumed run must equal those of the
uninterrupted run bit for bit. Not collected by pytest: it takes minutes.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from stable_opd_mcore.train.loop import train
from tests.parallel.launch import run_ranks
from tests.train.runs import metrics_of, tiny_config

DRAW = random.Random()  # not the global generator: every run seeds that one
PLACES = {
    "shard": r"*.distcp",
    "metadata": [".metadata", "common.pt", "metadata.json"],
    "records": ["state.json", "manifest.json", "config.json"],
}


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip_bit(path: Path, older: Path) -> None:
    offset = DRAW.randrange(path.stat().st_size)
    change(path, offset, bytes([path.read_bytes()[offset] ^ 1 << DRAW.randrange(8)]))


def zero_range(path: Path, older: Path) -> None:
    size = path.stat().st_size
    change(path, DRAW.randrange(size // 2), bytes(min(4096, size // 2)))


def cut(path: Path, older: Path) -> None:
    os.truncate(path, DRAW.randrange(1, path.stat().st_size))


def make_directory(path: Path, older: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling_link(path: Path, older: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "one bit flipped": flip_bit,
    "a range of zeros": zero_range,
    "all bytes random": lambda path, _: path.write_bytes(DRAW.randbytes(path.stat().st_size)),
    "last byte lost": lambda path, _: os.truncate(path, path.stat().st_size - 1),
    "cut at random": cut,
    "empty": lambda path, _: os.truncate(path, 0),
    "longer": lambda path, _: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path, _: path.unlink(),
    "of another step": lambda path, older: shutil.copy(older, path),
    "a directory or a dangling link": lambda path, older: DRAW.choice(
        (make_directory, dangling_link)
    )(path, older),
}


def run_once(directory: Path, tensor: int) -> Path:
    config = tiny_config(
        directory,
        "run",
        train={"steps": 6},
        checkpoint={"every": 2, "keep": 3},
        parallel={"tensor": tensor},
    )
    return train(config, show_progress=False)


def damage_and_resume(rank: int, world_size: int, home: Path, seed: int) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="    %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    DRAW.seed(seed)  # the same on every rank
    uninterrupted = run_once(home / "uninterrupted", world_size)
    for kind, damage in KINDS.items():
        for place, names in PLACES.items():
            directory = home / f"{kind}, {place}"
            newest = directory / "run" / "checkpoints" / "step_000004"
            if rank == 0:
                shutil.copytree(uninterrupted.parent, directory)
                shutil.rmtree(newest.with_name("step_000006"))
                shutil.rmtree(newest.parents[1] / "model")
            files = sorted(
                f.name for f in (uninterrupted / "checkpoints" / newest.name).glob("*.distcp")
            )
            name = DRAW.choice(files if place == "shard" else names)
            if rank == 0:
                damage(newest / name, newest.with_name("step_000002") / name)
                print(f"{kind} | {place} | {name}", flush=True)
            run = run_once(directory, world_size)
            if rank == 0:
                assert metrics_of(run) == metrics_of(uninterrupted)
                weights = "model/model.safetensors"
                assert (run / weights).read_bytes() == (uninterrupted / weights).read_bytes()
                print("    resumed with equal metrics and weights", flush=True)


if __name__ == "__main__":
    ranks, seed = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as home:
        run_ranks(ranks, damage_and_resume, Path(home), seed)
