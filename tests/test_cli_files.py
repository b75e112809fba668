"""Commands without a model: what they refuse ends them with one line, and its remedy is one."""

import json
import re

import pytest

from tests.command import exit_code
from tests.commands.report.make_run import make_run
from tests.config.test_load import SMOKE


@pytest.mark.parametrize("output", ["", "run/metrics.jsonl/report.html"])
def test_a_path_that_cannot_be_written_ends_with_one_line(tmp_path, monkeypatch, capsys, output):
    run = make_run(tmp_path / "run", 2)
    assert exit_code(monkeypatch, "report", run, "--output", tmp_path / output) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {tmp_path}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


ONE = "--gpus-per-node 1"
PLAN = f"plan {{smoke}} {ONE}"
PLACED = f"topology {{smoke}} {ONE} --gpu cpu"
REFUSED = [  # a command line, words of its refusal, and what follows each remedy
    (
        "report run --output page --follow",
        "with --follow, which writes no file; leave one out",
        ["report run --output page"],
    ),
    ("report run --port 9", "without --follow: .*; leave it out", ["report run"]),
    (
        "score rows.jsonl more.jsonl",
        "no --output; give the directory of their verdicts",
        ["score rows.jsonl more.jsonl --output out"],
    ),
    ("score rows.jsonl --ratio 1", "expected a number above 1", ["score rows.jsonl --ratio 10"]),
    ("score none.jsonl", "no such file.*; give a", ["score rows.jsonl"]),
    ("score kept", "no row is a JSON object; give a file of JSON Lines", ["score rows.jsonl"]),
    (
        "score rows.jsonl more.jsonl rows.jsonl --output out",
        "would count twice; drop one",
        ["score rows.jsonl more.jsonl --output out"],
    ),
    (
        "score verdicts.jsonl --output .",
        "replaced by its own verdicts; give another --output",
        ["score verdicts.jsonl --output out"],
    ),
    ("score said.jsonl", "name the response's with --resp", ["score said.jsonl --response said"]),
    ("score rows.jsonl --id name", "no column name; give --id one of", ["score rows.jsonl --id n"]),
    (
        "score golds.jsonl",
        "expected one gold answer; name its column with --gold answer or --gold ground_truth",
        ["score golds.jsonl --gold answer", "score golds.jsonl --gold ground_truth"],
    ),
    (f"{PLAN} --teacher-prompt-tokens 9", "set one, or leave this option out", [
        PLAN, f"{PLAN} --teacher-prompt-tokens 9 teacher.prompt='{{{{problem}}}}'"
    ]),
    (f"plan {{smoke}} {ONE} --gpu h99", "unknown; expected one of h100, h200", [PLAN]),
    (f"{PLAN} parallel.tensor=2", "does not divide 1 trainer GPU.*lower one", [PLAN]),
    (f"{PLACED} --hosts a,b", "but the run has 1: name each of its nodes", [f"{PLACED} --hosts a"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words", "remedies"), REFUSED)
def test_a_command_that_follows_the_remedy_runs(
    tmp_path, monkeypatch, capsys, line, words, remedies
):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", 2)
    (tmp_path / "kept").write_text("notes\n")
    for name, row in (
        ("rows", {"n": 1, "response": "2"}),
        ("more", {"n": 2, "response": "2"}),
        ("verdicts", {"response": "2"}),
        ("said", {"said": "2"}),
        ("golds", {"response": "2", "answer": "2", "ground_truth": "3"}),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))

    def code(line):
        return exit_code(monkeypatch, *line.replace("{smoke}", str(SMOKE)).split())

    assert code(line) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert re.search(words, said), said
    for remedy in remedies:
        assert code(remedy) == 0, (remedy, capsys.readouterr().err)
