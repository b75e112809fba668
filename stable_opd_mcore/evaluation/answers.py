"""Texts of answers, rewritten where math-verify would misread them.

Every rule has its examples in tests/evaluation/test_answers.py. Standard library only, for grading
processes.
"""

import re
from collections.abc import Iterator

from stable_opd_mcore.evaluation.notation import in_latex

_SPACE = r"(?:\s|~|\\[ ,;:!])"
_THOUSANDS_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))")  # 10\,000
# At most three digits of exponent, like a double: 10^999999999 would fill the memory.
_SCIENTIFIC = re.compile(r"(?<![\w\\.])(\d+(?:\.\d*)?)[eE]([-+]?\d{1,3})(?!\w|\.\d)")
_POINT_OR_E = re.compile(r"(?<=\d)\.(?=/)|\\mathrm\s*(?:\{e\}|e\b)")  # 1./3 and \mathrm{e}
_ARGUMENT = r"\s*(?:\{(?:[^{}]|\{[^{}]*\}){0,200}\}|\d)"
_ROOT = re.compile(
    rf"\\sqrt\s*(\[\d+\])?\s*(\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}|\\(?!left|[dtc]?frac)[a-z]+)"
)
_MIXED_NUMBER = re.compile(
    rf"(?<![\w.,^/])(\d{{1,9}}){_SPACE}*"
    r"(?:(?<=\W)([1-9]\d?) ?/ ?([1-9]\d?)(?![\d/])"
    r"|\\[dtc]?frac\s*(?:\{(\d{1,9})\}|(\d))\s*(?:\{(\d{1,9})\}|(\d)))"
)
_REPEATING = re.compile(
    r"(?<![\d.])(\d{1,9})\.(\d{0,9})\\(?:overline|bar|dot) ?(?:\{(\d{1,9})\}|(\d))"
)
_FRACTION_PERCENT = re.compile(r"\\frac\{(\d{1,9})\}\{([1-9]\d{0,8})\}\s*\\?%")
_TERM = (
    r"(?:(?:\d{1,9}(?:\.\d{1,9})?)?\\sqrt ?(?:\{\d{1,9}\}|\d)|\d{1,9}(?:\.\d{1,9})?"
    r"|\\[dt]?frac ?\{\d{1,9}\}\{\d{1,9}\})"
)
_SIDE = r"(?:\\[a-z]{1,9}|[A-Za-z]{1,3})(?: [A-Za-z]{1,3})?"
_RATIO = re.compile(
    rf"(?:(?<![\w\\]){_SIDE}(?: ?: ?{_SIDE}){{2,9}} ?= ?)?"
    rf"(?P<open>\()?(?<![\w.:])({_TERM}(?: ?: ?{_TERM}){{2,9}})(?! ?:|\.?\d)(?(open)\))"
)
_BOX_OR_BRACE = re.compile(r"(?P<box>\\+(?:boxed|fbox)\s*(?:\{|\Z))|\\.|[{}]", re.DOTALL)
_END_OF_BOX = re.compile(rf"(?:{_SPACE}|\\q?quad\b|(?<!\\right)\\?[.,;])+\Z")
_BARE_BOX = re.compile(r"(\\boxed|\\fbox)\s*([\dA-Za-z])(?![\dA-Za-z])")
_UNIT = re.compile(r"(\\?\$?-?[\d.,]*\d(?:\*10\^\(\d+\))?) +([A-Za-z]{3,}(?:[ /][A-Za-z]{2,})*)")
_NO_UNIT = re.compile(
    r"\b(?:a?(?:sin|cos|tan|cot|sec|csc)h?|sqrt|log|exp|and|mod|choose|times|inf\w*"
    r"|percent\w*|pct|hundred|thousand|\w+illion|dozen)\b"
)
_INSIDE = rf"(?<=[\w}})]){_SPACE}*\\(?:text|mbox|mathrm)\s*\{{"
_UNIT_INSIDE = re.compile(rf"{_INSIDE}[^{{}}]*\}}(?={_SPACE}*[,;])")
TWO_UNITS = re.compile(  # 5\text{ ft }6\text{ in}
    rf"(\d){_SPACE}*\\(?:text|mbox|mathrm)\s*\{{(?![^{{}}]*\b(?:and|or|if|when|where|for)\b)"
    rf"[^{{}}A-Za-z]*[A-Za-z][^{{}}]*\}}{_SPACE}*(?=\d)"
)
_NEGATIVE_POWER = re.compile(r"\^-(\d+)")  # 10^-19
_ENDLESS = re.compile(  # 0.1666...
    r"(?<![\d.])(\d{1,9})\.(\d{0,9}?)(?:(\d)\3{2,9}|(\d{2,6})\4{1,4})(?: ?(?:\.{3}|\\[lc]?dots|…))"
)
_MULTIPLE = re.compile(
    rf"(?<=[\d}}]){_SPACE}*(?:(\\(?:text|mbox|mathrm)\s*\{{)\s*)?(dozen|hundred|thousand|million|billion|trillion)s?\b"
)
_FACTORS = {"dozen": "12", "hundred": "100", "thousand": "10^(3)", "million": "10^(6)"}
_FACTORS |= {"billion": "10^(9)", "trillion": "10^(12)"}
_WORDS_INSIDE = re.compile(
    rf"{_INSIDE}[^{{}}]*\b(?:and|or|if|when|where|for(?! all| any))\b[^{{}}]*\}}(?=.)"
)
_FORMULA = re.compile(r"(?<!\\)\${1,2}([^$]+)\${1,2}|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_LABEL = re.compile(r"\A\(?\w{1,12}[).:]?\s*")  # (a) or Minimum
_SOLUTION = re.compile(r"\\(?:boxed|fbox)|answer|\.\s", re.IGNORECASE)
_CONDITION = re.compile(r",?\s+(?:for (?:all|any|each|every)|where [^=]*?\bis an?)\b.*", re.DOTALL)
_TEXT = re.compile(r"\\(?:text\w*|mbox|math(?:rm|bf|it)|operatorname)\s*\{([^{}]*)\}")
_FORMATTING = re.compile(r"\\(?:left|right)\b|\\[()\[\]]|\\?\$|\*\*")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}")
_LEAD = (
    r"(?:(?i:the|my|correct|right|final|answer|result|solution|value|total|option|choice|is|equals"
    r"|so|it|we get|thus|therefore|hence|about|approximately|exactly)\b[: ,]*)"
)
_CHOICES, _LOWER_CHOICES = (  # the first letter, and another one in what follows it
    (
        re.compile(rf"{_LEAD}*(?:\(({of})\)|({of})(?:\)|[.:](?=\s|\Z)|\Z))\s*(.*)", re.DOTALL),
        re.compile(
            rf"(?:\A|\b(?:or|and)\b|[,;/&])\W*\(({of})\)|\A(?:(?:or|and)\b|[,;/&])\W*({of})\b"
        ),
    )
    for of in ("[A-J]", "[a-j]")
)
_SEVERAL = re.compile(r"\W*[A-J](?:(?:\W|\band\b)*[A-J])+\W*")  # A, C and D
_LOWER = re.compile(r"\W*[a-j]\W*")
_SHORT = 200  # longest answer with other readings, whose patterns are slow on a loop
_PERCENT = re.compile(r"\s*\\?%[\s$]*\Z")
_WORDS_BEFORE = re.compile(
    r"\\text ?\{(?![^{}]*(?:\bnot|n't|\bthan)\b)[^{}]*(?::|\b(?:is|are|answer|equals|about|around"
    r"|approximately|exactly|nearly|roughly))\s*\}\s*:?(.+)",
    re.DOTALL,
)
_NAMED = re.compile(r"\\text ?\{[^{}]*\} *=([^=]+)")
_AFTER_LEAD = re.compile(rf"{_LEAD}+(.+)", re.DOTALL)
_ROUNDED = re.compile(r".+\\approx(?![a-z])(.+)", re.DOTALL)
_DECIMAL_COMMA = re.compile(  # not a comma of thousands
    r"(-?(?:0(?=\{?,)|[1-9]\d*(?!\{?,\}?\d{3}\b)))\{?,\}?(\d+)([^\d,]*)"
)
_SET_OF = re.compile(
    r"\\\{ *[A-Za-z](?: *\\in *\\mathbb\{R\})? *(?:\\mid(?![a-z])|[:|]|\\[:;|]) *(.+)\\\}"
)
_IN_DEGREES = re.compile(r"[-\d.]+ ?\^\{?\\circ\}?")
_NESTED = re.compile(r"\[(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])+)\]")
_INDEXED = re.compile(r"\s*([a-z])_(?:\d|\{\d+\})\s*=([^=]+)")
_REWRITTEN = [  # 2 and 1/3, 3 to 2, C(10, 3), R
    (
        re.compile(r"(\d+)(?: and |\\text ?\{ and \})(\d+/\d+|\\[dt]?frac ?\{?\d+\}? ?\{?\d+\}?)"),
        r"\1+\2",
    ),
    (re.compile(r"(\d+) to (\d+)"), r"\1:\2"),
    (re.compile(r"(?<![\\A-Za-z])C\((\d{1,3}), ?(\d{1,3})\)"), r"\\binom{\1}{\2}"),
    (re.compile(r"\A\W*R\W*\Z"), r"\\mathbb{R}"),
]
_OR = re.compile(r"(?:\\text *\{ *or *\}|\bor\b|\\lor(?![a-z])|\\vee(?![a-z])|∨)")  # noqa: RUF001
_RELATION = re.compile(r"(<|>|\\(?:[lg](?:eq?(?:slant)?|t)|neq?)(?![A-Za-z]))")
_NAME = re.compile(r"[A-Za-z]|\\(?!infty|pi)[a-z]+")
_DIGIT_GROUPS = re.compile(r"-?\d{1,3}(?:(?: \d{3})+(?:\.\d+)?|(?:\.\d{3}){2,})")
_UNIT_NAME = (
    r"(?:[kcmdn]?m|[km]?g|m?s|mi|ft|in|yd|lb|oz|min|hr?|yr|m?[lL]|gal|N|[kM]?J|[kM]?W|kWh|[kM]?Pa"
    r"|[kMG]?Hz|V|K|mol|[kMG]?eV|k?cal|mph|rad)(?:\^(?:-?\d|\{-?\d\}))?"
)
_UNITS = re.compile(
    rf"(.*[\d}}])(?: {_UNIT_NAME}(?: ?(?:/|\\cdot) ?{_UNIT_NAME}| {_UNIT_NAME}){{0,3}}"
    r"| ?\^\{?\\circ\}? ?[CF])"
)


