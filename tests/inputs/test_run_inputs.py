"""Each part is read once; what a config and its files say of student and teacher."""

import pytest

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.inputs import run_inputs as module
from stable_opd_mcore.inputs.loading import load_tokenizer, teacher_stop_ids
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.losses.source_objectives import build_source_objectives
from tests.commands.check.directories import write_model
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
    built = build_source_objectives(config, tokenizer.stop_token_ids, stops)
    inputs = RunInputs(config, None)
    assert inputs.teacher_stops == stops == (258, 259, 256)
    assert inputs.pair.merged_stops == built.stop_ids == (256, 258, 259)


def test_only_a_teacher_in_the_trainer_has_an_architecture(tmp_path):
    teacher = RunInputs(tiny_config(tmp_path, "run"), None).teacher_architecture
    assert teacher is not None
    assert teacher.hidden_size == 48
    served = {"engine": "sglang", "urls": ["http://n1:1"], "architecture": None}
    assert (
        RunInputs(tiny_config(tmp_path, "run", teacher=served), None).teacher_architecture is None
    )


def test_the_pair_of_a_config_has_its_stop_ids_and_prompts(tmp_path):
    student, teacher = write_model(tmp_path / "s"), write_model(tmp_path / "t")
    config = tiny_config(
        tmp_path,
        "run",
        student={"path": student, "architecture": None, "stop_token_ids": [256]},
        teacher={"path": teacher, "architecture": None},
        tokenizer={"path": None},
        data={"system_prompt": "Be brief."},
    )
    pair = RunInputs(config, None).pair
    assert pair.student.stop_sources == {"student.stop_token_ids": (256,)}
    assert pair.merged_stops == (256, 258)
    assert pair.teacher is not None
    assert pair.teacher.place == teacher
    assert pair.has_two_tokenizers
    assert pair.renamed == []
    assert pair.student.settings["max_position_embeddings"] == 512
    assert pair.student.prompt_text.startswith("<|im_start|>system\nBe brief.")


def test_a_teacher_without_a_tokenizer_is_taken_for_one_with_the_students(tmp_path):
    inline = RunInputs(tiny_config(tmp_path, "run"), None).pair
    assert inline.teacher_gap is None
    assert not inline.has_two_tokenizers
    assert inline.renamed == []
    assert [model.settings["hidden_size"] for model in inline.models] == [32, 48]
    served = {"engine": "sglang", "urls": ["http://n1:1"], "architecture": None}
    pair = RunInputs(tiny_config(tmp_path, "run", teacher=served), None).pair
    assert pair.teacher_gap == "teacher.path is null"
    without = tiny_config(tmp_path, "run", objective={"name": "grpo"}, kl={"beta": 0})
    assert RunInputs(without, None).pair.teacher is None
