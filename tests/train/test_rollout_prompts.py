"""A teacher whose prompt a function makes of each rollout gives the gradient of a template that
writes the same; rollouts without a prompt have no teacher's term.

test_sources.py has such a function in every layout.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.losses.source_objectives import build_source_objectives
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.samples.collecting import collect_samples
from stable_opd_mcore.train.setup import build_run
from tests.train.gradients import gradient
from tests.train.runs import tiny_config

OWN = """
def reward(row, response):
    return len(response) % 2, "odd" if len(response) % 2 else "even"
def told(row, rollout, others):
    if rollout.feedback == "even":
        return None
    return f"{row['problem']}={row['answer']}"
def fails(row, rollout, others):
    return others[7]
"""


@pytest.fixture
def built(tmp_path):
    """Builds a run on one rank; `prompt` is `teacher.prompt`."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    world = start_world(tiny_config(tmp_path, "world").parallel, 0)

    def build(prompt, **sections):
        config = tiny_config(
            tmp_path,
            "told",
            teacher={"prompt": prompt},
            reward={"function": f"{own}:reward"},
            kl={"beta": 0.0},
            mixture={"lambda": 0.0},
            **sections,
        )
        return build_run(RunInputs(config), world)

    yield build, f"{own}:"
    stop_world()


@pytest.mark.parametrize("objective", ["opd", "grpo_opd"])
def test_the_gradient_is_that_of_a_template_on_the_rollouts_with_a_prompt(built, objective):
    build, own = built
    settings = {"objective": {"name": objective}}
    template = build("{{ problem }}={{ answer }}", **settings)
    function = build({"function": f"{own}told"}, **settings)
    (plain, of_plain), (told, of_told) = (
        collect_samples(run, TrainState(), PhaseTimer()) for run in (template, function)
    )
    assert [r.token_ids.tolist() for r in plain] == [r.token_ids.tolist() for r in told]
    taught_B = np.array([sample.is_taught for sample in of_told])
    assert [r.feedback == "odd" for r in told] == taught_B.tolist()
    assert 0 < taught_B.sum() < len(taught_B)
    for one, other in zip(of_plain, of_told, strict=True):
        prompts = one.teacher_prompt_token_ids, other.teacher_prompt_token_ids
        assert np.array_equal(*prompts) if other.is_taught else prompts[1] is None

    if objective == "opd":
        masked = [
            one if taught else replace(one, trained=np.zeros_like(one.trained))
            for one, taught in zip(of_plain, taught_B, strict=True)
        ]
        expected = gradient(template, template, masked)
    else:
        config = template.config.model_copy(
            update={"objective": template.config.objective.model_copy(update={"name": "grpo"})}
        )
        stops = template.tokenizer.stop_token_ids
        rewarded = replace(template, objective=build_source_objectives(config, stops, stops))
        expected = gradient(template, template, of_plain, taught_B)
        expected += gradient(rewarded, template, of_plain, ~taught_B)
    found = gradient(function, function, of_told)
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)
    values = function.rollout_prompts.take_metrics().values_by_key()
    assert values["teacher_prompt/given_share"] == taught_B.mean()

    failing = replace(function, rollout_prompts=build({"function": f"{own}fails"}).rollout_prompts)
    with pytest.raises(UserError, match=r"failed for 16 of 16 rollouts; the first .*own.py:fails"):
        collect_samples(failing, TrainState(), PhaseTimer())
