"""Seconds by phase follow work, hardware and layout."""

from __future__ import annotations

import pytest

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.planning.hardware import Device
from stable_opd_mcore.planning.layout import Layout
from stable_opd_mcore.planning.memory import Work
from stable_opd_mcore.planning.plan import Cluster, make_plan, read_models
from stable_opd_mcore.planning.seconds import Servers, step_seconds
from tests.planning.cases import NODE, config_7b


def test_seconds_follow_work_and_hardware(tmp_path):
    plan = make_plan(config_7b(tmp_path), NODE)
    longer = make_plan(config_7b(tmp_path), NODE, work=Work(response_tokens=8192))
    more = make_plan(config_7b(tmp_path), Cluster(nodes=4, gpus_per_node=8))
    assert longer.seconds.update > 1.9 * plan.seconds.update
    assert more.seconds.score == pytest.approx(plan.seconds.score / 4, rel=0.1)
    assert plan.gpu_hours == pytest.approx(plan.seconds.total * 800 * 8 / 3600)
    pipelined = make_plan(config_7b(tmp_path, "parallel.pipeline=2"), NODE)
    assert pipelined.seconds.update > plan.seconds.update  # the bubble


def benchmarked_model(hidden: int, layers: int, heads: int) -> dict[str, object]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 2048,
        "max_position_embeddings": 1024,
        "rope_theta": 1e4,
    }


@pytest.mark.parametrize(
    ("response", "score", "update"), [(128, 0.69, 0.79), (151, 0.89, 1.03)], ids=["even", "tailed"]
)
def test_cpu_steps_reach_most_of_the_rate_of_their_products(response, score, update):
    """Against the steps of BENCHMARKS.md, with the matmul rate of its loss's four products."""
    products = 4 * 2 * 4096 * 512 * 32768 / 2.65e12  # TFLOP/s
    cpu = Device("cpu", 24, 0, products, 20.0, 1, 1, matmul_share=1.0)
    values = {
        "run": {"name": "x"},
        "student": {"architecture": benchmarked_model(256, 4, 4)},
        "teacher": {"architecture": benchmarked_model(384, 6, 6)},
        "tokenizer": {"path": "synthetic"},
        "data": {"train": {"path": "synthetic:arithmetic"}},
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 1},
        "objective": {"name": "gkd"},
        "train": {"micro_batch_tokens": 1152},
    }
    config = parse_config(values, origin="benchmark")
    work, servers = Work(16, response), Servers(1, 1, own_gpus=False)
    predicted = step_seconds(config, read_models(config), Layout(1), cpu, work, servers, 1)
    assert 0.6 < predicted.score / score < 0.8
    assert 0.6 < predicted.update / update < 0.8