def readable(text: str) -> str:
    """The text with numbers that math-verify would misread written in another form.

    It reads \\sqrt\\frac12 as text, 4.5e33 as 4.5·e·33, with Euler's e, 10\\,000 as 10·0, 2 1/2 as
    2·1/2, 1./3 and 1+1/\\mathrm{e} as 1, 0.\\overline{3} as 0, and 1:2:3 as 1/6; a ratio becomes a
    tuple.
    """
    text = _ROOT.sub(r"\\sqrt\1{\2}", text)
    text = _POINT_OR_E.sub(lambda found: "" if found[0] == "." else "e", text)
    text = _THOUSANDS_SPACE.sub("", text)
    text = _SCIENTIFIC.sub(lambda found: f"{found[1]}*10^({int(found[2])})", text)
    text = _NEGATIVE_POWER.sub(r"^{-\1}", text)
    text = _ENDLESS.sub(r"\1.\2\\overline{\3\4}", text)
    text = _MIXED_NUMBER.sub(_improper_fraction, text)
    text = _FRACTION_PERCENT.sub(_decimal_percent, _REPEATING.sub(_repeating_fraction, text))
    return _RATIO.sub(lambda found: f"({re.sub(' ?: ?', ', ', found[2])})", text)


def _improper_fraction(found: re.Match[str]) -> str:
    whole, above, below = (int(digits) for digits in found.groups() if digits)
    return rf"\frac{{{whole * below + above}}}{{{below}}}" if above < below else found[0]


