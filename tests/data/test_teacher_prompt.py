"""The teacher's own prompt: rendered over a row's columns, encoded next to the student's prompt."""

import json

import pytest

from stable_opd_mcore.config.data import DataConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.data.teacher_prompt import TeacherPrompt
from stable_opd_mcore.errors import ConfigError, DataError

TOKENIZER = Tokenizer.load("synthetic")
ROWS = [{"problem": "1+1", "answer": "2", "hint": "=2"}, {"problem": "2*3", "answer": "6"}]


def prompts_of(path, rows, template="{{ problem }};{{ hint }}", window=None, **data):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate({"train": {"path": str(path)}, **data})
    teacher = TeacherPrompt(template, TOKENIZER, config.system_prompt, window)
    rows = load_rows(config.train, required=teacher.columns)
    return PromptSet(rows, TOKENIZER, config, window=64, max_new_tokens=8, teacher=teacher)


def test_the_teacher_reads_the_columns_and_the_student_its_own_prompt(tmp_path):
    prompts = prompts_of(tmp_path / "rows.jsonl", ROWS[:1])
    assert TOKENIZER.decode(prompts[0].token_ids) == "1+1#"
    assert prompts.teacher
    assert prompts.teacher.decode(prompts[0].teacher_token_ids) == "1+1;=2#"
    assert prompts.teacher_prompt_lengths() == [7]


UNRENDERED = [
    ("{{ hint }}", {}, r"rows\.jsonl:2: no column 'hint'.*problem, answer.*; name one of"),
    ("{{ hint }}", {"hint": None}, r"rows\.jsonl:2: .*null"),
    ("{{ hint.real }}", {"hint": "4"}, r"rows\.jsonl:1: .*no attribute 'real'"),
    ("{{ hint.__class__.mro() }}", {"hint": "4"}, "unsafe"),
    ("{{ hint }}", {"hint": "$"}, r"rows\.jsonl:2: .*control token"),
    ("{{ hint }}", {"hint": "\ud800"}, r"rows\.jsonl:2: .*half a character"),
]  # template, second, words


def test_a_row_that_cannot_be_rendered_is_named(tmp_path):
    for template, second, words in UNRENDERED:
        rows = [ROWS[0], {**ROWS[1], **second}]
        with pytest.raises(DataError, match=words):
            prompts_of(tmp_path / "rows.jsonl", rows, template)
        assert len(prompts_of(tmp_path / "rows.jsonl", rows, "{{ problem }}")) == 2


def test_prompt_and_budget_must_fit_the_teachers_window(tmp_path):
    rows = [ROWS[0], {**ROWS[1], "hint": "=6" * 9}]
    words = r"rows\.jsonl:2: its teacher's prompt has 23 tokens.*=8 .*teacher's window of 30"
    with pytest.raises(DataError, match=words):
        prompts_of(tmp_path / "rows.jsonl", rows, window=30)
    assert len(prompts_of(tmp_path / "rows.jsonl", rows, window=31)) == 2
    dropped = prompts_of(tmp_path / "rows.jsonl", rows, window=30, overlong="drop")
    assert (len(dropped), dropped.num_dropped) == (1, 1)


@pytest.mark.parametrize("template", ["{{ problem", "no column", "{% include 'x' %}{{ a | b }}"])
def test_a_template_without_columns_or_sense_is_refused(template):
    with pytest.raises(
        ConfigError, match=r"teacher\.prompt.*(correct it|for example {{ problem }})"
    ):
        TeacherPrompt(template, TOKENIZER, None, None)
    TeacherPrompt("{{ problem }}", TOKENIZER, None, None)
