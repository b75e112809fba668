"""Run a function on several gloo ranks, each a process of its own, from inside a test.

    def check(rank, world_size, path): ...      # module level: children import it by name
    run_ranks(2, check, tmp_path)

The processes are forked from one that has imported the package and what tests import, because that
takes seconds; they see the environment variables of the first launch. Not a trainer launcher (that
is torchrun), and it makes no assertions: a rank's exception, with its traceback, becomes the test's
failure.
"""

import gc
import multiprocessing as forkserver
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

TIMEOUT = timedelta(seconds=180)
PRELOADED = [
    "pytest",
    "stable_opd_mcore.train.loop",
    "tests.models.tiny",
    "transformers.tokenization_utils_tokenizers",
    "tests.parallel.preloaded",
]


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> None:
    """Call `function(rank, world_size, *args)` on `world_size` processes that share a gloo group.

    `function` must be importable by name and `args` must pickle. The function returns
    results through files.

    Raises:
        torch.multiprocessing.ProcessRaisedException: some rank raised; the message holds its
            traceback. The other ranks are ended.
    """
    forkserver.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        store = Path(directory) / "rendezvous"
        multiprocessing.start_processes(
            _enter,
            args=(world_size, store.as_uri(), function, args),
            nprocs=world_size,
            start_method="forkserver",
        )


def _enter(
    rank: int, world_size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()  # imported objects stay, so collections skip them
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    try:
        function(rank, world_size, *args)
        # Skipped after a failure: a rank that raised must not wait for the others.
        if dist.is_initialized():
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def start_process(function: Callable[..., Any], *args: Any) -> BaseProcess:
    """Call `function(*args)` in a process of its own that has no group, as a command has none."""
    process = preloaded_context().Process(target=function, args=args)
    process.start()
    return process


def preloaded_context() -> forkserver.context.ForkServerContext:
    """A context of multiprocessing whose processes start with PRELOADED imported."""
    forkserver.set_forkserver_preload(PRELOADED)
    return forkserver.get_context("forkserver")
