"""The program that runs a server, with a package of the name of SGLang's that prints."""

import json
import os
import subprocess
import sys

from stable_opd_mcore.serving.command import PROGRAM, ServerOptions, launch_command

PRINT = """
import importlib.util, json, sys

class Settings:
    api_key = None

def prepare_server_args(arguments):
    return Settings()

def launch_server(settings):
    hidden = [name for name in ("requests", "sgl_kernel", "sglang_cpu") if name in sys.modules]
    print(json.dumps({"path": sys.path, "loaded": hidden, "key": repr(settings.api_key)}))
"""


def test_a_gpu_server_finds_nothing_of_ours_where_it_looks_for_packages(tmp_path):
    """The folder of the program would hide the package `requests`, and once hid sgl_kernel."""
    package = tmp_path / "sglang/srt/entrypoints"
    package.mkdir(parents=True)
    for file in (package / "http_server.py", package.parent / "server_args.py"):
        file.write_text(PRINT)
    command = launch_command(ServerOptions(sys.executable, "m", device="cuda"), 1, os.getpid())
    environment = {"PYTHONPATH": str(tmp_path), "STABLE_OPD_SGLANG_API_KEY": "secret"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert str(tmp_path) in found["path"]
    assert str(PROGRAM.parent) not in found["path"]
    assert found["loaded"] == []
    assert found["key"] == "'(not printed)'"
