"""The report as text; what other people's files contain is shown, not obeyed."""

from stable_opd_mcore.commands.check.finding import Finding, refused
from stable_opd_mcore.commands.check.printing import Report
from stable_opd_mcore.errors import DataError

NOTE = Finding("note", "tokens", "a note", (("student", "1"), ("teacher", "2")), "little", "none")
ERROR = refused("files", DataError("a.json: not valid JSON"))


def test_errors_come_first_and_the_verdict_last():
    report = Report((NOTE, ERROR), ("student  a",), (("student", "[bold]x"), ("teacher", "y")))
    text = report.text()
    assert text.index("student  a") < text.index("[bold]x") < text.index("ERROR  files: a.json")
    assert text.index("ERROR") < text.index("NOTE  tokens: a note\n    student: 1\n    teacher: 2")
    assert text.endswith("1 error, 1 note")
    assert Report(()).text() == "no finding"
    assert report.errors == (ERROR,)


def test_control_characters_become_visible():
    hostile = Report((), (), (("student", "\x1b]0;owned\x07" + "x" * 10**6), ("teacher", "")))
    text = hostile.text()
    assert "\x1b" not in text
    assert len(text) < 10_000