def _repeating_fraction(found: re.Match[str]) -> str:
    before, repeated = found[1] + found[2], found[3] or found[4]
    below = (10 ** len(repeated) - 1) * 10 ** len(found[2])
    return rf"\frac{{{int(before + repeated) - int(before)}}}{{{below}}}"


def _decimal_percent(found: re.Match[str]) -> str:
    number = f"{int(found[1]) / int(found[2]):.6f}".rstrip("0").rstrip(".")
    return rf"{number}\%"


def plain_boxes(response: str) -> tuple[str, str | None]:
    r"""The response with \boxed{7} for "\boxed {7.}", and what its last box holds.

    Empty boxes are left out: a looping response may hold thousands, and math-verify is slow on
    each. Where the last box never ends, its content is "": it withdraws the boxes before it.
    """
    response = _BARE_BOX.sub(r"\1{\2}", response)
    boxes: list[tuple[int, int, int]] = []  # a box's start, its content's start and end
    opened: list[tuple[int, int, bool]] = []  # braces that are not closed yet
    for found in _BOX_OR_BRACE.finditer(response):
        if found["box"] or found[0] == "{":
            opened.append((found.start(), found.end(), bool(found["box"])))
        elif found[0] == "}" and opened:
            start, content, is_box = opened.pop()
            while is_box and boxes and boxes[-1][0] > start:  # inside this one
                boxes.pop()
            boxes += [(start, content, found.start())] * is_box
    last_start = boxes[-1][0] if boxes else -1
    if any(is_box and start > last_start for start, _, is_box in opened):
        return response, ""
    text, done, last = "", 0, None
    for start, content, end in boxes:
        inside = plain_answer(response[content:end]).lstrip()
        inside = inside[:-40] + _END_OF_BOX.sub("", inside[-40:])
        text += response[done:start] + (f"\\boxed{{{with_units(inside)}}}" if inside else "")
        done, last = end + 1, inside or last
    return text + response[done:], last


