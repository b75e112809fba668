"""Compilers under a server count while they work; those that wait, and others, do not."""

import os
import shutil
import signal
import subprocess
import sys
import time

from stable_opd_mcore.serving import compiling
from stable_opd_mcore.serving.compiling import CompilerWatch, compiler_seconds

START = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:4]).pid, flush=True); "


def test_a_compiler_that_works_under_a_server_is_told_from_one_that_waits(tmp_path, monkeypatch):
    """The server is a Python process, its compiler a shell named nvcc that counts for ever."""
    program, nvcc, shell = tmp_path / "launch_server.py", tmp_path / "nvcc", shutil.which("sh")
    assert shell is not None
    shutil.copy(shell, nvcc)
    monkeypatch.setattr(compiling, "PROGRAM", program)
    command = [sys.executable, "-c", START + "time.sleep(600)", str(nvcc), "-c"]
    with subprocess.Popen(
        [*command, "while :; do :; done", str(program)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        compiler = int(server.stdout.readline())
        try:
            watch = CompilerWatch()
            deadline = time.monotonic() + 30
            while not watch.has_compiled():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(compiler, signal.SIGSTOP)
            time.sleep(0.1)
            watch.has_compiled()
            assert not watch.has_compiled()
            monkeypatch.setattr(compiling, "PROGRAM", tmp_path / "other.py")
            assert compiler not in compiler_seconds()
        finally:
            os.kill(compiler, signal.SIGKILL)
            server.kill()
