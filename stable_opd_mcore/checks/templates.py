"""Chat templates: an absent one, two in one directory, prompts that differ or end without a header,
thoughts that a template opens.

Templates are rendered, not read: what counts is the text that one makes.
"""

from collections.abc import Iterator
from pathlib import Path

from stable_opd_mcore.checks.finding import Finding, finding
from stable_opd_mcore.checks.pair import EXAMPLE, ModelFiles, Pair
from stable_opd_mcore.checks.tokens import THOUGHT_MARKS
from stable_opd_mcore.data.thoughts import opens_thinking
from stable_opd_mcore.data.tokenizer_backend import stored_templates
from stable_opd_mcore.errors import DataError

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


def absent_header(pair: Pair) -> Iterator[Finding]:
    """Prompts that do not end with the text that opens an assistant's turn."""
    for model in pair.models if pair.has_own_prompt else (pair.student,):
        if model.tokenizer.lost_header is not None:
            header, ending = map(_shown, model.tokenizer.lost_header)
            yield finding("absent-header", role=model.role, header=header, ending=ending)


def two_templates(pair: Pair) -> Iterator[Finding]:
    """Files of one directory whose chat templates render the same messages differently."""
    for model in pair.models_with_own_tokenizer:
        templates = stored_templates(Path(model.tokenizer.path))
        rendered = {name: _rendered(model, text) for name, text in templates.items()}
        used = next(iter(rendered), None)  # the first is the one that is used
        for name in rendered:
            both = zip(rendered[name], rendered[used or name], strict=True)
            different = next(((a, b) for a, b in both if a != b), None)
            if different is not None:
                other, own = map(_shown, different)
                fields = {"used": used, "own": own, "name": name, "other": other}
                yield finding("two-templates", place=model.tokenizer.path, **fields)


def _rendered(model: ModelFiles, template: str) -> tuple[str, ...]:
    """An example after this template: as a prompt, with a system message, with a response."""
    system, user, assistant = (
        {"role": role, "content": f"text of {role}"} for role in ("system", "user", "assistant")
    )
    texts: list[str] = []
    for turns in ([user], [system, user], [user, assistant]):
        try:
            texts.append(model.tokenizer.render(turns, turns[-1] is user, template))
        except DataError:  # most often it has no system message
            texts.append("the template fails")
    return tuple(texts)


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
