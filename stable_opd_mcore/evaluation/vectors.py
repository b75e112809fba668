r"""Vectors by their components, and angles and times by their size, whatever their notation.

math-verify compares two matrices, but no column with (1, 2), and reads \mathbf{i} as text. Standard
library only, for grading processes.
"""

import re
from fractions import Fraction

from stable_opd_mcore.evaluation.answers import without_text

_MATRIX = re.compile(
    r"(?P<factor>(?:(?!\\begin)[^,+])*)\\begin ?\{(?P<name>[pbvBV]?matrix|smallmatrix|array)\}"
    r"(?:(?<=array\})\s*\{[^{}]*\})?"
    r"(?P<cells>(?:(?!\\begin).)*)\\end ?\{(?P=name)\}",
    re.DOTALL,
)
_DELIMITERS = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-z])")
_TRANSPOSED = re.compile(r"(?<=[\])}>e])\s*\^\s*\{?\s*(?:T|\\top|\\intercal)\s*\}?\Z")
_ANGLED = re.compile(r"(?:\\langle(?![a-z])|<)(.*)(?:\\rangle(?![a-z])|>)")
_BRACKETED = re.compile(r"\((.*)\)|\[(.*)\]", re.DOTALL)
_TIMES_LIST = re.compile(
    r"(-?(?:\\[dt]?frac ?\{?\d+\}? ?\{?\d+\}?|\d+/\d+|\d+))\(([^()]*,[^()]*)\)"
)
_TERM = re.compile(r"([-+]?[^-+(){}]*(?:[({][^(){}]*[)}][^-+(){}]*)*)")
_BASE_VECTOR = re.compile(r"(.*?)(?<![\\A-Za-z])([ijk])\Z", re.DOTALL)
_SHORT = 500  # longest text that is taken apart

_NUMBER = r"(?:\\frac\{\d{1,9}\}\{\d{1,9}\}|\d{1,9}(?:\.\d{1,9})?(?:/\d{1,9})?)"
_UNITS = {  # in seconds, or in seconds of arc
    r"days?": 86400,
    r"hours?|hrs?|h": 3600,
    r"\^\{?\\circ\}?|degrees?|deg": 3600,
    r"minutes?|mins?": 60,
    r"'(?!')": 60,
    r"''|\"": 1,
    r"seconds?|secs?|s": 1,
}
_UNIT = "|".join(f"(?:{names})" for names in _UNITS)
_PART = re.compile(rf"({_NUMBER})\s*({_UNIT})(?![a-z])[\s,]*(?:and\s+)?")
_IS_ANGLE = re.compile(r"\\circ|deg")
_CLOCK = re.compile(r"\d{1,3}(?::[0-5]\d)+")


def components(answer: str, gold: str) -> tuple[list[str], list[str]] | None:
    r"""The components of both, where both are vectors and one is written as a column, in angle
    brackets, or with the unit vectors i, j and k; else None.

    Not for two matrices, in which math-verify compares the shapes too.
    """
    (kind, given), (gold_kind, expected) = _vector(answer), _vector(gold)
    kinds = {kind, gold_kind}
    if "" in kinds or kinds <= {"list"} or kinds == {"matrix"}:
        return None
    if "units" in kinds:  # a component that is 0 is not written
        length = max(len(given), len(expected))
        given, expected = (
            each + ["0"] * (length - len(each)) if of == "units" else each
            for of, each in ((kind, given), (gold_kind, expected))
        )
    return [f"{{{each}}}" for each in given], [f"{{{each}}}" for each in expected]


