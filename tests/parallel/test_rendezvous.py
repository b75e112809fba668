"""Ranks that come late or never, and variables of a launcher that cannot be used."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.parallel import rendezvous
from stable_opd_mcore.parallel.rendezvous import meet, naming_lost_ranks
from stable_opd_mcore.parallel.world import gather_objects, start_world, stop_world
from stable_opd_mcore.train.setup import start_configured_world
from tests.config.test_load import SMOKE
from tests.parallel.launch import start_process

TIMEOUT = timedelta(seconds=1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of rank 0 of 3."""
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(_free_port())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_LOG_AFTER", timedelta(seconds=0.3))
    return monkeypatch


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _port() -> int:
    return int(os.environ["MASTER_PORT"])


UNUSABLE = [
    ({"MASTER_PORT": ""}, "MASTER_PORT='' of the launcher; expected a number from 1 to 65535"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000' .* from 1 to 65535"),
    ({"RANK": "x"}, "RANK='x' .* from 0 to 2: start with torchrun or a script"),
    ({"RANK": "3"}, "RANK='3' .* from 0 to 2"),
    ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE='two' .* from 1 to 3"),
    ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE='' .* from 1 to 3"),
    ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' .* from 1 to 3"),
    ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE='8' .* from 1 to 3"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR='' .* address of rank 0's machine"),
    (
        {"MASTER_ADDR": "nowhere.invalid"},
        "MASTER_ADDR='nowhere.invalid' .* address of rank 0's machine",
    ),
]  # variables, message


def test_unusable_variables_of_a_launcher_are_refused(launched) -> None:
    for variables, message in UNUSABLE:
        with launched.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            with pytest.raises(UserError, match=message):
                start_world(ParallelConfig(), seed=0)
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "8"}, "RANK='' of the launcher; expected a number from 0 to 7"),
        ({"RANK": "3"}, "WORLD_SIZE='' of the launcher"),
        (
            {"LOCAL_WORLD_SIZE": "8"},
            "WORLD_SIZE='' of the launcher.* unset WORLD_SIZE, RANK, LOCAL",
        ),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8, but RANK and WORLD_SIZE are not"),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "3"}, "SLURM_PROCID=3, .* unset SLURM_PROCID for"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2, but"),
        # a batch script; srun --ntasks=1 in a larger job; mpirun of one process
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}, None),
    ],
)
def test_a_rank_without_its_number_is_refused(monkeypatch, variables, message) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if message is None:
        assert start_world(ParallelConfig(), seed=0).world_size == 1
        stop_world()
        return
    with pytest.raises(UserError, match=message):
        start_world(ParallelConfig(), seed=0)
    assert not dist.is_initialized()


def test_a_port_that_another_program_has_is_refused(launched) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", _port()))
        other.listen()
        with pytest.raises(UserError, match=r"rank 0 cannot serve .* EADDRINUSE.* another port"):
            meet(TIMEOUT)


def test_an_absent_rank_is_logged_and_then_named(launched, caplog) -> None:
    """In the store of torchrun's agent, which still has the keys of an earlier attempt."""
    launched.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    launched.setattr(rendezvous, "_meetings", itertools.count())
    agent = dist.TCPStore("127.0.0.1", _port(), is_master=True, wait_for_workers=False)
    for key in ("attempt_0.0/arrived/1", "attempt_0.0/arrived/2", "attempt_1.0/arrived/1"):
        agent.set(key, "")
    with pytest.raises(
        UserError, match=r"1 of 3 ranks have not started: 2 within 0:00:01.* \(fault"
    ):
        meet(TIMEOUT)
    assert caplog.messages == ["1 of 3 ranks have not started: 2; waiting up to 0:00:01"]


def test_a_wait_ends_when_no_rank_comes_any_more(launched) -> None:
    """Rank 0 waits until rank 1 has come, and a third of the time from then on."""
    launched.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    launched.setattr(rendezvous, "_meetings", itertools.count())
    agent = dist.TCPStore("127.0.0.1", _port(), is_master=True, wait_for_workers=False)

    def come() -> None:
        agent.set("attempt_1.0/arrived/1", "")
        agent.add("attempt_1.0/arrivals", 1)

    late, began = threading.Timer(4.0, come), time.monotonic()
    late.start()
    with pytest.raises(UserError, match=r"1 of 3 ranks have not started: 2 within 0:00:18, or"):
        meet(timedelta(seconds=18))
    assert 8 < time.monotonic() - began < 17
    late.join()


def test_an_absent_rank_0_is_logged_and_then_named(launched, caplog) -> None:
    launched.setenv("RANK", "1")
    with pytest.raises(UserError, match=r"rank 0 has not started: nothing listens .* within"):
        meet(TIMEOUT)
    assert ["rank 0 has not started" in message for message in caplog.messages] == [True]


def test_ranks_with_other_settings_than_rank_0_end_all_ranks_in_the_same_words(launched) -> None:
    assert _exit_codes(_start_otherwise) == [0, 0, 0]


def _exit_codes(start: Callable[[int, int], None]) -> list[int | None]:
    """The exit codes of three ranks that call `start(rank, port)`."""
    ranks = [start_process(start, rank, _port()) for rank in range(3)]
    for process in ranks:
        process.join(timeout=60)
    return [process.exitcode for process in ranks]


def _start_otherwise(rank: int, port: int) -> None:
    config = load_config(SMOKE, [f"kl.beta={0.5 if rank == 2 else 0.1}"])
    _of_rank(rank, port)
    message = (
        r"rank 2 of 3 was started with other settings than rank 0: kl\.beta=0\.5 \(rank 0: 0\.1\)"
    )
    with pytest.raises(UserError, match=message):
        start_configured_world(config)


def test_a_rank_that_dies_is_named_as_the_cause(launched) -> None:
    assert _exit_codes(_lose_rank_1) == [0, 9, 0]


def _lose_rank_1(rank: int, port: int) -> None:
    _of_rank(rank, port)
    start_world(ParallelConfig(), seed=0)
    assert gather_objects(rank) == [0, 1, 2]
    if rank == 1:
        os._exit(9)
    with pytest.raises(UserError, match=f"rank {rank} has lost another rank"), naming_lost_ranks():
        gather_objects(rank)
    os._exit(0)  # the groups cannot be left in order


def test_ranks_that_come_late_meet(launched) -> None:
    assert _exit_codes(_start) == [0, 0, 0]


def _of_rank(rank: int, port: int) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})


def _start(rank: int, port: int) -> None:
    _of_rank(rank, port)
    time.sleep(0.3 if rank == 0 else 0)
    start_world(ParallelConfig(), seed=0)
    assert gather_objects(rank) == [0, 1, 2]
    stop_world()
