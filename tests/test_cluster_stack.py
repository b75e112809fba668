"""What names a version of the cluster's software agrees with requirements/cluster.toml."""

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.serving.process import RELEASE

ROOT = Path(__file__).parents[1]
STACK = tomllib.loads((ROOT / "requirements/cluster.toml").read_text())
PACKAGES = STACK["packages"]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_extras_pin_the_stack() -> None:
    extras = PROJECT["optional-dependencies"]
    pins = {}
    for requirement in map(Requirement, [*extras["gpu"], *extras["sglang"]]):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        pins[requirement.name] = specifier.version
    assert pins == {name: PACKAGES[name] for name in pins}
    assert {"torch", "nvidia-nccl-cu13", "transformer-engine", "sglang"} <= pins.keys()


def test_the_project_accepts_the_stack() -> None:
    for requirement in map(Requirement, PROJECT["dependencies"]):
        if requirement.name in PACKAGES:
            assert requirement.specifier.contains(PACKAGES[requirement.name]), requirement


def test_the_skypilot_task_installs_the_stack_and_starts_torchrun_sh() -> None:
    """SkyPilot itself reads the file where it is installed."""
    path = ROOT / "launch/skypilot.yaml"
    task = yaml.safe_load(path.read_text())
    image = STACK["image"].replace("-cudnn", "")  # torch brings its own cuDNN
    assert task["resources"]["image_id"] == f"docker:{image}"
    assert f"python{STACK['python']}/" in task["setup"]
    assert task["run"].split() == ["launch/torchrun.sh", "train", '"$CONFIG"', "$ARGUMENTS"]
    assert load_config(ROOT / task["envs"]["CONFIG"]).student.path == "models/Qwen3-1.7B-Base"
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if find_spec("sky"):
        import sky

        assert sky.Task.from_yaml(str(path)).name == "stable-opd"


def test_sglangs_own_pins_are_in_the_stack() -> None:
    """As installed for the tests: another torch in the stack could not be installed with it."""
    for metadata in ROOT.glob(".venv-sglang/lib/*/site-packages/sglang-*.dist-info/METADATA"):
        lines = metadata.read_text().splitlines()
        pins = [Requirement(line[15:]) for line in lines if line.startswith("Requires-Dist: ")]
        for requirement in pins:
            if requirement.marker is None and requirement.name in PACKAGES:
                version = PACKAGES[requirement.name]
                assert requirement.specifier.contains(version), f"{requirement}, not {version}"


def test_the_image_installs_from_the_stack() -> None:
    assert f"FROM {STACK['image']}\n" in DOCKERFILE
    assert not re.search(r"==\s*[\d\"$]", DOCKERFILE), "a version outside cluster.toml"
    printed = {
        part: subprocess.run(
            [sys.executable, ROOT / "requirements/cluster_stack.py", part],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for part in ("constraints", "build-flags")
    }
    assert printed["constraints"] == [f"{name}=={PACKAGES[name]}" for name in PACKAGES]
    assert "export NVTE_FRAMEWORK=pytorch" in printed["build-flags"]
    copied = {
        Path(source).parts[0]
        for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)
        for source in line.split()
    }
    sent = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    assert sent[0] == "*"
    assert {*sent[1:]} == {f"!{name}" for name in copied}


def test_the_documents_install_servers_where_the_default_looks_for_them() -> None:
    default = SglangConfig().python
    page = (ROOT / "docs/cluster.md").read_text()
    (image,) = re.findall(r"-m venv (/opt/\w+) && \S+/pip install \"sglang", DOCKERFILE)
    blocks = re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    (venv,) = [line for line in commands if "install 'sglang" in line]
    assert re.search(r"-m venv (\S+)", venv)[1] + "/bin/python" == default  # pyright: ignore
    in_container = [line for line in commands if line.startswith("CONTAINER_IMAGE=")]
    assert in_container
    for line in in_container:
        assert f"rollout.sglang.python={image}/bin/python" in line
    makefile = (ROOT / "Makefile").read_text()
    assert f"sglang: {default.split('/')[0]}/.installed" in makefile
    named = set(re.findall(r"\.venv-s\w+", page + makefile + (ROOT / "README.md").read_text()))
    assert named == {default.split("/")[0]}


def test_make_does_not_put_another_torch_into_a_clusters_environment(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/lib/python3.12/site-packages/transformer_engine").mkdir(parents=True)
    make = ["make", "--directory", tmp_path, "--file", ROOT / "Makefile", "install", "PYTHON=none"]
    run = subprocess.run(make, capture_output=True, text=True)
    assert run.returncode == 2
    assert "refused: .venv is a cluster's" in run.stdout
    assert not (tmp_path / ".venv/bin").exists()


def test_one_release_of_sglang() -> None:
    assert PACKAGES["sglang"] == ".".join(map(str, RELEASE))
    lines = (ROOT / "requirements/sglang-cpu-nodeps.txt").read_text().splitlines()
    assert f"sglang=={PACKAGES['sglang']}" in lines


def test_the_page_for_clusters_names_the_stack() -> None:
    page = (ROOT / "docs/cluster.md").read_text()
    for name in ("torch", "nvidia-nccl-cu13", "transformer-engine", "megatron-core", "sglang"):
        assert f"| {name} | {PACKAGES[name]} |" in page
    assert f"python{STACK['python']} -m venv" in page
