"""Chat templates are compared by what they render."""

import json

import pytest

from stable_opd_mcore.commands.check.templates import (
    absent_header,
    different_endings,
    different_prompts,
    two_templates,
)
from stable_opd_mcore.inputs.pair import Pair, read_model
from tests.commands.check.directories import TEMPLATE, findings, the, write_model
from tests.data.real_tokenizers import MATH, QWEN3, QWEN25, R1, THINKING, real_tokenizer

OPENS = TEMPLATE.replace("assistant\\n{% endif", "assistant\\n<think>\\n{% endif").replace(
    "assistant\n{% endif", "assistant\n<think>\n{% endif"
)
CASES = {
    "another system prompt": (
        {"template": "Think.\n" + TEMPLATE},
        ("warning", "the templates render the same problem differently", "'<|im_", "'Think.\\n<"),
    ),
    "a thought is opened": (
        {"template": OPENS},
        ("warning", "one model's prompt opens a thought", "does not", "opens <think>"),
    ),
    "thoughts have a token of their own": (
        {"rename": {"<|box_start|>": "<think>"}},
        ("warning", "<think> is not the same tokens in both models", "27 '<', 83", "259 '<think>'"),
    ),
    "a template that fails": (
        {"template": "{{ messages[7].content.x.y }}"},
        ("error", "its chat template fails on"),
    ),
}


def test_a_student_without_a_template_is_prompted_with_plain_text(tmp_path):
    found = findings(tmp_path, {"template": None}, {"template": OPENS})
    finding = the(found, "the student has no chat template")
    assert finding.consequence == "prompts are the system prompt, a blank line and the problem"
    assert finding.values == (("student", "none"), ("prompt", "'1+1'"))
    assert the(found, "the templates render the same problem differently")
    assert not [finding for finding in found if "opens a thought" in finding.title]


@pytest.mark.parametrize("case", CASES)
def test_a_mutated_template_is_found(case, tmp_path):
    teacher, (severity, title, *values) = CASES[case]
    finding = the(findings(tmp_path, {}, teacher), title)
    assert finding.severity == severity
    for (_, value), begins in zip(finding.values, values, strict=True):
        assert value.startswith(begins)


def test_different_endings_are_found_with_a_prompt_of_the_teachers_own(tmp_path):
    """As without thinking: the student's prompt ends with an empty thought."""
    empty = TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n</think>\n{% endif")
    student, teacher = (
        read_model(role, write_model(tmp_path / role, template=template))
        for role, template in (("student", empty), ("teacher", TEMPLATE))
    )
    for has_own_prompt in (True, False):
        pair = Pair(student, teacher, (), has_own_prompt=has_own_prompt)
        assert len(list(different_endings(pair))) == has_own_prompt
        assert len(list(different_prompts(pair))) == (not has_own_prompt)


def alone(path):
    return Pair(read_model("student", path), None, ())


HEADERS = {
    "no header after the prompt": (TEMPLATE.partition("{% if add_gen")[0], 1),
    "another header": (TEMPLATE.replace("assistant\n{% endif", "model\n{% endif"), 1),
    "a header in any case": (TEMPLATE.replace("{% if add_generation_prompt %}", "{% if 1 %}"), 0),
    "a thought": (OPENS, 0),
    "a part of the header": (TEMPLATE.replace("assistant\n{% endif", "assistant{% endif"), 0),
    "no header at all": ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", 0),
    "Mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content.strip() }} [/INST]"
        "{% else %} {{ m.content.strip() }}<|endoftext|>{% endif %}{% endfor %}",
        0,
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_prompt_that_ends_without_the_header_of_a_response_is_found(case, tmp_path):
    template, number = HEADERS[case]
    found = list(absent_header(alone(write_model(tmp_path, template=template))))
    assert len(found) == number
    assert all("assistant" in finding.values[0][1] for finding in found)


@pytest.mark.parametrize("name", [MATH, QWEN25, QWEN3, THINKING, R1])
def test_published_templates_keep_all_texts_and_end_with_the_header(name):
    tokenizer = real_tokenizer(name)
    assert tokenizer.lost_header is None
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    assert "system" in tokenizer.render_turns(turns)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_two_templates_of_one_directory_are_compared_by_what_they_render(name, tmp_path):
    path, file = write_model(tmp_path), tmp_path / name
    settings = json.loads(file.read_text()) if file.exists() else {}
    tools = "{% if tools %}{{ tools }}{% endif %}" + TEMPLATE
    for template, number in ((tools, 0), ("Think." + TEMPLATE, 1)):
        file.write_text(json.dumps(settings | {"chat_template": template}))
        found = list(two_templates(alone(path)))
        assert len(found) == number
    assert found[0].values[0][0] == "chat_template.jinja, which is used"
    assert found[0].values[1][0] == name
    assert found[0].values[1][1].startswith("'Think.<|im_start|>user\\ntext of user<|im_end|>")
