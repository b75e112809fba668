"""What a config and its files say of student and teacher."""

from stable_opd_mcore.checks.lazy_inputs import RunInputs
from tests.checks.directories import write_model
from tests.train.runs import tiny_config


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
