"""A directory is written while training goes on, and exists once it is complete."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from stable_opd_mcore.models import directory_save
from stable_opd_mcore.models.directory_save import DirectorySave
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.models.manifest import find_damage
from stable_opd_mcore.models.megatron_checkpoint import load_weights, weights_of
from tests.models import tiny
from tests.processes import wait_until_ended


@pytest.fixture(scope="module")
def chunks(world):
    return build_model(tiny.architecture("qwen3", num_hidden_layers=1), world)


def _hold_writers(patch: pytest.MonkeyPatch, directory: Path) -> Path:
    """Writers wait for the file that is returned."""
    hashing, gate = directory_save.hash_own_files, directory / "gate"

    def wait_and_hash(path: Path):
        while not gate.exists():
            time.sleep(0.01)
        return hashing(path)

    patch.setattr(directory_save, "hash_own_files", wait_and_hash)
    return gate


def test_training_goes_on_and_the_directory_appears_complete(
    chunks: list[HiddenStatesGPTModel], tmp_path: Path
) -> None:
    before = [weight.detach().clone() for weight in chunks[0].parameters()]
    with pytest.MonkeyPatch.context() as patch:
        gate = _hold_writers(patch, tmp_path)
        save = DirectorySave(weights_of(chunks), chunks, tmp_path / "model", lambda _: None)
        assert not save.is_written()
        for weight in chunks[0].parameters():
            torch.nn.init.constant_(weight, 3.0)
        assert not (tmp_path / "model").exists()
        gate.touch()
        deadline = time.monotonic() + 60
        while not save.is_written():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not (tmp_path / "model").exists()
        save.finish()
    assert find_damage(tmp_path / "model") is None
    load_weights(chunks, tmp_path / "model")
    for weight, expected in zip(chunks[0].parameters(), before, strict=True):
        assert torch.equal(weight, expected)


def test_the_writer_has_its_copies_in_memory_of_its_own(chunks, tmp_path, monkeypatch):
    """Pinned memory is shared with a forked process, and the next step's transfers reuse it."""
    copy, pinned = FileSystemWriterAsync.preload_tensors, []

    def recorded(buckets, non_blocking=True):
        pinned.append(non_blocking)
        return copy(buckets, non_blocking)

    monkeypatch.setattr(FileSystemWriterAsync, "preload_tensors", staticmethod(recorded))
    DirectorySave(weights_of(chunks), chunks, tmp_path / "model", lambda _: None).finish()
    assert pinned == [False]


KILLED = """
import os, signal, sys
from pathlib import Path
import pytest
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.parallel.world import start_world
from tests.models import test_directory_save as tests
from tests.models import tiny
world = start_world(ParallelConfig(), 0)
chunks = tests.build_model(tiny.architecture("qwen3", num_hidden_layers=1), world)
home = Path(sys.argv[1])
tests.DirectorySave(tests.weights_of(chunks), chunks, home / "step_1", lambda _: None).finish()
tests._hold_writers(pytest.MonkeyPatch(), home)
save = tests.DirectorySave(tests.weights_of(chunks), chunks, home / "step_2", lambda _: None)
print(save._writer.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses prctl")
def test_a_killed_rank_takes_its_writer_along_and_leaves_the_older_directory(
    chunks: list[HiddenStatesGPTModel], tmp_path: Path
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    wait_until_ended(int(killed.stdout))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["partial-step_2", "step_1"]
    assert find_damage(tmp_path / "step_1") is None
    DirectorySave(weights_of(chunks), chunks, tmp_path / "step_2", lambda _: None).finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]
    assert find_damage(tmp_path / "step_2") is None
