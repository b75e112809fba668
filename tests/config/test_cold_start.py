"""The configs of a cold start and of the run after it, derived from the run's config."""

import pytest

from stable_opd_mcore.config.cold_start import after_cold_start, cold_start_config
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.training import Fp8Config
from stable_opd_mcore.losses.objectives import build_objective
from tests.commands.plan.cases import CONFIGS
from tests.train.runs import tiny_config

COLD = {"steps": 2, "lr": 1e-3}


def test_cold_start_of_an_sglang_run_uses_the_embedded_engine(tmp_path):
    config = tiny_config(
        tmp_path,
        "run",
        cold_start={**COLD, "prompts_per_step": 4},
        rollout={
            "engine": "sglang",
            "max_staleness": 1,
            "importance_correction": "truncated",
        },
    )
    cold = cold_start_config(config)
    assert (cold.objective.name, cold.rollout.engine) == ("sft", "embedded")
    assert (cold.rollout.prompts_per_step, cold.train.steps) == (4, 2)
    assert cold.rollout.importance_correction == "none"
    assert cold.run.path == tmp_path / "run" / "cold_start"


@pytest.mark.parametrize("student", ["tensorwise", None])
def test_a_cold_start_keeps_the_fp8_of_the_student_only(tmp_path, student):
    """It has neither teacher nor reference, and an objective refuses settings without effect."""
    fp8 = {"teacher": "blockwise", "reference": "blockwise"}
    config = tiny_config(tmp_path, "run", cold_start=COLD, fp8={**fp8, "student": student})
    cold = cold_start_config(config)
    build_objective(cold, (1,), None)
    assert cold.fp8 == Fp8Config(student=student)
    assert after_cold_start(config).fp8 == config.fp8


def test_every_shipped_config_may_have_a_cold_start():
    for path in (*CONFIGS.glob("*.yaml"), *CONFIGS.glob("recipes/*.yaml")):
        config = load_config(path, ["cold_start.steps=2", "cold_start.lr=1e-5"])
        build_objective(config, (1,), (2,))
        build_objective(cold_start_config(config), (1,), None)


def test_the_run_after_a_cold_start_begins_with_its_model(tmp_path):
    config = tiny_config(tmp_path, "run", cold_start=COLD)
    after = after_cold_start(config)
    assert after.cold_start is None
    assert after.student.path == str(tmp_path / "run" / "cold_start" / "model")
    assert (after.student.architecture, after.tokenizer.path) == (None, "synthetic")
    assert after.kl == config.kl
