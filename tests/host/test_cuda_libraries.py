"""Which CUDA libraries a process loads; the files are copies of a real one under their names."""

import _ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

from stable_opd_mcore.host import cuda_libraries
from stable_opd_mcore.host.cuda_libraries import (
    SGLANG_KERNELS,
    foreign_libraries,
    library_folders,
    read_report,
)

# Loads cuDNN as Transformer Engine does: the folder of CUDNN_HOME first, for all to see.
TRANSFORMER_ENGINE = """
import ctypes, glob, os
(found,) = glob.glob(f"{os.environ['CUDNN_HOME']}/**/libcudnn.so*", recursive=True)
ctypes.CDLL(found, mode=ctypes.RTLD_GLOBAL)
"""
LOADED = """
import stable_opd_mcore, transformer_engine
from stable_opd_mcore.host.cuda_libraries import foreign_libraries, own_libraries
maps = open("/proc/self/maps").read()
assert foreign_libraries(maps, own_libraries()) == (), foreign_libraries(maps, own_libraries())
loaded = [file for files in own_libraries().values() for file in files if f"{file}\\n" in maps]
print(*(file.name for file in loaded))
"""


def install(site_packages: Path, *names: str) -> Path:
    for name in names:
        file = site_packages / "nvidia" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ctypes.__file__, file)
    return site_packages / "nvidia"


def test_folders_are_those_of_the_interpreters_own_environment(tmp_path):
    own = install(tmp_path / "venv/lib/python3.12/site-packages", "cu13/lib/libcudart.so.13")
    (tmp_path / "venv/bin").mkdir()
    python = tmp_path / "venv/bin/python"
    python.symlink_to(sys.executable)
    assert library_folders(str(python)) == [own / "cu13/lib"]
    assert library_folders("/usr/bin/no-python") == []


def test_transformer_engine_gets_the_environments_cudnn_whatever_the_shell_says(tmp_path):
    names = ("libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_ops.so.9", "libcudnn_adv.so.9")
    own = tmp_path / "own"
    install(own, *(f"cudnn/lib/{name}" for name in names))
    (own / "transformer_engine").mkdir()
    (own / "transformer_engine/__init__.py").write_text(TRANSFORMER_ENGINE)
    foreign = install(tmp_path / "foreign", *(f"lib/{name}" for name in names))
    variables = {"CUDNN_HOME": str(foreign), "LD_LIBRARY_PATH": str(foreign / "lib")}
    run = subprocess.run(
        [sys.executable, "-c", LOADED],
        env=os.environ | variables | {"PYTHONPATH": f"{own}:{Path.cwd()}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert set(names) <= set(run.stdout.split())  # torch from PyPI brings more of them


def test_another_file_of_a_library_is_foreign(tmp_path):
    own = install(tmp_path, "cu13/lib/libcudart.so.13") / "cu13/lib/libcudart.so.13"
    full = own.with_name("libcudart.so.13.0.96")
    (tmp_path / "link").symlink_to(own.parent)
    mapped = "7f00-7f01 r-xp 00000000 08:01 12 {}\n"
    table = {("libcudart", "13"): [own, full]}
    toolkit, older = "/opt/cuda 13/libcudart.so.13.0.96", "/opt/cuda/libcudart.so.12"
    for loaded, foreign in (
        ([own, full, tmp_path / "link/libcudart.so.13", "/usr/lib/libc.so.6"], ()),
        ([own, toolkit, older], (toolkit,)),
        (["/a/libnccl.so.2", "/b/libnccl.so.2.30.7", "[heap]"], ("/b/libnccl.so.2.30.7",)),
    ):
        maps = "".join(map(mapped.format, loaded)) + "7f00-7f01 rw-p 00000000 00:00 0\n"
        assert foreign_libraries(maps, table) == foreign


def test_a_report_says_why_there_is_none(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/bash\necho libcudart.so.13: cannot open >&2; exit 127\n")
    program.chmod(0o755)
    report = read_report([str(program)], ["torch"], {}, 10)
    assert report.import_error == "the process failed: libcudart.so.13: cannot open"
    command = [sys.executable, "-m", "stable_opd_mcore.host.cuda_libraries"]
    report = read_report(command, ["json", "absent_module"], {**os.environ}, 60)
    assert report.import_error == "ModuleNotFoundError: No module named 'absent_module'"
    program.write_text("#!/bin/bash\nexec sleep 60\n")
    assert "took 0.1 s" in read_report([str(program)], ["json"], {**os.environ}, 0.1).import_error


def test_the_runtime_that_sglangs_kernels_add_is_not_foreign(tmp_path):
    """Another module that loads it is at fault."""
    install(tmp_path, "cu13/lib/libcudart.so.13")
    toolkit = install(tmp_path / "toolkit", "libcudart.so.13") / "libcudart.so.13"
    command = [sys.executable, cuda_libraries.__file__]
    for module, foreign in ((SGLANG_KERNELS, ()), ("another", (str(toolkit),))):
        (tmp_path / f"{module}.py").write_text(f"import ctypes; ctypes.CDLL({str(toolkit)!r})")
        report = read_report(command, [module], os.environ | {"PYTHONPATH": str(tmp_path)}, 60)
        assert (report.import_error, report.foreign) == ("", foreign)
