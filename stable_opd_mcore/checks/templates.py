"""Chat templates: absent ones, prompts that differ, thoughts that a template deletes or opens.

Rendered, not read: what counts is the text that a template makes.
"""

from __future__ import annotations

from stable_opd_mcore.checks.finding import Finding
from stable_opd_mcore.checks.pair import EXAMPLE, ModelFiles, Pair
from stable_opd_mcore.checks.tokens import THOUGHT_MARKS
from stable_opd_mcore.data.chat import opens_thinking

SUBJECT = "chat template"
_THOUGHT, _ANSWER = "One and one are two.", "The answer is 2."
_SHOWN_CHARACTERS = 160


def example_turns(model: ModelFiles) -> str:
    """A question and an answer with a thought, by the model's template.

    Raises:
        DataError: the template fails.
    """
    golden = f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"
    turns = [("user", EXAMPLE), ("assistant", golden)]
    return model.tokenizer.render([{"role": role, "content": text} for role, text in turns])


def absent_templates(pair: Pair) -> list[Finding]:
    """Models without a chat template."""
    return [
        Finding(
            "note",
            SUBJECT,
            f"the {model.role} has no chat template",
            ((model.role, "none"), ("prompt", _shown(model.prompt_text))),
            "prompts are the system prompt, a blank line and the problem"
            if model.role == "student"
            else "the student's template renders the prompts that the teacher scores",
            "data.prompt_template and data.system_prompt, or a tokenizer.path with a template",
        )
        for model in pair.models_with_own_tokenizer
        if not model.tokenizer.has_template
    ]


def different_prompts(pair: Pair) -> list[Finding]:
    """Templates that render the same problem differently."""
    teacher = pair.teacher
    if teacher is None or not teacher.tokenizer.has_template:
        return []
    if pair.student.prompt_text == teacher.prompt_text:
        return []
    return [
        Finding(
            "warning",
            SUBJECT,
            "the templates render the same problem differently",
            (
                ("student", _shown(pair.student.prompt_text)),
                ("teacher", _shown(teacher.prompt_text)),
            ),
            "prompts are rendered by the student's template; the teacher scores responses to a "
            "prompt whose form it was not trained on",
            "data.system_prompt, data.prompt_template, or tokenizer.path",
        )
    ]


def deleted_thoughts(pair: Pair) -> list[Finding]:
    """Templates that delete what stands before </think> in an assistant's turn."""
    return [
        Finding(
            "note",
            SUBJECT,
            f"the {model.role}'s template deletes thoughts before </think>",
            (("answer", f"thought {_THOUGHT!r}, then {_ANSWER!r}"), ("rendered", _shown(text))),
            "golden solutions here follow the prompt directly and keep their thoughts; data made "
            "with this template elsewhere has none",
            "none is needed here; do not render golden solutions as assistant turns elsewhere",
        )
        for model in pair.models_with_own_tokenizer
        if model.tokenizer.has_template and _THOUGHT not in (text := example_turns(model))
    ]


def thought_tokens(pair: Pair) -> list[Finding]:
    """Marks of thoughts that the two models encode differently."""
    if pair.teacher is None or not pair.has_two_tokenizers:
        return []
    found = []
    for mark in THOUGHT_MARKS:
        if not any(mark in model.tokenizer.names_by_id.values() for model in pair.models):
            continue  # text in both, and their base vocabularies are the same
        ids = [tuple(model.tokenizer.encode(mark)) for model in pair.models]
        if ids[0] != ids[1]:
            values = [
                (model.role, model.named_all(own))
                for model, own in zip(pair.models, ids, strict=True)
            ]
            finding = Finding(
                "warning",
                SUBJECT,
                f"{mark} is not the same tokens in both models",
                tuple(values),
                "the student writes it with its own tokens, which the teacher does not take for "
                "the mark of a thought",
                "take a teacher that marks thoughts as the student does",
            )
            found.append(finding)
    return found


def opened_thoughts(pair: Pair) -> list[Finding]:
    """A generation prompt that opens <think> in one model only."""
    teacher = pair.teacher
    if teacher is None or not (
        pair.student.tokenizer.has_template and teacher.tokenizer.has_template
    ):
        return []
    opened = [opens_thinking(model.prompt_text) for model in pair.models]
    if opened[0] == opened[1]:
        return []
    words = ["opens <think>" if one else "does not" for one in opened]
    return [
        Finding(
            "warning",
            SUBJECT,
            "one model's prompt opens a thought, the other's does not",
            (("student", words[0]), ("teacher", words[1])),
            "the teacher expects a thought where the student begins an answer, or the reverse",
            "tokenizer.path, or a teacher whose template does as the student's",
        )
    ]


def _shown(text: str) -> str:
    """A text as one line, its middle left out where it is long."""
    line = repr(text)
    half = _SHOWN_CHARACTERS // 2
    return line if len(line) <= 2 * half else f"{line[:half]} ... {line[-half:]}"
