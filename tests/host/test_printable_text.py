"""Control characters, direction overrides and lone surrogates become visible; lines are cut."""

from pathlib import Path

from stable_opd_mcore.host.printable_text import printable, printable_line, shortest_end


def test_what_cannot_be_printed_is_made_visible():
    assert printable("a\x00\x1b\u202e\ud83d\n\té\r\x85") == "a␀␛��\n\té␍�"


def test_a_line_is_short_and_holds_no_line_end():
    assert printable_line("a\x1b[2J\u202eb\n\t", 60) == "a␛[2J�b␤ "
    assert printable_line("x" * 60, 60) == "x" * 60
    assert printable_line("x" * 61, 60) == "x" * 59 + "…"


def test_a_path_is_named_by_its_shortest_end_that_no_other_has():
    paths = [Path(each) for each in ("x/a/f", "x/b/f", "x/b/g", "f")]
    assert [shortest_end(path, paths) for path in paths] == ["a/f", "b/f", "g", "f"]
