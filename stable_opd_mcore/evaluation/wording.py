r"""Words, signs and capitals that change an answer's value, and that math-verify leaves out.

It takes 5 from "5 or more", from "\geq 5" and from "5_{2}", and m for M. Standard library only, for
grading processes.
"""

import re
from collections import deque

from stable_opd_mcore.evaluation.answers import (
    TWO_UNITS,
    choice,
    plain_answer,
    same_letters,
    with_units,
    without_text,
)
from stable_opd_mcore.evaluation.vectors import is_quantity

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
_MAX_STATEMENTS = 50  # a looping response may hold thousands; the last ones count
_TAGS = re.compile(r"<(/?)answer>", re.IGNORECASE)
_STATEMENT = re.compile(
    r"\b(?:(answer)|(?:option|choice))(?: choice| option)?"
    r"(?: is| would be| should be|\s*[:：=是为-])[:：*]*\s*"  # noqa: RUF001
    r"(?=([^\n]{1,201}))",  # another statement may follow in the line
    re.IGNORECASE,
)
_REASON = re.compile(r",? +(?:because|since|as)\b")
_REASON_OR_TEXT = re.compile(rf"{_REASON.pattern}|(?:,| [-–—])(?= [A-Za-z]{{3}})")  # noqa: RUF001
_CHOSEN = re.compile(
    r"(?:\b(?i:(?:choose|select|pick)(?: option)?|(?:so|thus|hence|therefore),? (?:the )?option) "
    r"|故选)[*( ]*([A-Ja-j])\b"
    r"|(?<!\w)\(?([A-Ja-j])\)?(?:\*\*)? is (?:the )?(?:correct|right)\b"
)
_FORMATTING = re.compile(r"\\?\$|\\[()]|\*\*")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}")
_NO_PROSE = re.compile(r"\\(?:begin|end) ?\{\w+\}|\b(?:and|or)\b")
_TWO_BOXES = re.compile(
    r"\\boxed\{([^{}]*)\}(?:\$|\\[)\]])?(,? or|,? and) (?:\$|\\[(\[])?(?:\w = ?|\w=)?"
    r"\\boxed\{([^{}]*)\}(?!.*\\boxed)",
    re.DOTALL,
)
_END_OF_SENTENCE = re.compile(r"(?<!\\)[.!?;](?=\s|\Z)")
_NUMBER, _WORDS = r"-?\d[\d.,]*(?<=\d)", r"(?: [a-z]+){0,2}"
_OTHER_VALUE = re.compile(
    rf"(?:(?:either|between|from|not) |{_THAN}|{_LIMIT}).*"
    rf"|{_NUMBER}{_WORDS} ?(?:,?(?: or| and| to)|,) ?{_NUMBER}{_WORDS}"
    rf"|{_NUMBER}{_WORDS} (?:{_LIMIT}|{_OR_MORE}).*"
    rf"|{_NUMBER}(?:[ixyz]| (?:dozen|hundred|thousand|[mbt]r?illion)\b.*)"
    rf"|{_NUMBER} [a-z]+ {_NUMBER} [a-z]+",
    re.IGNORECASE,
)
_FUNCTION = re.compile(r"a?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|sqrt|max|min", re.IGNORECASE)
_COMMAND_OR_TEXT = re.compile(r"\\(?:text\w*|mbox)\s*\{[^{}]*\}|\\(?:math\w+\s*)?[A-Za-z]*")


def in_tags(response: str) -> str:
    """What the last <answer> tags hold, if no box follows them: as a box where it is a value."""
    _, opened, rest = _TAGS.sub(r"<\1answer>", response).rpartition("<answer>")
    inside, _, after = rest.partition("</answer>")
    if not opened or "\\boxed" in after:
        return response
    inside = inside.strip()
    is_boxed = "\\boxed" not in inside and len(inside) <= _SHORT and _is_value(inside)
    return rf"\boxed{{{inside}}}" if is_boxed else inside


def stated(response: str, gold: str) -> str | None:
    r"""What a response without a box states at last, where math-verify would not read all of it.

    A formula, a choice's letter, 7 or 8, two boxes with "or" between them; a last line that is only
    a choice's letter. None for a statement with other words, from which math-verify takes a number.
    """
    if (boxes := _TWO_BOXES.search(response)) and boxes[1] != boxes[3]:
        return f"{boxes[1]}{boxes[2]} {boxes[3]}"
    if "\\boxed" in response:
        return None
    last, is_letter = "", bool(choice(gold, gold)[0])
    if is_letter:
        response = _CHOSEN.sub(r"\n answer: \1\2. ", response)
    response = response.replace("答案", "\n answer")
    for found in deque(_STATEMENT.finditer(response), maxlen=_MAX_STATEMENTS):
        sentence = (_REASON_OR_TEXT if is_letter else _REASON).split(found[2])[0]
        sentence = _END_OF_SENTENCE.split(sentence)[0]
        is_whole = len(sentence) <= _SHORT
        sentence = _FORMATTING.sub("", sentence).strip()
        if (
            sentence
            and is_whole
            and (
                choice(sentence, gold)[0]
                or (found[1] and (_is_value(sentence) or same_letters(sentence, gold)))
            )
        ):
            last = sentence
        elif found[1] and not is_letter:
            last = ""
    if not last:
        line = response.rstrip().rpartition("\n")[2].strip("*$ ")
        most = 5 if "\n" in response.strip() else 60
        last = line if len(line) < most and choice(line, gold)[0] else ""
    return last or None


def _is_value(text: str) -> bool:
    """Whether a statement is no more than a value, perhaps with a unit, or several values."""
    return bool(
        _OTHER_VALUE.fullmatch(text)
        or not _PROSE.search(_NO_PROSE.sub("", plain_answer(text)))
        or with_units(text) != text
        or is_quantity(text)
    )


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
        or bool(bases and bases != (gold_bases or {"10"}))
        or len(TWO_UNITS.findall(answer)) != len(TWO_UNITS.findall(gold))
        or _other_capitals(answer, gold)
    )


def _other_capitals(answer: str, gold: str) -> bool:
    """Whether the answer writes a symbol of the gold only in the other case: Gm for GM. Where the
    gold is E, math-verify reads the constant e."""
    given, expected = (re.sub(r"\W", "", without_text(each)) for each in (answer, gold))
    if expected == "E" or (len(expected) == 1 and given == expected.swapcase()):
        return not re.search(rf"(?<![\\A-Za-z]){expected}", answer)
    letters, gold_letters = _symbols(answer), _symbols(gold)
    return any(letter.swapcase() in gold_letters - letters for letter in letters - gold_letters)


def _symbols(text: str) -> set[str]:
    right_side = _COMMAND_OR_TEXT.sub(" ", text.rpartition("=")[2])
    return set(re.findall(r"[A-Za-z]", _FUNCTION.sub("", right_side))) - {"i", "I", "e", "E"}


def _spoken(text: str) -> str:
    return re.sub(r"(?:\s|~|\\[ ,;:!])+", " ", without_text(text)).strip(" $").casefold()
