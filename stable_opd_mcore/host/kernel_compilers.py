"""What SGLang's servers compile their kernels with: a CUDA toolkit, a C++ compiler and ninja.

Servers compile when they start, after the trainer has loaded its models. Not here: the C compiler
of Triton (commands/check/node.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

Faults = dict[str, str]  # kind of a fault -> its line

_KERNEL = """
#include <cuda_bf16.h>
__global__ void kernel(__nv_bfloat16 *x) { *x = __float2bfloat16(1.0f); }
void launch(__nv_bfloat16 *x) { kernel<<<1, 1>>>(x); }
"""


def toolkit_home(environment: Mapping[str, str]) -> Path:
    """Where SGLang looks for the CUDA toolkit: CUDA_HOME or CUDA_PATH, around the nvcc in PATH, or
    /usr/local/cuda."""
    if home := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return Path(home)
    nvcc = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    return Path(nvcc).parents[1] if nvcc else Path("/usr/local/cuda")


def missing_tools(python: str, environment: Mapping[str, str], *, with_draft: bool = False) -> str:
    """What this machine lacks to compile kernels, as one line with the remedies; "" if nothing.

    Ninja is looked for next to the servers' interpreter (serving/command.py), then in PATH. The
    kernel that judges a draft's tokens is compiled for the first of them, and needs curand.h.
    """
    path = environment.get("PATH", os.defpath)
    home, compiler = toolkit_home(environment), _compiler(environment)
    own_folder = str(Path(python).absolute().parent)
    toolkit = "install the CUDA toolkit there, or set CUDA_HOME to where it is"
    found = {
        f"nvcc in {home}/bin: {toolkit}": (home / "bin/nvcc").is_file(),
        f"libcudart.so in {home}/lib64: {toolkit}": (home / "lib64/libcudart.so").exists(),
        f"the C++ compiler {compiler}: install g++, or set CXX": shutil.which(compiler, path=path),
        f"ninja: {python} -m pip install ninja": shutil.which("ninja", path=f"{own_folder}:{path}"),
    }
    if with_draft:
        folders = (home / "include", *map(Path, environment.get("CPATH", "").split(os.pathsep)))
        header = (
            f"curand.h in {home}/include: install the toolkit's cuRAND, or set CPATH to its folder"
        )
        found[header] = any((folder / "curand.h").is_file() for folder in folders)
    missing = [what for what, is_there in found.items() if not is_there]
    words = "; without ".join(missing)
    return f"servers compile kernels here, without {words}" if missing else ""


def compiler_faults(python: str, cuda: str, environment: Mapping[str, str]) -> Faults:
    """What keeps servers from compiling a kernel; one is compiled and linked as SGLang does.

    Args:
        cuda: the CUDA release of the servers' torch; "": unknown, so the toolkit's is not compared.
        environment: the servers' variables.
    """
    if missing := missing_tools(python, environment):
        return {"servers' compiler": missing}
    return dict(_release_faults(cuda, environment)) or dict(_kernel_faults(environment))


def _release_faults(cuda: str, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """A toolkit of another major release than torch's, and a compiler without C++20."""
    home, compiler = toolkit_home(environment), _compiler(environment)
    _, version = _run(environment, str(home / "bin/nvcc"), "--version")
    match = re.search(r"release (\d+)\.(\d+)", version)
    if match and cuda and match[1] != cuda.partition(".")[0]:
        yield (
            "servers' toolkit",
            f"the CUDA toolkit in {home} is {match[1]}.{match[2]}, and torch is built for CUDA "
            f"{cuda}: kernels that servers compile would not fit; install toolkit {cuda} and set "
            "CUDA_HOME to it",
        )
    options = ("-std=c++20", "-fsyntax-only", "-x", "c++", os.devnull)
    code, words = _run(environment, compiler, *options)
    if code:
        yield (
            "servers' C++",
            f"{compiler} does not compile C++20, which SGLang's kernels are written in "
            f"({_reason(code, words)}): install g++ 10 or later, or set CXX to it",
        )


def _kernel_faults(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """A kernel that is not built: nvcc does not take the g++ in PATH, or a toolkit lacks parts."""
    home, compiler = toolkit_home(environment), _compiler(environment)
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "kernel.cu"), str(Path(folder, "kernel.o"))
        source.write_text(_KERNEL)
        nvcc = (str(home / "bin/nvcc"), "-std=c++20", "-Xcompiler", "-fPIC", "-c", str(source))
        link = ("-shared", "-o", str(Path(folder, "kernel.so")), f"-L{home}/lib64", "-lcudart")
        for command in ((*nvcc, "-o", built), (compiler, built, *link)):
            code, words = _run(environment, *command)
            if code:
                yield (
                    "servers' kernels",
                    f"{command[0]} does not build a small CUDA kernel ({_reason(code, words)}): "
                    "servers build theirs with it; install the whole toolkit, and a g++ that it "
                    "takes first in PATH",
                )
                return


def _compiler(environment: Mapping[str, str]) -> str:
    return environment.get("CXX", "c++")


def _reason(code: int, words: str) -> str:
    """The first line that names an error."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    named = (line for line in lines if re.search("error|fatal", line))
    return next(named, next(iter(lines), f"exit code {code}"))


def _run(environment: Mapping[str, str], *command: str) -> tuple[int, str]:
    """A program's exit code and what it prints; 1 and the error where it cannot be started."""
    try:
        answer = subprocess.run(
            command, env={**environment}, capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return answer.returncode, answer.stderr + answer.stdout
