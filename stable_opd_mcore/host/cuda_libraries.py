"""The CUDA libraries that pip installed in a Python environment, and those that a process loads.

torch finds its own by its RPATH. Others search in an order of their own: Transformer Engine looks
in CUDA_HOME and /usr/local/cuda first, cuDNN's parts in LD_LIBRARY_PATH, and SGLang's memory saver
only there. A second cuDNN or CUDA runtime in a process is a mismatch of versions, or a crash.

Also a program, for either environment, so it imports only the standard library:

    python -P cuda_libraries.py [--memory-saver] MODULE...     # imports them, prints a Report
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

Name = tuple[str, str]  # ("libcudart", "13"): a library and its major version
Libraries = dict[Name, list[Path]]

_LIBRARY = re.compile(r"(lib[\w+-]+)\.so\.(\d+)")
# Variables in which Transformer Engine looks first, and the library that it loads from there.
_SEARCHED_FIRST = {"CUDNN_HOME": "libcudnn", "NVRTC_HOME": "libnvrtc", "CURAND_HOME": "libcurand"}
# In an environment without pip's libraries, as conda's, a second copy of these is a fault.
_LOADED_ONCE = ("libcudart", "libcudnn", "libnccl", "libcublas", "libnvrtc")
_FAILED = "the process failed: "
TOO_SLOW = f"{_FAILED}importing"  # begins the error of a process that took too long
# It loads the CUDA toolkit's runtime next to torch's, on purpose (its _preload_cuda_library).
SGLANG_KERNELS = "sgl_kernel"


@dataclass(frozen=True)
class Report:
    """What one interpreter finds on this machine."""

    torch: str = ""  # its version; "" if it cannot be imported
    cuda: str = ""  # the CUDA release that torch is built for; "" for a CPU build
    num_gpus: int = 0  # those that torch can use
    no_gpu_reason: str = ""  # torch's words where there are none
    import_error: str = ""  # of a module that was to be imported
    foreign: tuple[str, ...] = ()  # loaded libraries of which the environment has another file
    python_header: str = ""  # where Python.h should be
    has_python_header: bool = False
    glibc: str = ""  # "2.39"


def library_folders(python: str) -> list[Path]:
    """Folders of CUDA's libraries in the environment of an interpreter, which is not started."""
    home = Path(python).absolute().parent.parent  # the venv's: links are not followed
    return sorted(home.glob("lib/python3*/site-packages/nvidia/*/lib"))


def prefer_own_libraries() -> None:
    """Have Transformer Engine and cuDNN load this environment's libraries, whatever the variables
    say. Called before Transformer Engine is imported."""
    own = own_libraries()
    for variable, wanted in _SEARCHED_FIRST.items():
        for (library, _), files in own.items():
            if library == wanted:
                os.environ[variable] = str(files[0].parents[1])
    parts = [files[0] for (library, _), files in own.items() if library.startswith("libcudnn_")]
    # The others need graph and ops. A loaded library is found by its name, before any path.
    for file in sorted(parts, key=lambda part: ("graph" not in part.name, "ops" not in part.name)):
        ctypes.CDLL(str(file))


def own_libraries() -> Libraries:
    """The libraries in this environment's site-packages/nvidia, the shortest file name first."""
    package = find_spec("nvidia")
    roots = list(package.submodule_search_locations or ()) if package else []
    found = [file for root in roots for file in Path(root).glob("*/lib/lib*.so.*")]
    own: Libraries = {}
    for file in sorted(found, key=lambda file: (len(file.name), file)):
        if name := _name_of(file.name):
            own.setdefault(name, []).append(file)
    return own


def foreign_libraries(maps: str, own: Libraries) -> tuple[str, ...]:
    """Files in a process's `/proc/PID/maps` that are not the environment's own; see `Report`."""
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    loaded = sorted({fields[5].removesuffix(" (deleted)") for fields in lines if len(fields) > 5})
    return tuple(_foreign(loaded, own))


def _foreign(loaded: Iterable[str], own: Libraries) -> Iterator[str]:
    first: dict[Name, str] = {}
    for path in loaded:
        name = _name_of(os.path.basename(path))
        if name is None:
            continue
        if name in own:
            if os.path.realpath(path) not in map(os.path.realpath, own[name]):
                yield path
        elif name[0] in _LOADED_ONCE and first.setdefault(name, path) != path:
            yield path


def _name_of(file: str) -> Name | None:
    match = _LIBRARY.match(file)
    return (match[1], match[2]) if match else None


def read_report(
    command: list[str], modules: Iterable[str], environment: dict[str, str], seconds: float
) -> Report:
    """What a process finds that `command` starts: an interpreter and this program.

    Its import_error says why there is no report.
    """
    try:
        answer = subprocess.run(
            [*command, *modules], env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Report(import_error=f"{TOO_SLOW} {' '.join(modules)} took {seconds:g} s")
    except OSError as error:
        return Report(import_error=f"{_FAILED}{error}")
    lines = answer.stdout.splitlines()
    if answer.returncode or not lines:
        words = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
        ended = f"exit code {answer.returncode}" if answer.returncode >= 0 else "a signal"
        return Report(import_error=f"{_FAILED}{words[-1] if words else ended}")
    try:
        fields = json.loads(lines[-1])
    except ValueError:
        return Report(import_error=f"{_FAILED}{lines[-1]}")
    return Report(**fields | {"foreign": tuple(fields["foreign"])})


def main(arguments: list[str]) -> int:
    """Print a Report as a line of JSON."""
    if arguments[:1] == ["--memory-saver"]:
        return _below_the_memory_saver(arguments[1:])
    header = Path(sysconfig.get_path("include"), "Python.h")
    facts = Report(
        python_header=str(header),
        has_python_header=header.is_file(),
        glibc=(os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2],
    )
    fields = asdict(facts) | _imported(name for name in arguments if name != SGLANG_KERNELS)
    fields["foreign"] = foreign_libraries(Path("/proc/self/maps").read_text(), own_libraries())
    if SGLANG_KERNELS in arguments and not fields["import_error"]:
        fields |= _imported([SGLANG_KERNELS])
    fields |= _torch()
    print(json.dumps(fields))
    return 0


def _below_the_memory_saver(modules: list[str]) -> int:
    """As SGLang starts its workers with --enable-memory-saver: under LD_PRELOAD of its hook."""
    from torch_memory_saver.hooks.mode_preload import configure_subprocess  # pyright: ignore

    with configure_subprocess():
        command = [sys.executable, "-P", __file__, *modules]
        return subprocess.run(command).returncode


def _imported(modules: Iterable[str]) -> dict[str, str]:
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        return {"import_error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {}


def _torch() -> dict[str, str | int]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return {}
    facts: dict[str, str | int] = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
    }
    if torch.cuda.is_available():
        return facts | {"num_gpus": torch.cuda.device_count()}
    return facts | {"no_gpu_reason": no_gpu_reason(torch)}


def no_gpu_reason(torch: object) -> str:
    """torch's own words on why it can use no GPU; `torch` is the module."""
    try:
        torch.cuda.init()  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:
        return str(error).splitlines()[0]
    return "torch.cuda.is_available() is false"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
