"""Scoring files: a run's numbers, interruptions, hanging rows, real generations."""

import io
import json
import sys
import tracemalloc
from types import SimpleNamespace

import pytest

from stable_opd_mcore.commands.score import grading_files
from stable_opd_mcore.commands.score.grading_files import (
    FileGradingSettings,
    default_output,
    grade_files,
)
from stable_opd_mcore.commands.score.grading_rows import Columns, find_columns, parse_row
from stable_opd_mcore.data.responses import rollout_metrics
from stable_opd_mcore.data.rollout_files import write_rollouts
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.records import Prompt, Rollout
from tests.command import exit_code
from tests.commands.check.directories import write_model
from tests.real_data import real_data

DASH = "\N{EN DASH}"
BRACKET = {"answer_format": "bracket", "prompt_token_ids": [1], "gold": "3"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records(output):
    return [json.loads(line) for line in (output / "verdicts.jsonl").read_text().splitlines()]


def grade_file(path, output, settings):
    return grade_files([path], output, settings)


def settings_of(output):
    return json.loads((output / "summary.json").read_text())["settings"]


def run_rollouts():
    texts = ["1+2=3;[3]", "so [4]", "[3] or not", "loop " * 40, ""]
    ids = [tuple(range(n)) for n in (3, 5, 40)] + [(7,) * 48, ()]
    reasons = ["stop", "stop", "length", "length", "abort"]
    gold = Prompt("p", "1+2", (1,), "3", answer_format="bracket")
    return [
        Rollout(gold, k, tokens, (-0.5,) * len(tokens), reason, 0, text)
        for k, (text, tokens, reason) in enumerate(zip(texts, ids, reasons, strict=True))
    ]


def test_the_numbers_of_a_run_s_rollouts_are_the_run_s(tmp_path):
    with Grader() as grader:
        rollouts = grader.grade_rollouts(run_rollouts())
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    expected = rollout_metrics(rollouts, 48, "all").values_by_key()
    settings = FileGradingSettings(max_length=48)
    summary = grade_file(tmp_path / "rollouts.jsonl", tmp_path / "out", settings)
    numbers = {f"all/{name}": value for name, value in summary["all"]["numbers"].items()}
    undefined = {"all/repetition_rate_10k": None}  # each response is shorter; a run counts "no"
    assert numbers == expected | undefined
    assert expected["all/accuracy"] == 0.2
    assert expected["all/loop_rate"] == expected["all/repetition_rate"] == 0.2
    assert summary["unit"] == "tokens"
    assert json.loads((tmp_path / "out/summary.json").read_text())["all"]["num_responses"] == 5
    assert [record["reward"] for record in records(tmp_path / "out")] == [1, 0, 0, 0, 0]


def test_a_budget_of_tokens_sets_the_tail_as_in_a_run_and_one_of_characters_does_not(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "ab" * 60, "token_ids": [1, 2] * 20}])
    grade_file(path, tmp_path / "out", FileGradingSettings(max_length=40))
    header = settings_of(tmp_path / "out")
    assert (header["tail_characters"], header["ratio"], header["unit"]) == (32, 2.0, "tokens")
    (record,) = records(tmp_path / "out")
    assert (record["finish_reason"], record["loop"]) == ("length", {"length": 40, "period": 2})
    found = grade_file(path, tmp_path / "c", FileGradingSettings(Columns(tokens="none"), None, 200))
    numbers = found["all"]["numbers"]
    assert (found["unit"], numbers["truncation_rate"]) == ("characters", 0.0)
    assert numbers["response_length_mean"] == 120
    header = settings_of(tmp_path / "c")
    assert (header["tail_characters"], header["ratio"]) == (10_000, 10.0)
    path = write(tmp_path / "plain.jsonl", [{"text": "1+2=3;"}])
    found = grade_file(path, tmp_path / "t", FileGradingSettings(tokenizer="synthetic"))
    assert (found["unit"], found["all"]["numbers"]["response_length_mean"]) == ("tokens", 6)


