"""Untrusted text for a terminal, a page or a message, without characters that control them."""

import unicodedata
from collections.abc import Collection, Iterator
from pathlib import Path


def printable(text: str, characters: int | None = None) -> str:
    """`text` with visible control characters; line ends and tabs stay.

    A text of more than `characters` characters is cut, with an ellipsis at its end. ASCII control
    characters become their Unicode pictures. Direction overrides, lone surrogates and unassigned
    characters become the replacement character.
    """
    if characters is not None and len(text) > characters:
        text = text[:characters] + "\N{HORIZONTAL ELLIPSIS}"
    if text.isascii() and text.isprintable():
        return text
    return text.translate({ord(c): _printable_character(c) for c in set(text)})


def printable_line(text: str, characters: int) -> str:
    """`text` on one line, with at most this many characters; a cut one ends in an ellipsis."""
    line = printable(text[: characters + 1]).replace("\n", "\N{SYMBOL FOR NEWLINE}")
    line = line.replace("\t", " ")
    return line if len(line) <= characters else line[: characters - 1] + "\N{HORIZONTAL ELLIPSIS}"


def shortest_end(path: Path, paths: Collection[Path]) -> str:
    """The shortest end of `path` that no other of the paths has; all of it if there is none."""
    ends: Iterator[tuple[str, ...]] = (path.parts[-n:] for n in range(1, len(path.parts) + 1))
    differing = (
        "/".join(end)
        for end in ends
        if sum(other.parts[-len(end) :] == end for other in paths) == 1
    )
    return next(differing, str(path))


def _printable_character(character: str) -> str:
    if character in "\n\t" or character.isprintable():
        return character
    category = unicodedata.category(character)
    if category == "Cc":
        return (
            chr(0x2400 + ord(character)) if ord(character) < 0x20 else "\N{REPLACEMENT CHARACTER}"
        )
    return "\N{REPLACEMENT CHARACTER}" if category in ("Cf", "Cs", "Cn", "Co") else " "
