"""Refuse a machine or a Python for which torch has no wheels, before anything is downloaded.

    python3 tools/check_python.py make demo

Prints one line: what was found, what is needed, the command that fixes it. It runs on the Python
that it refuses, so it is written for every release since 2.7.
"""

import io
import os
import platform
import re
import subprocess
import sys
import sysconfig

PROJECT = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "pyproject.toml"
)
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)
CONTAINER = "docker run --rm -it -v $PWD:/opd -w /opd python:3.12 %s"


def main(command):
    for check in (machine, c_library, python):
        fault = check(command)
        if fault:
            return "found %s; needed: %s; try: %s" % fault
    return ""


def machine(command):
    if sys.platform.startswith("linux") and platform.machine() in MACHINES:
        return None
    found = "%s on %s" % (platform.system(), platform.machine())
    return found, "Linux on %s" % " or ".join(MACHINES), CONTAINER % command


def c_library(command):
    name, version = platform.libc_ver()
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if name == "glibc" and numbers >= GLIBC:
        return None
    found = "glibc %s" % version if name == "glibc" else "a C library that is not glibc"
    return found, "glibc %d.%d or later, as in Debian 10" % GLIBC, CONTAINER % command


def python(command):
    """The release, the implementation, the global lock, the modules that make a venv."""
    oldest, after = supported()
    found = "%s %s" % (platform.python_implementation(), platform.python_version())
    wanted = "CPython 3.%d to 3.%d" % (oldest, after - 1)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return found + " without the global lock", wanted + " with it", remedy(command)
    fits = sys.version_info[0] == 3 and oldest <= sys.version_info[1] < after
    if not fits or platform.python_implementation() != "CPython":
        return "%s (%s)" % (found, sys.executable), wanted, remedy(command)
    if not makes_venvs(sys.executable):
        package = "python3.%d-venv" % sys.version_info[1]
        return found + " without the module venv", package, "apt-get install " + package
    return None


def supported():
    """The oldest minor release of Python 3, and the first that is too new."""
    with io.open(PROJECT, encoding="utf-8") as file:
        bounds = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', file.read())
    return int(bounds.group(1)), int(bounds.group(2))


def remedy(command):
    """The command with a Python of this machine that fits, else how to get one."""
    for minor in reversed(range(*supported())):
        if makes_venvs("python3.%d" % minor):
            return "%s PYTHON=python3.%d" % (command, minor)
    return "apt-get install python3.12-venv && %s PYTHON=python3.12" % command


def makes_venvs(executable):
    """Whether it starts (a version manager's name for it may not) and has the modules."""
    with open(os.devnull, "w") as nowhere:
        try:
            code = subprocess.call([executable, "-c", "import ensurepip, venv"], stderr=nowhere)
        except OSError:
            return False
    return code == 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]) or "make") or 0)