def plain_answer(answer: str) -> str:
    """An answer that math-verify can read, in LaTeX: 5*10^(6) for 5 million."""
    return _MULTIPLE.sub(_times_factor, readable(in_latex(answer)))


def _times_factor(found: re.Match[str]) -> str:
    return f"*{_FACTORS[found[2]]}{found[1] or ''}"


def with_units(answer: str) -> str:
    r"""`12 \text{dollars}` for `12 dollars`: math-verify drops text at the end, and all before it.

    So `5\text{ cm and }3\text{ cm}` becomes `5, 3\text{ cm}`.
    """
    answer = TWO_UNITS.sub(r"\1, ", _WORDS_INSIDE.sub(", ", _UNIT_INSIDE.sub("", answer)))
    found = _UNIT.fullmatch(answer)
    return answer if not found or _NO_UNIT.search(answer) else rf"{found[1]} \text{{{found[2]}}}"


def one_formula(gold: str) -> str:
    """A gold answer of several formulas as one list, because math-verify takes the last of many.

    Without the conditions of its symbols ("for all $x$"). A solution in sentences stays as it is.
    """
    gold = gold.strip()
    if _SOLUTION.search(gold) or not _FORMULA.match(_LABEL.sub("", gold)):
        return gold
    gold = _CONDITION.sub("", gold)
    formulas = [next(filter(None, found)) for found in _FORMULA.findall(gold)]
    return f"${', '.join(formulas)}$" if len(formulas) > 1 else gold


def lacks_entries(answer: str, gold: str) -> bool:
    """Whether an answer has fewer numbers than a gold list that has one twice, as -2,-2 has.

    math-verify compares lists as sets.
    """
    entries = gold.strip("$ ").replace(" ", "").split(",")
    is_list = all(re.fullmatch(r"-?\d{1,2}", entry) for entry in entries)
    repeats = len(set(entries)) < len(entries)
    return is_list and repeats and len(re.findall(r"\d+", answer)) < len(entries)


