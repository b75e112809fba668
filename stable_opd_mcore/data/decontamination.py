"""Finds benchmark problems among training problems: equal texts and common runs of 13 words.

Texts are compared without case, spaces, punctuation and LaTeX's formatting. A problem is
contaminated if
  - it equals a benchmark problem ("exact"), or
  - 13 words in a row also occur in a benchmark problem ("13-gram"), or
  - it contains a whole benchmark problem of 8 to 12 words ("whole problem").
Shorter benchmark problems are found only if they are equal. Solutions are not compared.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from stable_opd_mcore.data.rows import Row

NGRAM_WORDS = 13
_MIN_WORDS = 8  # a shorter benchmark problem is not looked for inside a longer text

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
_FORMATTING = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|big[lr]?|text(?:bf|it|rm)?|math(?:rm|bf|it)"
    r"|operatorname|qquad|quad|[lc]?dots)(?![a-z])|\\[,;:!> ]|\\(?:begin|end)\{[a-z*]*\}"
)
_DIGIT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|\\!,)(?=\d{3}(?!\d))")
_WORD = re.compile(r"[^\W\d_]+|\d+")
_PUNCTUATION = re.compile(r"[\s$\\{}()\[\],;:?'\"`~&_#]+|\.(?!\d)")


@dataclass(frozen=True)
class Match:
    """The place of a problem in a benchmark."""

    benchmark: str
    row_id: str  # the benchmark problem's
    kind: Literal["exact", "13-gram", "whole problem"]
    words: str  # what both have in common, normalised


class BenchmarkIndex:
    """The problems of all benchmarks, looked up by their text and by their runs of words."""

    def __init__(self, benchmarks: Mapping[str, Iterable[Row]]) -> None:
        # A text or a run of words -> benchmark and row
        self._exact: dict[str, tuple[str, str]] = {}
        self._runs: dict[int, dict[tuple[str, ...], tuple[str, str]]] = {}
        for name, row in ((name, row) for name, rows in benchmarks.items() for row in rows):
            key, words = problem_key(row.problem), problem_words(row.problem)
            if key:
                self._exact.setdefault(key, (name, row.row_id))
            if len(words) >= _MIN_WORDS:
                size = min(len(words), NGRAM_WORDS)
                runs = self._runs.setdefault(size, {})
                for run in _runs(words, size):
                    runs.setdefault(run, (name, row.row_id))

    def find(self, problem: str) -> Match | None:
        """The first benchmark problem that `problem` repeats, or None."""
        same = self._exact.get(problem_key(problem))
        words = problem_words(problem)
        if same is not None:
            return Match(*same, "exact", " ".join(words))
        for size in sorted(self._runs, reverse=True):
            known = self._runs[size]
            for run in _runs(words, size):
                if run in known:
                    kind = "13-gram" if size == NGRAM_WORDS else "whole problem"
                    return Match(*known[run], kind, " ".join(run))
        return None


def problem_words(text: str) -> tuple[str, ...]:
    """The words and numbers of a text, in lower case, without LaTeX's formatting."""
    return tuple(_WORD.findall(_normalised(text)))


def problem_key(text: str) -> str:
    """The text without case, spaces and punctuation. Operators stay: 1+1 is not 1-1."""
    return _PUNCTUATION.sub("", _normalised(text))


def _runs(words: tuple[str, ...], size: int) -> Iterator[tuple[str, ...]]:
    return (words[start : start + size] for start in range(len(words) - size + 1))


def _normalised(text: str) -> str:
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).casefold()
    text = _THOUSANDS.sub("", text.replace("\u2212", "-"))
    text = _FRACTION.sub(r"\\frac", _DIGIT_FRACTION.sub(r"\\frac{\1}{\2}", text))
    return _FORMATTING.sub(" ", text)
