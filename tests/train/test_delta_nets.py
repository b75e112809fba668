"""A student with gated delta nets gives the numbers of one rank on every layout, resumed from
another; in bf16 its decay rates are trained, saved and exported in fp32.

The embedded engine samples the rollouts on each layout, so decoding is compared, too.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.models.tensors import hf_shapes
from tests.models import tiny
from tests.parallel.launch import run_ranks
from tests.train.layouts import short_config, train_through
from tests.train.runs import metrics_of, tiny_architecture

pytestmark = pytest.mark.slow

# Layouts of four ranks, in the order in which the run goes through them; data parallelism takes
# the ranks that are left.
LAYOUTS = {
    "tp2_sp": {"tensor": 2, "sequence": True},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "dp4": {},
}
OF_EXPERTS = {
    "ep4_tp2": {"expert": 4, "tensor": 2, "sequence": True},
    "ep2_pp2": {"expert": 2, "pipeline": 2},
}
SIZES: dict[str, Any] = {"vocab_size": 27, "num_attention_heads": 2, "rms_norm_eps": 1e-5}
HYBRID = tiny.config("qwen3_5", **SIZES)
RUNS = {  # name -> layouts and student
    "dense": (LAYOUTS, HYBRID),
    "experts": (OF_EXPERTS, tiny.config("qwen3_next", **SIZES)),
}
KEYS = {"dense": ("loss/total", "loss/pg", "grad_norm")}
KEYS["experts"] = (*KEYS["dense"], "moe/load_max_over_mean", "moe/unused_experts")


def config_of(directory: Path, name: str, steps: int, **sections: Any) -> Config:
    models = {
        "student": {"architecture": HYBRID},
        "teacher": {"architecture": tiny_architecture(24, 4)},
    }
    return short_config(directory, name, steps, **models | sections)


def on_one_rank(rank: int, world_size: int, directory: str) -> None:
    for name, (layouts, student) in RUNS.items():
        models = {"student": {"architecture": student}}
        config = config_of(Path(directory), f"{name}_one_rank", len(layouts), **models)
        train(config, show_progress=False)


def on_every_layout(rank: int, world_size: int, directory: str) -> None:
    path = Path(directory)
    for name, (layouts, student) in RUNS.items():
        models = {"student": {"architecture": student}}
        train_through(layouts, config_of, path, name, **models)


def in_bf16(rank: int, world_size: int, directory: str) -> None:
    path = Path(directory)
    bf16: dict[str, Any] = {"parallel": {"tensor": 2}, "train": {"precision": "bf16"}}
    train(config_of(path, "bf16", 2, **bf16), show_progress=False)
    for steps in (1, 2):
        train(config_of(path, "bf16_resumed", steps, **bf16), show_progress=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, on_one_rank, str(directory))
    run_ranks(4, on_every_layout, str(directory))
    run_ranks(2, in_bf16, str(directory))
    return directory


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_gradients_are_those_of_one_rank(runs, name):
    found, expected = metrics_of(runs / name), metrics_of(runs / f"{name}_one_rank")
    assert len(found) == len(expected) == len(RUNS[name][0])
    for key in KEYS[name]:
        wanted = [row[key] for row in expected]
        assert [row[key] for row in found] == pytest.approx(wanted, rel=1e-3, abs=1e-6), key


def test_decay_rates_of_a_model_in_bf16_are_trained_and_exported_in_fp32(runs):
    assert metrics_of(runs / "bf16_resumed") == metrics_of(runs / "bf16")
    whole, resumed = (
        load_file(runs / name / "model" / "model.safetensors") for name in ("bf16", "bf16_resumed")
    )
    assert whole.keys() == resumed.keys() == hf_shapes(tiny.architecture("qwen3_5")).keys()
    for name, tensor in whole.items():
        in_fp32 = name.endswith((".A_log", ".linear_attn.norm.weight"))
        assert tensor.dtype == (torch.float32 if in_fp32 else torch.bfloat16), name
        assert torch.equal(tensor, resumed[name]), name
        if name.endswith(".A_log"):
            assert not torch.equal(tensor, tensor.bfloat16().float())
