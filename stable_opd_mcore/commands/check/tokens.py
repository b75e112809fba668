"""Ids that mean different tokens, and the first token of a prompt.

A student and a teacher whose vocabularies differ only in padded rows give no finding.
"""

from collections.abc import Iterator

from stable_opd_mcore.commands.check.finding import Finding, finding
from stable_opd_mcore.data.vocabulary import RenamedToken
from stable_opd_mcore.inputs.pair import ModelFiles, Pair

THOUGHT_MARKS = ("<think>", "</think>")


def clashing_ids(pair: Pair) -> Iterator[Finding]:
    """Ids that both models have, under different names."""
    for token in pair.renamed:
        if token.first is not None and token.second is not None:
            name, names = _kind_of_clash(pair, token), (token.first, token.second)
            yield finding(name, id=token.token_id, student=names[0], teacher=names[1])


def _kind_of_clash(pair: Pair, token: RenamedToken) -> str:
    assert pair.teacher is not None
    if token.token_id in pair.student.prompt_ids:
        return "clash-in-prompts"
    if token.token_id in pair.student.stop_ids:
        return "clash-of-student-stop"
    if token.token_id in pair.teacher.stop_ids:
        return "clash-of-teacher-stop"
    of_thought = token.first in THOUGHT_MARKS or token.second in THOUGHT_MARKS
    return "clash-of-thought-mark" if of_thought else "clash-elsewhere"


def first_token(pair: Pair) -> Iterator[Finding]:
    """Prompts that begin with a beginning-of-sequence token (BOS) in one model only."""
    if pair.teacher is None or not pair.has_two_tokenizers:
        return
    bos = [_bos_of_prompt(model) for model in pair.models]
    if bos[0] != bos[1]:
        named = {model.role: model.named(own) for model, own in zip(pair.models, bos, strict=True)}
        yield finding("different-bos", **named)


def missing_bos(pair: Pair) -> Iterator[Finding]:
    """A tokenizer that puts BOS before every text, and a prompt that begins without."""
    student = pair.student
    bos, first = student.tokenizer.adds_bos, _first(student)
    if bos is not None and first != bos:
        yield finding("missing-bos", bos=student.named(bos), first=student.named(first))


def _bos_of_prompt(model: ModelFiles) -> int | None:
    bos = model.tokenizer.bos_token_id
    return bos if bos is not None and _first(model) == bos else None


def _first(model: ModelFiles) -> int | None:
    return model.prompt_ids[0] if model.prompt_ids else None
