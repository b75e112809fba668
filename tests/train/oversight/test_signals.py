"""Stop signals: all ranks stop after the same step, and none returns before the marker exists."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from stable_opd_mcore.host.run_directory import REQUEUE
from stable_opd_mcore.train.oversight.signals import (
    Stopped,
    StopReason,
    StopSignals,
    clear_outcome,
    shielded,
    write_outcome,
)
from tests.parallel.launch import run_ranks


def stop_when_one_rank_is_signalled(rank, world_size, directory):
    before = signal.getsignal(signal.SIGTERM)
    step = 0
    with StopSignals() as stop:
        while not stop.requested_on_any_rank():
            step += 1
            time.sleep(0.01 * rank)
            if rank == 1 and step == 3:
                # this thread gets it: a library's thread could report it a step later
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            assert step < 10
        if rank == 0:
            time.sleep(0.3)  # rank 1 must not return before this late marker exists
        write_outcome(directory, REQUEUE, step)
    assert (directory / REQUEUE).read_text() == '{"step": 3}'
    assert signal.getsignal(signal.SIGTERM) == before
    dist.barrier()
    if rank == 0:
        clear_outcome(directory)
        clear_outcome(directory)  # no error without a marker
        assert not (directory / REQUEUE).exists()


def test_all_ranks_stop_after_the_same_step(tmp_path):
    run_ranks(2, stop_when_one_rank_is_signalled, tmp_path)


def test_child_processes_survive_sigusr1():
    """Slurm may signal every process of a step; only the ranks must react."""
    listen = "import time; print('up', flush=True); time.sleep(30)"
    with StopSignals():
        child = subprocess.Popen([sys.executable, "-c", listen], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        assert child.poll() is None
        child.terminate()
        assert child.wait(timeout=10) == -signal.SIGTERM


def test_sigterm_is_deferred_while_shielded():
    with StopSignals() as stop:
        with shielded():
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            child.terminate()
            signal.raise_signal(signal.SIGTERM)  # this thread gets it: another one may be late
            assert not stop.requested_on_any_rank()
        assert stop.requested_on_any_rank() == StopReason.TERMINATE
        child.communicate(b"go on\n", timeout=30)
        assert child.returncode == 0


def test_signal_at_the_end_of_the_block_does_not_kill_the_process():
    with StopSignals():
        os.kill(os.getpid(), signal.SIGUSR1)


def test_first_ctrl_c_finishes_the_step_and_the_second_interrupts():
    with StopSignals() as stop:
        with pytest.raises(KeyboardInterrupt):  # nothing to save before the first step
            signal.raise_signal(signal.SIGINT)
        assert stop.requested() == StopReason.NONE
        stop.finish_step_first = True
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested_on_any_rank() == StopReason.INTERRUPT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_stopped_run_says_what_it_saved_and_its_code_names_the_signal():
    reasons = (StopReason.REQUEUE, StopReason.TERMINATE, StopReason.INTERRUPT)
    stopped = [Stopped(3, reason, Path("run/step_000003")) for reason in reasons]
    assert [each.code for each in stopped] == [0, 143, 130]
    assert stopped[1].text() == (
        "stopped by SIGTERM after step 3; checkpoint: run/step_000003. "
        "The same command resumes there."
    )
