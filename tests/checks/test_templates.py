"""Chat templates are compared by what they render."""

import pytest

from stable_opd_mcore.checks.pair import Pair, read_model
from stable_opd_mcore.checks.templates import different_endings, different_prompts
from tests.checks.directories import TEMPLATE, findings, the, write_model

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