def test_half_a_character_is_measured_as_a_whole_one(tmp_path):
    texts = ("ok", "half \ud83d", "end")
    path = write(tmp_path / "rows.jsonl", [{"text": each, "id": each} for each in texts])
    tokenizer = write_model(tmp_path / "model")  # its tokens are bytes
    found = grade_file(path, tmp_path / "out", FileGradingSettings(tokenizer=tokenizer))
    assert (found["num_rows"], found["num_refused"]) == (3, 0)
    written = records(tmp_path / "out")
    assert [record["length"] for record in written] == [2, 6, 3]
    assert written[1]["id"] == "half ?"  # strict readers of JSON refuse half an emoji
    rows = [{"text": "ok", "token_ids": [5]}, {"text": "four", "token_ids": None}]
    write(path, rows)
    assert grade_file(path, tmp_path / "out", FileGradingSettings())["num_refused"] == 1
    grade_file(path, tmp_path / "out", FileGradingSettings(tokenizer=tokenizer))
    assert [record["length"] for record in records(tmp_path / "out")] == [1, 4]


def test_refused_rows_and_groups_are_counted_and_an_interrupted_run_leaves_earlier_files(
    tmp_path, monkeypatch
):
    rows = [{"id": k, "response": f"is [{k % 5}]", **BRACKET, "kind": k % 2} for k in range(40)]
    path = write(tmp_path / "rows.jsonl", [*rows[:20], {"response": 5}, *rows[20:]])
    settings = FileGradingSettings(Columns(group="kind"))
    summary = grade_file(path, tmp_path / "out", settings)
    assert (summary["num_rows"], summary["num_refused"]) == (41, 1)
    assert summary["refused"].keys() == {"21"}
    assert summary["all"]["numbers"]["accuracy"] == 0.2
    groups = {name: group["num_responses"] for name, group in summary["groups"].items()}
    assert groups == {"0": 20, "1": 20}
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

    def interrupted(line, columns, **options):
        if b'"id": 30' in line:
            raise KeyboardInterrupt
        return parse_row(line, columns, **options)

    monkeypatch.setattr(grading_files, "parse_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grade_file(path, tmp_path / "out", FileGradingSettings(ratio=3))
    assert before.keys() == {"verdicts.jsonl", "summary.json"}
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_several_files_and_standard_input_are_scored_together(tmp_path, monkeypatch):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    write(paths[0], [{"response": "is [3]", **BRACKET}] * 2)
    piped = b"\xef\xbb\xbf" + json.dumps({"response": "is [4]", **BRACKET}).encode() + b"\n[]\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(piped)))
    summary = grade_files(
        [grading_files.STANDARD_INPUT, paths[0]], tmp_path / "out", FileGradingSettings()
    )
    accuracy = {name: one["numbers"]["accuracy"] for name, one in summary["groups"].items()}
    assert accuracy == {str(paths[0]): 1, "standard input": 0}
    assert summary["refused"] == {"standard input:2": "not a JSON object but list"}
    assert [r["row"] for r in records(tmp_path / "out")] == [1, 2, 1, 2]
    assert default_output([grading_files.STANDARD_INPUT]).name == "stdin.score"
    with pytest.raises(UserError, match="2 files and no --output"):
        default_output(paths)


def test_a_loop_that_its_budget_cuts_is_not_right_without_a_word(tmp_path):
    rows = [
        {"response": text, "finish_reason": reason, **BRACKET}
        for text, reason in (("[3]" * 40, "stop"), ("[3]" * 40, "length"), ("so [3]", "length"))
    ]
    for row in rows[1:]:
        row["answer_format"], row["response"] = "boxed", row["response"].replace("[3]", "is $3$ ")
    path = write(tmp_path / "rows.jsonl", rows)
    summary = grade_file(path, tmp_path / "out", FileGradingSettings())
    assert summary["all"]["numbers"]["accuracy"] == 1
    assert [r["right_in_loop"] for r in records(tmp_path / "out")] == [False, True, False]
    assert summary["right_in_loop"] == {"2": None}


def test_what_cannot_be_scored_is_refused(tmp_path):
    """tests/test_cli_files.py has more."""
    for ratio in (float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"--ratio .*: expected a number above 1"):
            FileGradingSettings(ratio=ratio)
    with pytest.raises(DataError, match="a directory; give a file of JSON Lines"):
        grade_file(tmp_path, tmp_path / "out", FileGradingSettings())
    own, empty = write(tmp_path / "own.jsonl", [{"response": "x"}]), write(tmp_path / "empty", [])
    same = tmp_path / ".." / tmp_path.name / own.name
    for second, words in ((empty, "empty: empty; give a file"), (same, "is given twice")):
        with pytest.raises(DataError, match=words):
            grade_files([own, second], tmp_path / "out", FileGradingSettings())


@pytest.mark.parametrize(
    ("golds", "differ"),
    [
        ({"answer": "0", "ground_truth": "1"}, True),
        ({"answer": None, "ground_truth": "1"}, True),
        ({"answer": "so 2/2\n#### 1,000", "ground_truth": 1000.0}, False),
        ({"answer": "$1$", "reward_model": {"ground_truth": "1"}, "target": None}, False),
        ({"answer": "0", "gold": "1"}, False),  # a column gold is certain
    ],
)
def test_two_columns_with_different_golds_are_refused_in_any_row(tmp_path, golds, differ):
    first = dict.fromkeys(golds) | {"response": "x", "answer": ""}
    path = write(tmp_path / "rows.jsonl", [first, {"response": "x"} | golds])
    columns = find_columns(path.read_bytes().splitlines(), "rows", Columns())
    rows = [(str(path), iter(path.read_bytes().splitlines()))]
    settings = FileGradingSettings(columns)
    if differ:
        with pytest.raises(DataError, match=r"rows.jsonl:2: column answer is .* --gold answer or"):
            list(grading_files._measured_rows(rows, settings))
    else:
        assert len(list(grading_files._measured_rows(rows, settings))) == 2
    named = find_columns(path.read_bytes().splitlines(), "rows", Columns(gold="answer"))
    assert (named.gold, named.other_golds) == ("answer", ())


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for count in (200, 2000):
        rows = ({"id": k, "response": "abcd" * 500 + f"[{k}]", **BRACKET} for k in range(count))
        path = write(tmp_path / f"{count}.jsonl", rows)
        tracemalloc.start()
        grade_file(path, tmp_path / str(count), FileGradingSettings(Columns(group="answer_format")))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 1_000_000  # the file grew by 4 MB


def test_the_command_prints_a_table_and_says_where_the_verdicts_are(tmp_path, monkeypatch, capsys):
    rows = [BRACKET | {"answer": "2", "output": f"[{k}]"} for k in range(4)]
    path = write(tmp_path / "rows.jsonl", [*rows, {"output": None, "answer": "2"}])
    assert exit_code(monkeypatch, "score", path, "--gold", "answer") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split()[:7] == ["all", "4", "0.250", DASH, "0.000", "0.000", DASH]
    assert "columns: response from output, gold from answer" in out
    assert out[-3:] == [
        "1 of 5 rows refused",
        "  row 5: column output is None: Input should be a valid string",
        f"wrote {path}.score",
    ]
    assert exit_code(monkeypatch, "score", path, "--response", "said") == 2


# Our verdict differs from the upstream label in these rows; docs/evidence/grading.md says why.
MATH, MINERVA = ("math500-20",), (100, 161, 252, 30, 56, 67, 71)
DIFFERING = {*MATH, *(f"minerva_math-{number}" for number in MINERVA)}


def test_real_generations_get_the_upstream_labels_but_for_known_rows(tmp_path):
    """Every fourth row and the known ones; `stable-opd score` on all: docs/evidence/grading.md."""
    generations = real_data("generations/qwen2.5-math-7b-base_greedy.jsonl").read_text()
    rows = [json.loads(line) for line in generations.splitlines()]
    path = write(
        tmp_path / "rows.jsonl",
        (row for k, row in enumerate(rows) if k % 4 == 0 or row["id"] in DIFFERING),
    )
    summary = grade_file(path, tmp_path / "out", FileGradingSettings())
    labels = {row["id"]: row["correct"] for row in rows}
    found = {record["id"]: record["reward"] == 1 for record in records(tmp_path / "out")}
    assert {name for name, is_right in found.items() if is_right != labels[name]} == DIFFERING
    assert len(found) > 80
    assert (summary["all"]["numbers"]["grading_timeouts"], summary["num_refused"]) == (0, 0)