def _vector(text: str) -> tuple[str, list[str]]:
    """How a vector is written, and its components; "" for what is no vector."""
    if len(text) > _SHORT:
        return "", []
    text = _DELIMITERS.sub("", text.strip().strip("$")).rpartition("=")[2].strip()
    bare = _TRANSPOSED.sub("", text)
    kind, text = "list" if bare == text else "column", bare
    if found := _TIMES_LIST.fullmatch(text):
        factor, text = found[1], found[2]
        return "column", [f"{factor}({each})" for each in _entries(text)]
    bracketed = _BRACKETED.fullmatch(text)
    inside = (bracketed[1] or bracketed[2] or "") if bracketed else text
    if found := _MATRIX.fullmatch(inside.strip()):
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", found["cells"]) if row.strip()]
        cells = [[cell.strip() for cell in row.split("&")] for row in rows]
        if len(cells) == 1 or all(len(row) == 1 for row in cells):
            factor = found["factor"].strip()
            return "matrix", [f"{factor}({c})" if factor else c for row in cells for c in row]
        return "", []
    if found := _ANGLED.fullmatch(text):
        return "angled", _entries(found[1])
    if units := _of_unit_vectors(text):
        return "units", units
    entries = _entries(inside)
    return (kind, entries) if len(entries) > 1 else ("", [])


def _entries(text: str) -> list[str]:
    """The parts between commas that stand in no brackets."""
    entries, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += sign
    return [entry.strip() for entry in entries]


def _of_unit_vectors(text: str) -> list[str]:
    """The factors of i, j and k in a sum with j or k; [] for any other text."""
    factors: dict[str, str] = {}
    terms = _TERM.findall(text := text.replace(" ", ""))
    if "".join(terms) != text:  # brackets in brackets
        return []
    for term in filter(None, terms):
        found = _BASE_VECTOR.fullmatch(term)
        if not found or found[2] in factors:
            return []
        factor = found[1].removesuffix(r"\cdot").removeprefix("+")
        factors[found[2]] = f"{factor}1" if factor in ("", "-") else factor
    last = max(factors, default="i")
    return [factors.get(each, "0") for each in "ijk"[: "ijk".index(last) + 1]] if last > "i" else []


def same_quantity(answer: str, gold: str) -> bool | None:
    """Whether two angles, or two times, are equal; None where the units do not decide.

    They decide where they differ, or where there are several: 90 minutes is 1 hour 30 minutes. A
    number without a unit is in degrees, if the other is an angle in degrees and minutes; 3:20 is in
    the units of a gold time that has as many.
    """
    (units, size, angle), (gold_units, gold_size, gold_angle) = _size(answer), _size(gold)
    if _CLOCK.fullmatch(clock := answer.strip(" $")) and not gold_angle:
        numbers = [int(each) for each in clock.split(":")]
        if len(numbers) == len(gold_units):
            pairs = zip(numbers, gold_units, strict=True)
            units, size = gold_units, Fraction(sum(number * unit for number, unit in pairs))
    if angle and gold_size is None and len(units) > 1:
        gold_units, gold_size, gold_angle = _size(rf"{gold}^\circ")
    elif gold_angle and size is None and len(gold_units) > 1:
        units, size, angle = _size(rf"{answer}^\circ")
    if size is None or gold_size is None or (units == gold_units and len(units) == 1):
        return None
    return angle == gold_angle and abs(size - gold_size) <= abs(gold_size) / 10**6


def is_quantity(text: str) -> bool:
    return _size(text)[1] is not None


def _size(text: str) -> tuple[list[int], Fraction | None, bool]:
    """The units of an angle or a time, its size, and whether it is an angle."""
    text = re.sub(r"\\[ ,;:!]|~", " ", without_text(text[:_SHORT])).strip(" $").lower()
    text = re.sub(r"\^\s*\{?\s*((?:\\prime\s*)+)\}?", lambda m: "'" * m[1].count("p"), text)
    units, size, done = [], Fraction(0), 0
    sign = -1 if text.startswith("-") else 1
    text = text.removeprefix("-").lstrip()
    while found := _PART.match(text, done):
        done = found.end()
        above, _, below = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", found[1]).partition("/")
        pattern = next(names for names in _UNITS if re.fullmatch(names, found[2]))
        units.append(_UNITS[pattern])
        if below and not int(below):
            return [], None, False
        size += Fraction(above) / int(below or 1) * units[-1]
    return (
        (units, sign * size, bool(_IS_ANGLE.search(text))) if units and done == len(text) else _NONE
    )


_NONE: tuple[list[int], None, bool] = ([], None, False)
