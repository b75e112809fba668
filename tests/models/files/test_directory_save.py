"""A directory that all ranks write exists once it is complete."""

import functools
import multiprocessing
import os
import signal
import sys

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.files import directory_save
from stable_opd_mcore.models.files.directory_save import save_directory
from stable_opd_mcore.models.files.manifest import find_damage
from stable_opd_mcore.models.files.megatron_checkpoint import load_weights, weights_of
from stable_opd_mcore.models.gpt import build_model
from tests.models import tiny


class Killed(BaseException):
    """Ends a save where SIGKILL would."""


def test_a_killed_save_leaves_the_older_directory_and_is_replaced(world, tmp_path, monkeypatch):
    """The tensors are copied to ordinary memory: pinned memory is kept, and takes more."""
    copy, pinned = FileSystemWriterAsync.preload_tensors, []

    def recorded(buckets, non_blocking=True):
        pinned.append(non_blocking)
        return copy(buckets, non_blocking)

    monkeypatch.setattr(FileSystemWriterAsync, "preload_tensors", staticmethod(recorded))
    chunks = build_model(tiny.architecture("qwen3", num_hidden_layers=1), world)
    before = [weight.detach().clone() for weight in chunks[0].parameters()]
    save_directory(weights_of(chunks), chunks, tmp_path / "model", lambda _: None)
    for weight in chunks[0].parameters():
        torch.nn.init.constant_(weight, 3.0)

    def killed(_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(directory_save, "hash_own_files", killed)
        with pytest.raises(Killed):
            save_directory(weights_of(chunks), chunks, tmp_path / "model", lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "partial-model"]
    assert find_damage(tmp_path / "model") is None
    load_weights(chunks, tmp_path / "model")
    for weight, expected in zip(chunks[0].parameters(), before, strict=True):
        assert torch.equal(weight, expected)
    save_directory(weights_of(chunks), chunks, tmp_path / "model", lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert find_damage(tmp_path / "model") is None
    assert pinned == [False] * 3


@pytest.mark.parametrize("ends", [lambda: os.kill(os.getpid(), signal.SIGKILL), sys.exit])
def test_a_save_whose_writer_ends_is_refused(ends, world, tmp_path, monkeypatch):
    trainer, written = os.getpid(), []

    @functools.wraps(filesystem_async._write_item)
    def killed(*arguments, **options):
        written.append(arguments)
        if len(written) > 2 and os.getpid() != trainer:
            ends()
        return write(*arguments, **options)

    write = filesystem_async._write_item
    chunks = build_model(tiny.architecture("qwen3", num_hidden_layers=1), world)
    save_directory(weights_of(chunks), chunks, tmp_path / "model", lambda _: None)
    monkeypatch.setattr(filesystem_async, "_write_item", killed)
    with pytest.raises(UserError, match=r"model: cannot be written: .* ended with (signal 9|exit)"):
        save_directory(weights_of(chunks), chunks, tmp_path / "model", lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert find_damage(tmp_path / "model") is None
    assert not multiprocessing.active_children()
