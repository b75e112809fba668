"""The program that runs a server, with a package of the name of SGLang's that prints."""

import json
import os
import signal
import subprocess
import sys

from stable_opd_mcore.serving.command import PROGRAM, ServerOptions, launch_command

PRINT = """
import json, sys, threading, time

class Settings:
    api_key = None

def prepare_server_args(arguments):
    return Settings()

def launch_server(settings):
    hidden = [name for name in ("requests", "sgl_kernel", "sglang_cpu") if name in sys.modules]
    print(json.dumps({"path": sys.path, "loaded": hidden, "key": repr(settings.api_key)}))
    threading.Thread(target=time.sleep, args=(600,)).start()  # a worker that keeps running
    raise OSError("the application has ended")
"""


def test_a_gpu_server_finds_nothing_of_ours_and_ends_with_its_application(tmp_path):
    """The program's folder would hide `requests`; workers would keep an ended server alive."""
    package = tmp_path / "sglang/srt/entrypoints"
    package.mkdir(parents=True)
    for file in (package / "http_server.py", package.parent / "server_args.py"):
        file.write_text(PRINT)
    command = launch_command(ServerOptions(sys.executable, "m", device="cuda"), 1, os.getpid())
    environment = {"PYTHONPATH": str(tmp_path), "STABLE_OPD_SGLANG_API_KEY": "secret"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, start_new_session=True, timeout=60
    )
    assert "the application has ended" in done.stderr
    assert done.returncode == -signal.SIGKILL  # and not after ten minutes
    found = json.loads(done.stdout)
    assert str(tmp_path) in found["path"]
    assert str(PROGRAM.parent) not in found["path"]
    assert found["loaded"] == []
    assert found["key"] == "'(not printed)'"
