"""The config of a cold start, derived from the run's config."""

from stable_opd_mcore.train.loop import cold_start_config
from tests.train.runs import tiny_config


def test_cold_start_of_an_sglang_run_uses_the_embedded_engine(tmp_path):
    config = tiny_config(
        tmp_path,
        "run",
        cold_start={"steps": 2, "lr": 1e-3, "prompts_per_step": 4},
        rollout={
            "engine": "sglang",
            "async_steps": 1,
            "max_staleness": 1,
            "importance_correction": "truncated",
        },
    )
    cold = cold_start_config(config)
    assert (cold.objective.name, cold.rollout.engine) == ("sft", "embedded")
    assert (cold.rollout.prompts_per_step, cold.train.steps) == (4, 2)
    assert cold.rollout.importance_correction == "none"
    assert cold.run.path == tmp_path / "run" / "cold_start"
