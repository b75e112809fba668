"""Replay returns a stored step, and names what does not fit."""

from dataclasses import replace

import pytest

from stable_opd_mcore.data.rollout_files import write_rollouts
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.replay import ReplayEngine

PROMPTS = [Prompt(f"set:{i}", f"problem {i}", (i, 2)) for i in range(4)]


def stored_rollouts(step: int) -> list[Rollout]:
    return [
        Rollout(prompt, sample, (step, i, sample), (-0.5, -0.25, -1e-9), "stop", step - 1, "x")
        for i, prompt in enumerate(PROMPTS)
        for sample in range(2)
    ]


@pytest.fixture
def engine(tmp_path) -> ReplayEngine:
    for step in (1, 2, 3):
        write_rollouts(RunDirectory(tmp_path).rollouts(step), stored_rollouts(step))
    return ReplayEngine(tmp_path)


def test_some_of_the_prompts_get_their_own_rollouts(engine):
    mine = PROMPTS[1::2]
    with_golden = [replace(prompt, golden_token_ids=(7,)) for prompt in mine]
    rollouts = engine.generate(with_golden, Sampling(num_samples=2), step=2)
    stored = [r for r in stored_rollouts(3) if r.prompt in mine]
    assert [replace(r, prompt=replace(r.prompt, golden_token_ids=None)) for r in rollouts] == stored
    assert all(r.prompt.golden_token_ids == (7,) for r in rollouts)
    assert [r.weight_version for r in rollouts] == [2] * 4


def test_refusals_name_what_does_not_fit(engine, tmp_path):
    sampling = Sampling(num_samples=2)
    with pytest.raises(UserError, match=r"step_000004.jsonl: step 4 was not stored; .* has 3"):
        engine.generate(PROMPTS, sampling, step=3)
    with pytest.raises(UserError, match=r"no rollouts of prompt other:0; .* train.seed"):
        engine.generate([Prompt("other:0", "", (1,))], sampling, step=0)
    with pytest.raises(UserError, match="set:1 has 2 stored samples, sample 2 is missing"):
        engine.generate([PROMPTS[1]], Sampling(num_samples=3), step=0)
    with pytest.raises(UserError, match=r"set:1 was stored with other tokens .2, now 3"):
        engine.generate([Prompt("set:1", "problem 1", (1, 2, 3))], sampling, step=0)
    with pytest.raises(UserError, match=r"step 1 was not stored; .* rollout.save=all .*has 0"):
        ReplayEngine(tmp_path / "elsewhere")
    for step in (0, 2):  # with the stored run's data, tokens, samples and steps
        assert len(engine.generate(PROMPTS, sampling, step=step)) == 8
