"""The configs of a cold start and of the run after it, derived from the run's config."""

from stable_opd_mcore.config.cold_start import after_cold_start, cold_start_config
from tests.train.runs import tiny_config


def test_cold_start_of_an_sglang_run_uses_the_embedded_engine(tmp_path):
    config = tiny_config(
        tmp_path,
        "run",
        cold_start={"steps": 2, "lr": 1e-3, "prompts_per_step": 4},
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


def test_the_run_after_a_cold_start_begins_with_its_model(tmp_path):
    config = tiny_config(tmp_path, "run", cold_start={"steps": 2, "lr": 1e-3})
    after = after_cold_start(config)
    assert after.cold_start is None
    assert after.student.path == str(tmp_path / "run" / "cold_start" / "model")
    assert (after.student.architecture, after.tokenizer.path) == (None, "synthetic")
    assert after.kl == config.kl
