"""Run one SGLang server that ends when its owner does. A program, not a module of the trainer.

    python -P launch_server.py --owner-pid PID SGLANG_ARGUMENT...

It runs in the servers' own environment, which has neither this package nor Megatron. `-P` keeps
this folder off Python's path, where requests.py would hide the package of that name.
"""

import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

if any(a == "--device" and b == "cpu" for a, b in zip(sys.argv, sys.argv[1:], strict=False)):
    import sglang_cpu  # tools/sglang_cpu, which `make sglang` installs

    sglang_cpu.prepare()  # before SGLang is imported


class Unprinted(str):
    """The key, hidden from SGLang's log, which prints all settings at the start."""

    def __repr__(self) -> str:
        return "'(not printed)'"


def end_with_owner(pid: int, interval_seconds: float = 0.5) -> None:
    """Kill this server's process group once `pid` is no longer its parent.

    It polls, because PR_SET_PDEATHSIG fires when the *thread* that started the server ends.
    """
    while os.getppid() == pid:
        time.sleep(interval_seconds)
    end_group()


def end_group() -> None:
    """End this server and its workers, without which the process would wait for them for ever."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def write_parameter(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Write a parameter into a new file: the first name is the file's, the second the parameter's.

    SGLang calls it in each tensor rank as it would call a loader of weights; nothing is loaded. An
    error is only printed, because it would end the server.
    """
    import torch

    (file, _), (name, _) = named_tensors
    held = dict([*model.named_parameters(), *model.named_buffers()]).get(name)
    try:
        with open(file, "xb") as new:
            torch.save(None if held is None else held.detach().cpu().clone(), new)
    except OSError:
        traceback.print_exc()


def main(arguments: list[str]) -> None:
    owned = arguments[:1] == ["--owner-pid"]
    if owned:
        owner, arguments = int(arguments[1]), arguments[2:]
        threading.Thread(target=end_with_owner, args=(owner,), daemon=True).start()

    key = os.environ.pop("STABLE_OPD_SGLANG_API_KEY", None)  # argv would be public

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    settings = prepare_server_args(arguments)
    if key is not None:
        settings.api_key = Unprinted(key)
    try:
        launch_server(settings)
    except Exception:
        traceback.print_exc()
    if owned:  # it leads its own process group
        sys.stdout.flush()
        end_group()


if __name__ == "__main__":
    main(sys.argv[1:])
