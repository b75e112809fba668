"""Each part is read once; a part that cannot be read raises the same error again."""

import pytest

from stable_opd_mcore.checks import lazy_inputs as module
from stable_opd_mcore.checks.lazy_inputs import RunInputs
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.losses.objectives import build_objective
from stable_opd_mcore.run_inputs import load_tokenizer, teacher_stop_ids
from tests.checks.directories import write_model
from tests.train.runs import tiny_config


def test_parts_and_errors_are_kept(tmp_path, monkeypatch):
    read = []
    load = module.load_prompts
    monkeypatch.setattr(module, "load_prompts", lambda *args: read.append(1) or load(*args))
    inputs = RunInputs(tiny_config(tmp_path, "run"), None)
    assert inputs.prompts is inputs.prompts
    assert len(inputs.prompts) == 64
    assert inputs.teacher_stops == inputs.tokenizer.stop_token_ids
    assert inputs.held_out is None
    train = {"train": {"path": str(tmp_path / "absent.jsonl")}}
    broken = RunInputs(tiny_config(tmp_path, "run", data=train), None)
    for _ in range(2):
        with pytest.raises(DataError, match="no such file"):
            _ = broken.prompts
    assert len(read) == 2


def test_the_stop_class_is_that_of_the_objective_that_train_builds(tmp_path):
    teacher = write_model(tmp_path / "teacher", eos_token_id=259, vocab_size=272)
    config = tiny_config(
        tmp_path,
        "run",
        student={"path": write_model(tmp_path / "student"), "architecture": None},
        teacher={"path": teacher, "architecture": None},
        tokenizer={"path": None},
    )
    tokenizer = load_tokenizer(config)
    stops = teacher_stop_ids(config, tokenizer)
    built = build_objective(config, tokenizer.stop_token_ids, stops)
    inputs = RunInputs(config, None)
    assert inputs.teacher_stops == stops == (258, 259, 256)
    assert inputs.pair.merged_stops == built.stop_ids == built.terms.stop_ids == (256, 258, 259)


def test_only_a_teacher_in_the_trainer_has_an_architecture(tmp_path):
    teacher = RunInputs(tiny_config(tmp_path, "run"), None).teacher_architecture
    assert teacher is not None
    assert teacher.hidden_size == 48
    served = {"engine": "sglang", "urls": ["http://n1:1"], "architecture": None}
    assert (
        RunInputs(tiny_config(tmp_path, "run", teacher=served), None).teacher_architecture is None
    )
