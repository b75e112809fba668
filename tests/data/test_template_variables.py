"""Arguments that a chat template reads, and the refusal of those that it ignores."""

import json

import pytest

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.template_variables import refuse_unread, template_variables
from stable_opd_mcore.errors import DataError
from tests.commands.check.directories import TEMPLATE, write_model
from tests.data.real_tokenizers import QWEN3, real_tokenizer


def test_a_template_that_reads_the_clock_is_warned_of(tmp_path, caplog):
    Tokenizer.load(write_model(tmp_path / "plain"))
    assert not caplog.messages
    dated = "{{ strftime_now('%Y') }}" + TEMPLATE
    Tokenizer.load(write_model(tmp_path / "dated", template=dated))
    assert "dated: its chat template reads the clock" in caplog.text


def test_variables_are_what_a_template_reads_and_nobody_else_gives():
    assert template_variables(
        "{{ bos_token }}{% set a = 1 %}{% for m in messages %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ a + b }}"
        "{% if enable_thinking is defined and add_generation_prompt %}{% endif %}"
    ) == {"b", "enable_thinking"}
    with pytest.raises(DataError, match="not valid Jinja"):
        template_variables("{% if %}")


def test_what_a_template_sets_in_a_loop_is_no_argument():
    assert template_variables(
        "{% for m in messages %}{% if m.content %}{% set content = m.content %}{% endif %}"
        "{{ content }}{% endfor %}{% if not dated %}{% set dated = 1 %}{% endif %}{{ dated }}"
        "{% if tools %}{{ tools }}{{ documents }}{% endif %}"
    ) == {"dated", "tools", "documents"}


def test_an_argument_that_is_never_read_is_refused_with_those_that_are():
    refuse_unread({}, None, "model")
    refuse_unread({"a": 1}, "{{ a }}", "model")
    with pytest.raises(DataError, match=r"model: .* never reads c of .* it reads a, b"):
        refuse_unread({"a": 1, "c": 2}, "{{ a }}{{ b }}", "model")
    with pytest.raises(DataError, match=r"a of .* is the text 'False', .* write it without quotes"):
        refuse_unread({"a": "False"}, "{{ a }}", "model")
    with pytest.raises(DataError, match="no chat template"):
        refuse_unread({"a": 1}, None, "model")


def test_thinking_is_switched_off_for_training_and_on_for_evaluation():
    student = real_tokenizer(QWEN3, enable_thinking=False)
    off = student.render_prompt("1+1?")
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert student.with_template_kwargs(None) is student
    on = student.with_template_kwargs({"enable_thinking": True}).render_prompt("1+1?")
    assert on.endswith("<|im_start|>assistant\n")
    assert student.render_prompt("1+1?") == off
    assert student.stop_token_ids == real_tokenizer(QWEN3).stop_token_ids
    with pytest.raises(DataError, match=r"never reads thinking .* reads enable_thinking, tools;"):
        student.with_template_kwargs({"thinking": False})


def test_tools_of_the_arguments_are_those_of_prompts_without_any():
    own, others = ({"type": "function", "function": {"name": name}} for name in ("add", "mul"))
    student = real_tokenizer(QWEN3).with_template_kwargs({"tools": [own]})
    assert f"\n{json.dumps(own)}\n" in student.render_prompt("1+1?")
    assert student.render_prompt("1+1?", tools=[others]).count("function") == (
        student.render_prompt("1+1?").count("function")
    )
    assert '"add"' not in student.render_prompt("1+1?", tools=[others])
    assert student.with_template_kwargs({}).render_prompt("1+1?") == (
        real_tokenizer(QWEN3).render_prompt("1+1?")
    )
    for wrong in ("add", {"name": "add"}, [own, "mul"], [{"function": {"name": 1}}]):
        with pytest.raises(DataError, match=r"tools of chat_template_kwargs is .* write \{type: f"):
            student.with_template_kwargs({"tools": wrong})
