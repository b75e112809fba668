"""Commands without a model: a file that cannot be written ends them with one line."""

import pytest

from tests.command import exit_code
from tests.commands.report.make_run import make_run


@pytest.mark.parametrize("output", ["", "run/metrics.jsonl/report.html"])
def test_a_path_that_cannot_be_written_ends_with_one_line(tmp_path, monkeypatch, capsys, output):
    run = make_run(tmp_path / "run", 2)
    assert exit_code(monkeypatch, "report", run, "--output", tmp_path / output) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {tmp_path}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_prepare_says_that_it_needs_no_processes(tmp_path, monkeypatch, capsys):
    """The option of an earlier release."""
    assert exit_code(monkeypatch, "prepare", tmp_path / "none", "--processes", "2") == 2
    assert capsys.readouterr().out.startswith("--processes has no effect any more")
