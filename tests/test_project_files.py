"""The files that tools outside Python read: the workflow and the citation."""

import os
import tomllib
from pathlib import Path

import yaml

from stable_opd_mcore.host.torch_release import OLDEST_TORCH

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_workflow_runs_the_gate():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "gate.yml").read_text())
    job = workflow["jobs"]["gate"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert os.access(ROOT / commands[-1], os.X_OK)
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as true


def test_the_citation_names_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert citation["references"][0]["url"] == "https://arxiv.org/abs/2604.08527"


def test_the_oldest_torch_that_runs_is_the_oldest_that_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={'.'.join(map(str, OLDEST_TORCH))}" in project["dependencies"]
