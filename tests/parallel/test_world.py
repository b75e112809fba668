"""A world of one rank: start, second start, refused layouts, stop. More ranks: test_pipeline.py."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stable_opd_mcore.config.schema import FaultConfig, ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.cuda_driver import Driver
from stable_opd_mcore.parallel.world import _local_gpu, start_world, stop_world
from tests.host.nvidia_smi import write_nvidia_smi


def test_second_start_seeds_again() -> None:
    first = start_world(ParallelConfig(), seed=7)
    sampled = torch.rand(4)
    torch.rand(3)
    second = start_world(ParallelConfig(), seed=7)
    assert torch.equal(torch.rand(4), sampled)
    start_world(ParallelConfig(), seed=8)
    assert not torch.equal(torch.rand(4), sampled)
    assert first.groups.tp is second.groups.tp
    assert first.pipeline_rank == 0
    assert first.is_last_stage
    assert (first.token_multiple, first.microbatch_multiple, first.num_chunks) == (1, 1, 1)
    stop_world()
    assert not dist.is_initialized()
    stop_world()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPUs")
def test_no_world_of_cpus_where_nvidia_smi_lists_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nvidia_smi(tmp_path, Driver("570.86.15", "12.8", 8))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"8 GPUs and driver 570\.86\.15"):
        start_world(ParallelConfig(), seed=0)
    assert not dist.is_initialized()


def test_stopped_world_leaves_no_threads() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    threads = []
    for _ in range(3):
        start_world(ParallelConfig(), seed=0)
        stop_world()
        threads.append(len(os.listdir("/proc/self/task")))
    dist.destroy_process_group()
    assert threads[2] <= threads[0]


def test_no_collective_times_out_before_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    world = start_world(ParallelConfig(), seed=0)
    groups = (dist.group.WORLD, world.data_group, world.groups.tp, world.groups.pp)
    timeouts = [
        group._get_backend(world.device).options._timeout.total_seconds() / 60 for group in groups
    ]
    stop_world()
    default = FaultConfig().watchdog_minutes
    assert default is not None
    assert min(timeouts) >= 4 * default
    for minutes in (default, min(timeouts) / 4):
        FaultConfig(watchdog_minutes=minutes)


@pytest.mark.parametrize(("visible", "gpu"), [(8, 3), (1, 0)])
def test_rank_uses_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, visible: int, gpu: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert _local_gpu() == gpu
    monkeypatch.setenv("LOCAL_RANK", "three")
    with pytest.raises(UserError, match="LOCAL_RANK='three' of the launcher; expected a number"):
        _local_gpu()


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}, {"context": 2}])
def test_too_few_ranks_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"does not divide the 1 started ranks"):
        start_world(ParallelConfig(**sizes), seed=0)
    assert not dist.is_initialized()
