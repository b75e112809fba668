"""Seconds by phase follow work, hardware and layout."""

import pytest

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.planning.hardware import Cluster, Device
from stable_opd_mcore.planning.job import Job, Work, make_job, read_models
from stable_opd_mcore.planning.plan import Plan, make_plan
from stable_opd_mcore.planning.seconds import step_seconds
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


def test_sft_ignores_a_teacher_that_other_objectives_share(tmp_path):
    sft = ("objective.name=sft", "kl.beta=0", "mixture.lambda=0", "rollout.samples_per_prompt=1")
    plan = make_plan(config_7b(tmp_path, *sft), NODE)
    assert plan.seconds.score == 0
    assert "teacher" not in plan.table()


@pytest.mark.parametrize(
    ("settings", "score", "update"),
    [
        # Two scored micro-batches of 12 sequences and one of 6: three stages wait for 12.
        (("mixture.lambda=0.5",), 1 + 3 * 12 / 24, 1 + 3 * 12 / 30),
        # Four scored ones of 6 and four of 1 or 2; a stage computes half of its layers at a time.
        (
            ("mixture.lambda=0.5", "parallel.virtual_pipeline=2"),
            1 + 3 * 6 / 2 / 24,
            1 + 3 * 6 / 2 / 30,
        ),
        (("mixture.lambda=0",), 1 + 3 * 12 / 24, 1 + 3 * 12 / 24),
    ],
)
def test_stages_wait_for_the_largest_micro_batch_of_a_pass(tmp_path, settings, score, update):
    def passes(*overrides: str) -> tuple[float, float]:
        """Seconds of the scores, and of one forward pass of the update."""
        drawn = ("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4")
        lengths = ("sampling.max_new_tokens=768", "train.micro_batch_tokens=12288")
        uncut = ("parallel.tensor=1", "parallel.sequence=false")  # no messages
        none, full = (
            step_seconds(
                make_job(
                    config_7b(tmp_path, *drawn, *lengths, *uncut, how, *overrides),
                    Cluster(1, 4),
                    work=Work(prompt_tokens=256, response_tokens=768),
                )
            )
            for how in ("train.recompute=none", "train.recompute=full")
        )
        return none.score, full.update - none.update

    of_score, of_update = passes(settings[0])
    piped_score, piped_update = passes("parallel.pipeline=4", *settings)
    assert piped_score / of_score == pytest.approx(score)
    assert piped_update / of_update == pytest.approx(update)


def test_recompute_adds_a_forward_pass_or_that_of_the_mlps(tmp_path):
    def update(*overrides: str) -> float:
        uncut = ("parallel.tensor=1", "parallel.sequence=false")  # no messages
        return make_plan(config_7b(tmp_path, *uncut, *overrides), NODE).seconds.update

    for length in (4096, 32768):
        none, selective, full = (
            update(f"train.recompute={how}", f"sampling.max_new_tokens={length}")
            for how in ("none", "selective", "full")
        )
        mlp, projections = 3 * 3584 * 18944, 2 * (3584 + 512) * 3584
        scores = 2 * 3584 * (256 + length / 2) / 2
        expected = mlp / (mlp + projections + scores)
        assert (selective - none) / (full - none) == pytest.approx(expected)


def test_offloaded_parts_are_copied_once_each_way_a_step(tmp_path):
    def plan(*overrides: str) -> Plan:
        return make_plan(config_7b(tmp_path, *overrides), NODE)

    none = plan("memory.offload=[]")
    assert none.seconds.offload == 0
    held = {item.name: item.bytes for item in none.memory.components}
    rate = 64e9 * 0.8
    once = (held["teacher weights"] + held["reference weights"]) / rate
    expected = {
        "optimizer": 2 * held["Adam's state"] / rate,
        "student": 2 * held["student weights"] / rate,
        "frozen": once,
        "gradients": held["gradients, fp32"] / (4800e9 * 0.8),
    }
    for part, seconds in expected.items():
        assert plan(f"memory.offload=[{part}]").seconds.offload == pytest.approx(seconds)
    assert plan().seconds.offload == pytest.approx(sum(expected.values()))
    followed = plan("memory.offload=[frozen]", "reference.update=every", "reference.every=4")
    assert followed.seconds.offload == pytest.approx(2.5 * once)


def test_external_servers_of_unknown_size_are_taken_for_single_gpus(tmp_path):
    urls = ("rollout.sglang.urls=[http://a:1,http://b:1]", "rollout.sglang.placement=external")
    two = make_plan(config_7b(tmp_path, *urls), NODE).seconds.rollout
    of_two_gpus = (*urls, "rollout.sglang.tensor=2")
    assert make_plan(config_7b(tmp_path, *of_two_gpus), NODE).seconds.rollout < two


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
    cpu = Device("cpu", 24, 0, products, 20.0, 1, 1, 1, matmul_share=1.0)
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
    job = Job(config, read_models(config), Cluster(1, 1), cpu, Work(16, response))
    predicted = step_seconds(job)
    assert 0.6 < predicted.score / score < 0.8
    assert 0.6 < predicted.update / update < 0.8
