"""nvidia-smi is a stand-in; torch is the one that is installed."""

import os

import pytest
import torch

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.cuda_driver import (
    Driver,
    find_driver,
    refuse_unused_gpus,
    unusable_gpus,
)
from tests.host.nvidia_smi import write_nvidia_smi

OLD, NEW = Driver("570.86.15", "12.8", 8), Driver("610.43.02", "13.3", 1)


@pytest.mark.parametrize("driver", [OLD, NEW, Driver("450.51", "", 2)])
def test_a_driver_is_read_from_old_and_new_banners(driver, tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, driver)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_driver() == driver


def test_a_machine_without_gpus_has_no_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_driver() is None
    write_nvidia_smi(tmp_path, Driver("580.95.05", "13.0", 0))  # "No devices were found"
    assert find_driver() is None


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "reason", "words"),
    [
        (
            OLD,
            "13.0",
            "",
            ["8 GPUs and driver 570.86.15 for CUDA 12.8", "torch 2.14.1 needs CUDA 13.0",
             "release 580 or later", "cuda-compat-13-0"],
        ),
        (NEW, "", "", ["1 GPU and driver", "built without CUDA: install", "docs/cluster.md"]),
        (NEW, "13.0", "Error 802: system not yet initialized", ["start nvidia-fabricmanager"]),
        (NEW, "13.0", "out of memory", ["can use none: out of memory; `dmesg"]),
    ],
)  # fmt: skip
def test_both_releases_and_the_remedy_are_named(driver, torch_cuda, reason, words, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = unusable_gpus(driver, "2.14.1", torch_cuda, reason)
    assert "\n" not in line
    assert all(word in line for word in words), line
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    names_variable = "=NoDevFiles may hide" in unusable_gpus(driver, "2.14.1", torch_cuda, reason)
    assert names_variable == ("dmesg" in line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPUs")
def test_cpus_are_not_taken_for_gpus_that_nvidia_smi_lists(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    refuse_unused_gpus()
    write_nvidia_smi(tmp_path, OLD)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError, match=r"570.86.15.* train on the CPUs, set CUDA_VISIBLE_DEVICES"):
        refuse_unused_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refuse_unused_gpus()
