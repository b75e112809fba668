r"""Words, signs and capitals that change an answer's value, and that math-verify leaves out.

It takes 5 from "5 or more", from "\geq 5" and from "5_{2}", and m for M. Standard library only, for
grading processes.
"""

import re

from stable_opd_mcore.evaluation.answers import TWO_UNITS, without_text

_THAN = r"\b(?:more|less|fewer|greater|larger|smaller|higher|lower) than\b"
_LIMIT = r"\bat (?:least|most)\b|\bup to\b"
_OR_MORE = (
    r"\b(?:or|and) (?:more|less|fewer|greater|larger|smaller|higher|lower|above|below|over|under"
    r"|up|down|older|younger|longer|shorter|later|earlier)\b"
)
_BOUND = re.compile(
    rf"\A(?:{_THAN}|{_LIMIT})|(?<=[\d}}])(?: [a-z]+){{0,2}} ?(?:{_LIMIT}|{_OR_MORE})"
)
_RELATION = re.compile(r"\\(?:[gl]eq?(?:slant)?|neq?|[gl]t)(?![A-Za-z])|[<>]")
_BASE = re.compile(r"(?<![A-Za-z\d\\{}])[\dA-F]*\d_\{?(\d{1,2})(?!\d)")
_SHORT = 200  # longest answer and gold to look at
_STATEMENT = re.compile(r"\banswer(?: is|:)\**:?([^\n]{1,80})", re.IGNORECASE)
_TWO_BOXES = re.compile(
    r"\\boxed\{([^{}]*)\}(?:\$|\\[)\]])?,? or (?:\$|\\[(\[])?(?:\w = ?|\w=)?\\boxed\{([^{}]*)\}"
    r"(?!.*\\boxed)",
    re.DOTALL,
)
_END_OF_SENTENCE = re.compile(r"[.!?;](?=\s|\Z)")
_NUMBER, _WORDS = r"-?\d[\d.,]*(?<=\d)", r"(?: [a-z]+){0,2}"
_OTHER_VALUE = re.compile(
    rf"(?:(?:either|between|from|not) |{_THAN}|{_LIMIT}).*"
    rf"|{_NUMBER}{_WORDS} ?(?:,?(?: or| and| to)|,) ?{_NUMBER}{_WORDS}"
    rf"|{_NUMBER}{_WORDS} (?:{_LIMIT}|{_OR_MORE}).*"
    rf"|{_NUMBER}(?:[ixyz]| (?:thousand|[mbt]r?illion)\b.*)|{_NUMBER} [a-z]+ {_NUMBER} [a-z]+",
    re.IGNORECASE,
)
_FUNCTION = re.compile(r"a?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|sqrt|max|min", re.IGNORECASE)
_COMMAND_OR_TEXT = re.compile(r"\\(?:text\w*|mbox)\s*\{[^{}]*\}|\\(?:math\w+\s*)?[A-Za-z]*")


def stated(response: str) -> str | None:
    r"""The 7 or 8 of a last "The answer is 7 or 8" or \boxed{7} or \boxed{8}, of which math-verify
    would take one. None where a response states a single value, or has another box.
    """
    if boxes := _TWO_BOXES.search(response):
        return f"{boxes[1]} or {boxes[2]}"
    if "\\boxed" in response:
        return None
    sentence = ""
    for found in _STATEMENT.finditer(response):
        sentence = _END_OF_SENTENCE.split(found[1])[0]
    sentence = re.sub(r"\\?\$|\\[()]|\*\*", "", sentence).strip()
    return sentence if _OTHER_VALUE.fullmatch(sentence) else None


def is_changed(answer: str, gold: str) -> bool:
    r"""Whether the answer says another thing than its number or formula, which the gold does not.

    Bounds: 5\text{ or more}, at least 5, \geq 5. Bases: 11_{3} for 11_{2}. Second quantities:
    5\text{ ft }5\text{ in}. Symbols: Gm/r for GM/r. Not for golds that are solutions in sentences.
    """
    if max(len(answer), len(gold)) > _SHORT or "boxed" in gold:
        return False
    bounds, gold_bounds = (set(_BOUND.findall(_spoken(text))) for text in (answer, gold))
    bases, gold_bases = (set(_BASE.findall(text)) for text in (answer, gold))
    return (
        (bounds != gold_bounds and "=" not in gold)
        or bool(_RELATION.match(answer.lstrip()) and not _RELATION.search(gold))
        or bool(bases and gold_bases and bases != gold_bases)
        or len(TWO_UNITS.findall(answer)) != len(TWO_UNITS.findall(gold))
        or _other_capitals(answer, gold)
    )


def _other_capitals(answer: str, gold: str) -> bool:
    """Whether the answer writes a symbol of the gold only in the other case: Gm for GM. A gold of
    one letter may be a choice or a function, so c is accepted for C."""
    if len(re.sub(r"\W", "", without_text(gold))) < 2:
        return False
    letters, gold_letters = _symbols(answer), _symbols(gold)
    return any(letter.swapcase() in gold_letters - letters for letter in letters - gold_letters)


def _symbols(text: str) -> set[str]:
    right_side = _COMMAND_OR_TEXT.sub(" ", text.rpartition("=")[2])
    return set(re.findall(r"[A-Za-z]", _FUNCTION.sub("", right_side))) - {"i", "I", "e", "E"}


def _spoken(text: str) -> str:
    return re.sub(r"(?:\s|~|\\[ ,;:!])+", " ", without_text(text)).strip(" $").casefold()