_SAME_WORDS = [
    (re.compile(pattern, re.IGNORECASE), word)
    for pattern, word in (
        (r"\\emptyset|(?:there (?:is|are) )?no solutions?|none", "no solution"),
        (r"infinitely many solutions", "infinitely many"),
        (r"DNE", "does not exist"),
    )
]
_AFTERNOON = re.compile(r"(?<!\d)([1-9]|1[01])(:[0-5]\d)pm\b")  # 18:15 for 6:15pm


def same_letters(answer: str, gold: str) -> bool:
    """Whether two texts are equal except for formatting and, if there are words, capitals."""
    answer, gold = _letters(answer), _letters(gold)
    if _WORD.search(gold):
        answer, gold = answer.casefold(), gold.casefold()
    return answer == gold != ""


def _letters(text: str) -> str:
    text = re.sub(rf"{_SPACE}+", " ", _FORMATTING.sub("", without_text(text))).rstrip(" .,;")
    text = re.sub(r"(?<=\d) ?([AaPp])\.? ?[Mm]\b\.?", lambda found: found[1].lower() + "m", text)
    text = _AFTERNOON.sub(lambda found: f"{int(found[1]) + 12}{found[2]}", text)
    text = next((word for each, word in _SAME_WORDS if each.fullmatch(text)), text)
    return re.sub(r" (?!\w)|(?<!\w) ", "", text)


def without_text(text: str) -> str:
    r"""The text with what \text{...} and \mathrm{...} hold in their place."""
    while (bare := _TEXT.sub(r"\1", text)) != text:
        text = bare
    return text


def of_a_choice(answer: str, gold: str) -> Iterator[tuple[str, str]]:
    """What to compare where one is a choice's letter, or has it before its text: "(B) 12"."""
    (letter, text), (gold_letter, gold_text) = choice(answer, gold), choice(gold, gold)
    if letter and letter == gold_letter:
        yield (text, gold_text) if text and gold_text else (letter, letter)
    elif bool(letter) != bool(gold_letter) and text and gold_text:
        yield text, gold_text
    both = [without_text(each) for each in (answer, gold)]
    if all(map(_SEVERAL.fullmatch, both)) and any(re.search(r"\w\W+\w", each) for each in both):
        letters = ["".join(sorted(re.findall("[A-J]", each))) for each in both]
        if letters[0] == letters[1]:
            yield gold, gold


def choice(answer: str, gold: str) -> tuple[str, str]:
    """Split an answer into the letter and the text of its choice. The letter is "" where the answer
    has none or several. It is lower-case where the gold is only a lower-case letter."""
    answer = re.sub(rf"{_SPACE}+", " ", without_text(answer)).strip("$ ")
    first, following = _LOWER_CHOICES if _LOWER.fullmatch(without_text(gold)) else _CHOICES
    if not (found := first.fullmatch(answer)):
        return "", answer
    letter, text = found[1] or found[2], found[3]
    others = {one or other for one, other in following.findall(text[:_SHORT])} - {letter}
    return ("", answer) if others else (letter, text)


def other_readings(answer: str, gold: str) -> Iterator[tuple[str, str]]:
    r"""What to compare where an answer has more around its value than the gold, or no per cent.

    5 m/s, 1 000, 0,5 for 0.5, \text{about }7, 5\sqrt2\approx 7.07, 1\le x\le 2 for [1,2], and 62.5
    for 62.5%.
    """
    if len(answer) > _SHORT:
        return
    if _PERCENT.search(gold) and "%" not in answer:
        yield answer, _PERCENT.sub("", gold).lstrip("$ ")
    for pattern in (_WORDS_BEFORE, _NAMED, _ROUNDED):
        if found := pattern.fullmatch(answer):
            yield found[1].strip(), gold
    if found := _AFTER_LEAD.fullmatch(without_text(answer).strip(" $")):
        yield found[1].strip(), gold
    given_comma, gold_comma = _DECIMAL_COMMA.fullmatch(answer), _DECIMAL_COMMA.fullmatch(gold)
    if given_comma and "," not in gold:
        yield f"{given_comma[1]}.{given_comma[2]}{given_comma[3]}", gold
    elif gold_comma and "," not in answer and gold.lstrip("-").startswith("0"):  # not a list
        yield answer, f"{gold_comma[1]}.{gold_comma[2]}{gold_comma[3]}"
    yield from ((written, gold) for written in _in_other_words(answer, gold))
    if re.search(r"[\[(].*,.*[\])]", gold) and (interval := _interval(answer)):
        yield interval, gold
    yield from _without_units(answer, gold)


