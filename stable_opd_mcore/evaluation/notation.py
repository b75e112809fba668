"""Rewrites answers in plain LaTeX: Unicode signs, decoration, and commands of LaTeX packages.

Only for answers and golds: in prose a dash or a superscript may mean anything. What math-verify
misreads in LaTeX is in answers.py. Standard library only, for grading processes.
"""

import re
import unicodedata

_SIGNS = str.maketrans(
    {
        **{chr(0xFF01 + k): chr(0x21 + k) for k in range(94)},  # full-width ASCII
        **dict.fromkeys("−–—", "-"),  # noqa: RUF001
        **dict.fromkeys("\u00a0\u2009\u202f", r"\,"),
        **{"\u3000": " ", "。": ".", "、": ",", "°": r"^{\circ}"},
        **{"′": "'", "″": "''", "\u066b": ".", "\u066c": ",", "\u066a": "%"},  # noqa: RUF001
        **{"√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "∅": r"\emptyset "},
        **{"∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≈": r"\approx "},  # noqa: RUF001
        **{"×": r"\times ", "·": r"\cdot ", "±": r"\pm "},  # noqa: RUF001
    }
)
_SCRIPT = re.compile("([⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)|([₀₁₂₃₄₅₆₇₈₉]+)")
_FRACTION = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
_ROOT = re.compile(r"([√∛∜]) ?(?:\(([^()]*)\)|(\d+(?:\.\d+)?))")
_DEGREES = {"√": "", "∛": "[3]", "∜": "[4]"}
_DECORATION = re.compile(
    r"\\(?:boldsymbol|bm|(?:text)?color ?\{\w+\}|underline|[Ll]arge|LARGE|[Hh]uge|num)"
    r" ?\{((?:[^{}]|\{[^{}]*\})*)\}|\\color ?\{\w+\}|\\hspace ?\{[^{}]*\}"
    r"|(?:\\(?:(?:black)?square|Box|qed)(?![A-Za-z])|\\\\)\s*\Z"
)
_VECTOR = r"\\(?:mathbf|boldsymbol|bm|vec|hat|widehat|overrightarrow)(?![a-z])"
_LETTER = r"(?:\\[ij]math(?![a-z])|[A-Za-z](?![A-Za-z]))"
_FUNCTIONS = "ln|log|exp|a?(?:sin|cos|tan|cot|sec|csc)h?|max|min|gcd"
_EQUATIONS = re.compile(  # one below the other
    r"\\left *\\\{ *(?=\\begin)|\\right *\.|\\begin ?\{(cases|aligned|align\*?|gathered|array)\}"
    r"(?:\{l+\})?((?=(?:(?!\\\\).)*=)(?:(?!\\begin|&(?! ?=)).)*)\\end ?\{\1\}",
    re.DOTALL,
)
_COMMANDS = [  # a form that math-verify cannot read, and one that it can
    (re.compile(pattern), latex)
    for pattern, latex in (
        (r"(?<!\\)~", r"\\ "),
        (r"`", ""),
        (r"\\varnothing", r"\\emptyset"),
        *(
            (rf"{_VECTOR}\s*(?:\{{\s*e\s*\}}|e)\s*_\s*(?:\{{{n}\}}|{n})", f" {unit}")
            for n, unit in enumerate("ijk", start=1)
        ),
        (rf"{_VECTOR}\s*\{{\s*({_VECTOR}\s*\{{?\s*{_LETTER}\s*\}}?)\s*\}}", r" \1"),
        (rf"{_VECTOR}\s*(\{{)?\s*({_LETTER})\s*(?(1)\}})", r" \2"),
        (r"\\([ij])math(?![a-z])", r"\1"),
        (r"\\([dt]?frac) ([A-Za-z]) ?([A-Za-z\d])(?![A-Za-z])", r"\\\1{\2}{\3}"),
        (r"\\(?:s|nice)frac(?=\s*\{)", r"\\frac"),
        (r"\\([dt]?frac)\s*\\pi\s*(\d)", r"\\\1{\\pi}{\2}"),
        (r"\\([dt]?binom)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}"),
        (r"\\(?:mathbb|Bbb)\s*\{?([A-Z])(?![a-z])\}?", r"\\mathbb{\1}"),
        (r"\\log_(?:e|\{e\})(?![a-z])", r"\\ln"),
        (rf"\\(?:text|mathrm|operatorname)\s*\{{({_FUNCTIONS})\}}", r"\\\1 "),
        (r"\\degree(?![a-z])", r"^{\\circ}"),
        (r"\\lbrace(?![a-z])", r"\\{"),
        (r"\\rbrace(?![a-z])", r"\\}"),
        (r"\\colon(?![a-z])", ":"),
        (r"(?<=\d)(?:\{([.:])\}|\\text\{([.:])\})(?=\d)", r"\1\2"),
        (r"(?<=\d)\\text\{,\}(?=\d{3})", ","),
        (r"\\text\s*\{\s*infinity\s*\}", r"\\infty"),
        (r"\\text\s*\{\s*(?:[Aa]ll )?real numbers\s*\}", r"\\mathbb{R}"),
        (r"\\(?:text|math(?:rm|it))\s*\{i\}|(?<=\d)(?:\s+i|\\mathrm\s+i)(?![A-Za-z])", "i"),
        (r"(?<=\d)\s*(?:\\text\s*\{\s*x\s*\}|x)\s*(?=10\s*\^)", r"\\times "),
    )
]
_CURRENCY = re.compile(  # before a number; after it words are units
    r"\\(?:pounds|euro|yen)(?![a-z])(?:\s*\{\})?|(?<![A-Za-z])(?:(?:US|CA?|AU?|HK|NZ)(?=\\?\$ ?\d)"
    r"|(?P<text>\\text\s*\{\s*)?(?:USD|EUR|GBP|CAD|AUD|INR|CNY|RMB|JPY|Rs\b\.?)\s*"
    r"(?(text)\})(?=[\s~]*\d))"
)
_SMALL = (  # noqa: SIM905
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
_VALUES = {word: value for value, word in enumerate(_SMALL)}
_VALUES |= {word: 10 * tens for tens, word in enumerate(_TENS, start=2)}
_NUMBER_WORD = re.compile(
    r"(\A\W*(?:\\(?:text\w*|mbox|mathrm)\s*\{\s*)?)"
    rf"((?:{'|'.join(_TENS)})(?:[- ](?:{'|'.join(_SMALL[1:10])}))?"
    rf"|{'|'.join(_SMALL[::-1])})"
    r"(?=\s*\}?\s*(?:(?:hundred|thousand|[mbtr]+illion|dozen)s?\b|[\s$.]*\Z))",
    re.IGNORECASE,
)
_COUNTER = re.compile(
    r"(?<=\d)\s*(?:元|円|圆|圓|원|人|个|個|名|只|本|枚|张|条|次|天|年|岁|厘?米|公[里斤])(?=[\s.。]*\Z)"
)


def in_latex(answer: str) -> str:
    r"""The answer with \sqrt{3} for √3, x^{2} for x², \frac{1}{2} for ½, and 7 for \boldsymbol{7}.

    Without signs and codes of currencies, and without counters such as 元, which are units.
    """
    answer = _CURRENCY.sub("", with_plain_digits(answer))
    answer = _NUMBER_WORD.sub(lambda found: found[1] + _value(found[2]), answer)
    for _ in range(3):  # one inside another
        answer = _DECORATION.sub(r"\1", answer)
    answer = _EQUATIONS.sub(_as_list, answer)
    for pattern, latex in _COMMANDS:
        answer = pattern.sub(latex, answer)
    if answer.isascii():
        return answer
    answer = _COUNTER.sub("", _SCRIPT.sub(_script, answer))
    answer = _ROOT.sub(
        lambda found: rf"\sqrt{_DEGREES[found[1]]}{{{found[2] or found[3]}}}", answer
    ).translate(_SIGNS)
    return "".join(sign for sign in answer if sign == "$" or unicodedata.category(sign) != "Sc")


def with_plain_digits(text: str) -> str:
    r"""The text with digits of every script as 0 to 9, and \frac{1}{2} for ½."""
    if text.isascii():
        return text
    text = _FRACTION.sub(_fraction, text)
    return "".join(str(unicodedata.decimal(sign, sign)) for sign in text)


def _as_list(found: re.Match[str]) -> str:
    rows = (row.replace("&", "").strip(" ,;\n") for row in re.split(r"\\\\", found[2] or ""))
    return ", ".join(filter(None, rows))


def _value(words: str) -> str:
    return str(sum(_VALUES[word] for word in re.split("[- ]", words.lower())))


def _script(found: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKD", found[0]).replace("\u2212", "-").lstrip("+")
    return f"{'^' if found[1] else '_'}{{{digits}}}"


def _fraction(found: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKD", found[0]).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"
