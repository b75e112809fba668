"""The gradient of a step on several sources, each with its objective and teacher, equals the
weighted sum of those of runs on one source.

Every layout trains alike on several sources: test_layouts.py. A resumed run asks for the rows at
its cursor (test_resume.py); any cursor gives the rows of an uninterrupted run
(tests/data/test_source_order.py).
"""

import json
from dataclasses import replace
from pathlib import Path

import torch

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.models import ModelConfig
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.losses.source_objectives import build_source_objectives
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import export_hf
from stable_opd_mcore.models.files.peft_loading import merge_adapter
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.run_models import load_model
from stable_opd_mcore.train.samples.collecting import collect_samples
from stable_opd_mcore.train.setup import build_run
from tests.models import tiny
from tests.train.gradients import gradient
from tests.train.runs import (
    OBJECTIVES,
    WEIGHTS,
    objective_of_each_source,
    tiny_architecture,
    tiny_config,
)


def test_the_gradient_is_the_weighted_sum_of_those_of_the_sources(tmp_path):
    sampling = {"max_new_tokens": 24, "temperature": 0.7}
    sections = objective_of_each_source()
    base, adapter = tiny_architecture(48, 2), tmp_path / "adapter"
    tiny.write_adapter(adapter, read_architecture(base))
    sections["teacher"]["models"] = {
        "other": {"architecture": tiny_architecture(24, 3)},
        "tuned": {"adapter": str(adapter)},
    }
    for source, teacher in (("taught", "other"), ("both", "tuned")):
        sections["data"]["train"][[*OBJECTIVES].index(source)]["teacher"] = teacher
    config = tiny_config(tmp_path, "mixed", sampling=sampling, **sections)
    run = build_run(RunInputs(config), start_world(config.parallel, 0))
    merged = load_model(config, run.world, ModelConfig(architecture=base), 24, trainable=False)
    merge_adapter(merged, adapter)
    export_hf(merged, tmp_path / "tuned")
    (tmp_path / "tuned" / "config.json").write_text(json.dumps(base))
    _, samples = collect_samples(run, TrainState(), PhaseTimer())
    kinds = {(sample.prompt_id.split(":")[0], sample.kind) for sample in samples}
    with_rollouts = {name for name in OBJECTIVES if OBJECTIVES[name] != "sft"}
    assert kinds == {(name, "rollout") for name in with_rollouts} | {
        (name, "golden") for name in OBJECTIVES
    }
    found = gradient(run, run, samples)
    expected = torch.zeros_like(found)
    for name, objective in OBJECTIVES.items():
        own = [sample for sample in samples if sample.prompt_id.split(":")[0] == name]
        one = single(run, name, objective)
        part = gradient(one, one, own)
        assert part.norm() > 0
        expected += WEIGHTS[name] / sum(WEIGHTS.values()) * part
    stop_world()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def single(run: Run, name: str, objective: str) -> Run:
    """The run on one source, with its objective as the run's, and its teacher as the only one."""
    values = run.config.model_dump(by_alias=True)
    (source,) = (each for each in values["data"]["train"] if each["name"] == name)
    models = values["teacher"].pop("models")
    if (named := source.pop("teacher")) is not None:
        merged = Path(run.config.run.directory) / named if models[named]["adapter"] else None
        fields = {"path": merged and str(merged), "architecture": models[named]["architecture"]}
        values["teacher"] |= fields
    for key in ("weight", "objective", "name", "environment", "reward"):
        del source[key]
    values["data"]["train"] = source
    values |= {"objective": {"name": objective}, "normaliser": "global"}
    if objective == "sft":
        for key in ("kl", "mixture", "sampling"):
            del values[key]
    config = parse_config(values, origin=name)
    stops = run.tokenizer.stop_token_ids
    one = build_source_objectives(config, stops, stops)
    teacher = build_run(RunInputs(config), run.world).teacher  # the same random weights
    return replace(run, config=config, objective=one, teacher=teacher)