def _in_other_words(answer: str, gold: str) -> Iterator[str]:
    r"""2+1/3 for "2 and 1/3", 3:2 for "3 to 2", a binomial for C(10,3), 1, 2 for x_1=1, x_2=2, a
    matrix for [[1,2],[3,4]], and degrees for \pi/3 where the gold is in degrees."""
    for pattern, other in _REWRITTEN:
        if (written := pattern.sub(other, answer)) != answer:
            yield written
    roots = [_INDEXED.fullmatch(part) for part in re.split("[,;]", answer)]
    if len({found and found[1] for found in roots}) == 1 and len(roots) > 1 and roots[0]:
        yield ", ".join(found[2] for found in roots if found)
    if rows := _NESTED.fullmatch(answer):
        cells = re.sub(r"\]\s*,\s*\[", r"\\\\", rows[1][1:-1]).replace(",", "&")
        yield rf"\begin{{pmatrix}}{cells}\end{{pmatrix}}"
    if _IN_DEGREES.fullmatch(gold) and r"\pi" in answer:
        yield rf"\frac{{180}}{{\pi}}({without_text(answer).replace('radians', '')})"


def _without_units(answer: str, gold: str) -> Iterator[tuple[str, str]]:
    given, expected = _UNITS.fullmatch(answer), _UNITS.fullmatch(gold)
    if expected and not given and "/" in gold[expected.end(1) :]:  # a plain m may be a variable
        yield answer, expected[1]
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]", _TEXT.sub("", gold)):  # the unit may be a variable
        return
    if _DIGIT_GROUPS.fullmatch(answer):
        yield re.sub(r" |\.(?=\d{3}(?:\.|\Z))", "", answer), gold
    if given:
        yield given[1], gold


def alternatives(answer: str) -> list[str]:
    """The parts of "0.5 or 1/2", which is right where each of them is; [] for one part."""
    parts = [part.strip(" $,") for part in _OR.split(answer[:_SHORT])]
    return parts if len(parts) > 1 and all(parts) else []


def _interval(answer: str) -> str:
    r"""(1, 2] for 1 < x \le 2, (-\infty, 1) \cup (2, \infty) for x < 1 or 2 < x; else ""."""
    found = _SET_OF.fullmatch(re.sub(r"\\(?:left|right)(?![a-z])", "", answer).strip())
    parts = [_part(part.strip()) for part in _OR.split(found[1] if found else answer)]
    return r" \cup ".join(parts) if all(parts) else ""


def _part(condition: str) -> str:
    pieces = [piece.strip() for piece in _RELATION.split(condition)]
    ends, signs = pieces[::2], pieces[1::2]
    downwards = {sign == ">" or sign.startswith("\\g") for sign in signs}
    if len(ends) == 2 and _NAME.fullmatch(ends[0]) and signs[0].startswith("\\n"):
        return rf"(-\infty, {ends[1]}) \cup ({ends[1]}, \infty)"
    if len(downwards) != 1 or any("n" in sign for sign in signs) or any("=" in end for end in ends):
        return ""
    if downwards == {True}:
        ends, signs = ends[::-1], signs[::-1]
    if len(ends) == 2 and _NAME.fullmatch(ends[0]):
        ends, signs = [r"-\infty", *ends], ["<", *signs]
    elif len(ends) == 2:
        ends, signs = [*ends, r"\infty"], [*signs, "<"]
    if len(ends) != 3 or not _NAME.fullmatch(ends[1]):
        return ""
    left, right = ("e" in sign for sign in signs)  # \le, \leq, \geqslant
    return f"{'[' if left else '('}{ends[0]}, {ends[2]}{']' if right else ')'}"
