"""What is refused before an install, and what the gate finds in the installs of other machines."""

import os
import platform
import sys

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import parse_tag

from tools import check_python
from tools.resolve_installs import File, Install, check

SDIST = File(frozenset(), SpecifierSet(">=3.8"))
EVERYWHERE = File(parse_tag("py3-none-any"), SpecifierSet(""))


def wheel(tag: str, pythons: str = "") -> File:
    return File(parse_tag(tag), SpecifierSet(pythons))


NO_FILE = [
    ([EVERYWHERE, SDIST], {}, ""),
    ([SDIST], {}, "3.11, x86_64: a 1 has no wheel"),
    ([SDIST], {"built": (("a", ""),)}, ""),
    ([EVERYWHERE], {"built": (("a", "aarch64"),)}, "aarch64: a 1 has a wheel, and is in"),
    ([wheel("py3-none-manylinux_2_34_aarch64.manylinux_2_34_x86_64")], {}, "a 1 has no wheel"),
    ([wheel("py3-none-manylinux_2_34_aarch64.manylinux_2_34_x86_64")], {"glibc": 34}, ""),
    ([wheel("cp311-abi3-manylinux1_x86_64")], {}, "3.14, aarch64: a 1 has no wheel"),
    ([wheel("py3-none-any", "<3.13")], {}, "3.13, x86_64: a 1 does not take this Python"),
    ([wheel("py3-none-any", "<3.13")], {"pythons": ("3.11", "3.12")}, ""),
    ([EVERYWHERE], {"pythons": ("3.11", "3.12")}, "3.13, x86_64: works, but is not in"),
]  # files, install, faults


def test_an_install_is_named_where_a_version_has_no_file():
    for files, install, faults in NO_FILE:
        wanted = [
            Requirement("a==1 ; sys_platform == 'linux'"),
            Requirement("b==2; os_name == 'nt'"),
        ]
        found = list(check(Install(("dev",), **install), wanted, {("a", "1"): files}))
        assert any(faults in fault for fault in found) if faults else not found


@pytest.mark.parametrize(
    ("changed", "found", "needed"),
    [
        ((sys, "version_info", (3, 10, 13)), "CPython", "CPython 3.11 to 3.14"),
        ((sys, "version_info", (3, 15, 0)), "CPython", "CPython 3.11 to 3.14"),
        ((platform, "python_implementation", lambda: "PyPy"), "PyPy", "CPython 3.11 to 3.14"),
        ((platform, "machine", lambda: "ppc64le"), "Linux on ppc64le", "Linux on x86_64 or"),
        ((sys, "platform", "darwin"), "on ", "Linux on x86_64 or aarch64"),
        ((platform, "libc_ver", lambda: ("glibc", "2.17")), "glibc 2.17", "glibc 2.28 or later"),
        ((platform, "libc_ver", lambda: ("", "")), "a C library that is not", "glibc 2.28"),
        ((sys, "executable", os.devnull), "without the module venv", "-venv; try: apt-get"),
    ],
)
def test_a_machine_or_python_that_does_not_fit_is_named_in_one_line(
    monkeypatch, changed, found, needed
):
    assert not check_python.main(["make", "demo"])
    monkeypatch.setattr(*changed)
    line = check_python.main(["make", "demo"])
    assert found in line.partition("; needed: ")[0]
    assert needed in line.partition("; needed: ")[2]
    assert "; try: " in line
    assert "\n" not in line
