"""`make gpu-bundle`: everything that the suite needs on a machine without a network, in one folder.

    python -m benchmarks.gpu.bundle [--archives FILE...] [--out build/gpu-bundle]

The folder is for Python 3.12 on x86-64 with torch 2.11, triton and transformers. It holds
`site.tar.xz` (the packages of requirements/gpu-bundle.txt, without their tests), `project.tar.xz`
(this commit), the archives that were named (site-packages with a compiled Transformer Engine), and
`start.py`, which unpacks them and runs the suite. Packages come from the package index; nothing is
built.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 60 * 10**6
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
LEFT_OUT = ("*/tests/*", "onnx/backend/test/*", "*.pyi", "*.h", "*.cc", "*.proto")
REQUIREMENTS = "requirements/gpu-bundle.txt"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bundle")
    parser.add_argument(
        "--archives", nargs="*", type=Path, default=[], help="tar files of site-packages"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu-bundle"))
    options = parser.parse_args()
    missing = [str(archive) for archive in options.archives if not archive.is_file()]
    if missing:
        sys.exit(f"--archives: no such file: {', '.join(missing)}")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        download(wheels)
        for wheel in sorted(wheels.iterdir()):
            unpack_wheel(wheel, site)
        pack(site, options.out / "site.tar.xz")
        commit = pack_project(Path(scratch) / "project", options.out / "project.tar.xz")
        packages = [wheel.name.split("-")[:2] for wheel in sorted(wheels.iterdir())]
    for archive in options.archives:
        shutil.copy(archive, options.out)
    shutil.copy(Path(__file__).with_name("start.py"), options.out)
    contents = {"commit": commit, "python": PYTHON, "packages": dict(packages)}
    (options.out / "contents.json").write_text(json.dumps(contents, indent=1) + "\n")
    check_size(options.out)


def download(folder: Path) -> None:
    """The wheels of REQUIREMENTS for the machine, whatever Python runs here."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_x86_64"]
    finished = subprocess.run([*command, "--requirement", str(ROOT / REQUIREMENTS)], check=False)
    if finished.returncode:
        sys.exit(f"{REQUIREMENTS}: pip could not download these packages for Python {PYTHON}")


def unpack_wheel(wheel: Path, site: Path) -> None:
    """What pip would install into site-packages, without the files of LEFT_OUT."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/") or any(fnmatch(name, pattern) for pattern in LEFT_OUT):
                continue
            first, *rest = name.split("/")
            if first.endswith(".data"):  # NAME.data/purelib/package/..., and scripts and data
                if rest[0] not in ("purelib", "platlib"):
                    continue
                name_in_site = "/".join(rest[1:])
            else:
                name_in_site = name
            target = site / name_in_site
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def pack_project(folder: Path, file: Path) -> str:
    """This commit's files; returns its hash."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode:
        print(f"uncommitted changes are not packed: the bundle holds {commit[:12]}")
    tar = folder.with_suffix(".tar")
    subprocess.run([*git, "archive", "--format=tar", f"--output={tar}", commit], check=True)
    with tarfile.open(tar) as archive:
        archive.extractall(folder, filter="data")
    pack(folder, file)
    return commit


def pack(folder: Path, file: Path) -> None:
    with tarfile.open(file, "w:xz") as archive:
        archive.add(folder, arcname=".")


def check_size(folder: Path) -> None:
    """Print what each file takes; end with an error where all of them take too much."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 1e6:6.1f} MB  {name}")
    total = sum(sizes.values())
    if total > LIMIT_BYTES:
        sys.exit(f"{folder}: {total / 1e6:.1f} MB is more than {LIMIT_BYTES / 1e6:.0f} MB")
    print(f"{total / 1e6:6.1f} MB  {folder}")


if __name__ == "__main__":
    main()
