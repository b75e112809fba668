"""Ids that mean different tokens, tokens of one model only, the first token of a prompt.

A student and a teacher whose vocabularies differ in padded rows alone give no finding.
"""

from __future__ import annotations

from stable_opd_mcore.checks.finding import Finding, Severity
from stable_opd_mcore.checks.pair import ModelFiles, Pair
from stable_opd_mcore.data.vocabulary import RenamedToken

SUBJECT = "tokens"
THOUGHT_MARKS = ("<think>", "</think>")


def clashing_ids(pair: Pair) -> list[Finding]:
    """Ids that both models have, under different names.

    Raises:
        UserError: the base vocabularies differ; `train` refuses them too.
    """
    both = [t for t in pair.renamed if t.first is not None and t.second is not None]
    return [_clash(pair, token) for token in both]


def _clash(pair: Pair, token: RenamedToken) -> Finding:
    assert pair.teacher is not None
    severity: Severity = "warning"
    remedy = (
        "take a teacher with the student's special tokens, or set tokenizer.path to the teacher's "
        "directory, whose template then renders the prompts"
    )
    if token.token_id in pair.student.prompt_ids:
        consequence = f"every prompt holds it, and the teacher reads {token.second!r} there"
    elif token.token_id in pair.student.stop_ids:
        consequence = (
            f"a response of the student ends with it, and the teacher reads {token.second!r} there"
        )
        remedy = "objective.stop_class=true, or student.stop_token_ids"
    elif token.token_id in pair.teacher.stop_ids:
        consequence = (
            f"the teacher ends responses with it, which the student reads as {token.first!r}"
        )
        remedy = "objective.stop_class=true, or teacher.stop_token_ids"
    elif token.first in THOUGHT_MARKS or token.second in THOUGHT_MARKS:
        consequence = "thoughts open or close with it in one model and not in the other"
        remedy = "take a teacher that marks thoughts as the student does"
    else:
        severity = "note"
        consequence = "responses that hold it are scored as if it were the other token"
    return Finding(
        severity,
        SUBJECT,
        f"id {token.token_id} means different tokens",
        (("student", repr(token.first)), ("teacher", repr(token.second))),
        consequence,
        remedy,
    )


def tokens_of_one_model(pair: Pair) -> list[Finding]:
    """Added tokens whose ids exist in one tokenizer only."""
    if pair.teacher is None:
        return []
    found = []
    for model, names in (
        (pair.student, {t.token_id: t.first for t in pair.renamed if t.second is None}),
        (pair.teacher, {t.token_id: t.second for t in pair.renamed if t.first is None}),
    ):
        if not names:
            continue
        of_student = model is pair.student
        listed = ", ".join(f"{token_id} {name!r}" for token_id, name in list(names.items())[:8])
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        here, absent = (model.role, listed + more), ("absent", f"{len(names)} of them")
        finding = Finding(
            "note",
            SUBJECT,
            f"the {model.role} has {len(names)} tokens that the other model does not have",
            (here, ("teacher", absent[1])) if of_student else (("student", absent[1]), here),
            "the teacher's probability of these ids is that of untrained rows"
            if of_student
            else "these ids are outside the common vocabulary; the teacher's probability of them "
            "is left out",
            "take a teacher with the student's added tokens where responses hold them",
        )
        found.append(finding)
    return found


def first_token(pair: Pair) -> list[Finding]:
    """Prompts that begin with a beginning-of-sequence token (BOS) in one model only."""
    if pair.teacher is None or not pair.has_two_tokenizers:
        return []
    bos = [_bos_of_prompt(model) for model in pair.models]
    if bos[0] == bos[1]:
        return []
    return [
        Finding(
            "warning",
            SUBJECT,
            "prompts begin with different tokens (BOS)",
            tuple(
                (model.role, model.named(own)) for model, own in zip(pair.models, bos, strict=True)
            ),
            "prompts are rendered by the student's template, so the teacher scores them with a "
            "beginning that it was not trained on",
            "tokenizer.path, whose template renders the prompts",
        )
    ]


def contradicting_bos(pair: Pair) -> list[Finding]:
    """A config.json that names another BOS than the tokenizer."""
    found = []
    for model in pair.models_with_own_tokenizer:
        own, stated = model.tokenizer.bos_token_id, model.settings.get("bos_token_id")
        if own is not None and type(stated) is int and stated != own:
            finding = Finding(
                "note",
                SUBJECT,
                f"the {model.role}'s files name two tokens for BOS",
                (("config.json", model.named(stated)), ("tokenizer", model.named(own))),
                "prompts take the BOS of the chat template and none else; an engine that adds "
                "config.json's would score other prompts",
                "mend bos_token_id in config.json",
            )
            found.append(finding)
    return found


def missing_bos(pair: Pair) -> list[Finding]:
    """A tokenizer that puts BOS before every text, and a prompt that begins without."""
    student = pair.student
    bos, first = student.tokenizer.adds_bos, _first(student)
    if bos is None or first == bos:
        return []
    return [
        Finding(
            "warning",
            SUBJECT,
            "the student's prompts lack the BOS that its tokenizer adds to every text",
            (
                ("tokenizer adds", student.named(bos)),
                ("prompt begins", student.named(_first(student))),
            ),
            "the student is prompted without the token that began its training texts",
            "a chat template that begins with bos_token, or data.prompt_template",
        )
    ]


def _bos_of_prompt(model: ModelFiles) -> int | None:
    bos = model.tokenizer.bos_token_id
    return bos if bos is not None and _first(model) == bos else None


def _first(model: ModelFiles) -> int | None:
    return model.prompt_ids[0] if model.prompt_ids else None
