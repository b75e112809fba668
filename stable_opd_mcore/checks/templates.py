"""Chat templates: an absent one, prompts that differ, thoughts that a template opens.

Templates are rendered, not read: what counts is the text that one makes.
"""

from collections.abc import Iterator

from stable_opd_mcore.checks.finding import Finding, finding
from stable_opd_mcore.checks.pair import EXAMPLE, ModelFiles, Pair
from stable_opd_mcore.checks.tokens import THOUGHT_MARKS
from stable_opd_mcore.data.chat import opens_thinking

_SHOWN_CHARACTERS = 160


def shown_prompt(model: ModelFiles, text: str) -> str:
    """A prompt, and the added tokens among its ids."""
    ids = model.tokenizer.encode(text)
    special = [token for token in dict.fromkeys(ids) if token in model.tokenizer.added_ids]
    return f"{text}\n({len(ids)} tokens; special: {model.named_all(tuple(special))})"


def absent_template(pair: Pair) -> Iterator[Finding]:
    """A student without a chat template."""
    if not pair.student.tokenizer.has_template:
        yield finding("without-template", prompt=_shown(pair.student.prompt_text))


def different_prompts(pair: Pair) -> Iterator[Finding]:
    """Templates that render the same problem differently."""
    student, teacher = pair.student, pair.teacher
    if teacher is None or not teacher.tokenizer.has_template or pair.has_own_prompt:
        return
    if student.prompt_text != teacher.prompt_text:
        shown = {model.role: _shown(model.prompt_text) for model in pair.models}
        yield finding("different-prompts", **shown)


def thought_tokens(pair: Pair) -> Iterator[Finding]:
    """`<think>` and `</think>`, where the two models encode them differently."""
    if pair.teacher is None or not pair.has_two_tokenizers:
        return
    for mark in THOUGHT_MARKS:
        if not any(mark in model.tokenizer.names_by_id.values() for model in pair.models):
            continue  # text in both, and their base vocabularies are the same
        ids = [tuple(model.tokenizer.encode(mark)) for model in pair.models]
        if ids[0] != ids[1]:
            both = zip(pair.models, ids, strict=True)
            named = {model.role: model.named_all(own) for model, own in both}
            yield finding("thought-tokens", mark=mark, **named)


def opened_thoughts(pair: Pair) -> Iterator[Finding]:
    """A generation prompt that opens <think> in one model only."""
    if pair.teacher is None or not all(model.tokenizer.has_template for model in pair.models):
        return
    opened = [opens_thinking(model.prompt_text) for model in pair.models]
    if opened[0] != opened[1]:
        words = ("opens <think>" if one else "does not" for one in opened)
        yield finding("opened-thoughts", **_of_both(words))


def different_endings(pair: Pair) -> Iterator[Finding]:
    """Different text between the user's message and the response, with teacher.prompt."""
    if not pair.has_own_prompt or any(opened_thoughts(pair)):
        return
    prompts = (m.tokenizer.render_prompt(EXAMPLE) for m in pair.models)
    endings = [prompt.rpartition(EXAMPLE)[2] for prompt in prompts]
    if endings[0] != endings[1]:
        yield finding("different-endings", **_of_both(map(_shown, endings)))


def _of_both(texts: Iterator[str]) -> dict[str, str]:
    return dict(zip(("student", "teacher"), texts, strict=True))


def _shown(text: str) -> str:
    """A text as one line, its middle left out where it is long."""
    line = repr(text)
    half = _SHOWN_CHARACTERS // 2
    return line if len(line) <= 2 * half else f"{line[:half]} ... {line[-half:]}"
