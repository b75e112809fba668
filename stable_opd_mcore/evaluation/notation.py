"""Answers in Unicode's signs and in decoration, rewritten in plain LaTeX.

Only for answers and golds: in prose a dash or a superscript may mean anything. What math-verify
misreads in LaTeX is in answers.py. Standard library only, for grading processes.
"""

import re
import unicodedata

_SIGNS = str.maketrans(
    {
        **{chr(0xFF01 + k): chr(0x21 + k) for k in range(94)},  # full-width ASCII
        **dict.fromkeys("−–—", "-"),  # noqa: RUF001
        **dict.fromkeys("€£¥", ""),
        **dict.fromkeys("\u00a0\u2009\u202f", r"\,"),
        **{"\u3000": " ", "。": ".", "、": ",", "°": r"^{\circ}"},
        **{"√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "∅": r"\emptyset "},
        **{"∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≈": r"\approx "},  # noqa: RUF001
        **{"×": r"\times ", "·": r"\cdot ", "±": r"\pm "},  # noqa: RUF001
    }
)
_SCRIPT = re.compile("([⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)|([₀₁₂₃₄₅₆₇₈₉]+)")
_FRACTION = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
_ROOT = re.compile(r"√ ?(?:\(([^()]*)\)|(\d+(?:\.\d+)?))")
_DECORATION = re.compile(r"\\(?:boldsymbol|bm|textcolor ?\{\w+\}) ?\{([^{}]*)\}")


def in_latex(answer: str) -> str:
    r"""The answer with \sqrt{3} for √3, x^{2} for x², \frac{1}{2} for ½, and 7 for \boldsymbol{7}.

    Without currency signs, which are units.
    """
    answer = _DECORATION.sub(r"\1", answer).replace(r"\varnothing", r"\emptyset")
    if answer.isascii():
        return answer
    answer = _SCRIPT.sub(_script, _FRACTION.sub(_fraction, answer))
    return _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", answer).translate(_SIGNS)


def _script(found: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKD", found[0]).replace("\u2212", "-").lstrip("+")
    return f"{'^' if found[1] else '_'}{{{digits}}}"


def _fraction(found: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKD", found[0]).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"
