"""Reading rows, and the errors for bad input."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stable_opd_mcore.config.data import ColumnsConfig, SourceConfig
from stable_opd_mcore.data import sources
from stable_opd_mcore.data.sources import load_rows, read_file, read_records
from stable_opd_mcore.errors import DataError
from tests.hub_server import COMMIT, hub_server
from tests.real_data import real_data

GSM8K = ColumnsConfig(problem="question", answer="answer", solution="answer")
RECORDS = [
    {"problem": "1+1?", "answer": "2", "solution": "Two."},
    {"problem": "Half of 1?", "answer": 0.5, "solution": "One half."},
    {"problem": "Roots?", "answer": ["1", "-1"], "solution": None},
]


def jsonl(path, lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def load(path, **changes):
    return load_rows(SourceConfig(path=str(path), **changes))


def test_jsonl(tmp_path):
    rows = load(jsonl(tmp_path / "a.jsonl", [RECORDS[0], "", *RECORDS[1:]]))
    assert [row.row_id for row in rows] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4"]
    assert [row.answer for row in rows] == ["2", "0.5", "1, -1"]
    assert [row.solution for row in rows] == ["Two.", "One half.", None]
    assert all(row.answer_format == "boxed" for row in rows)


def test_parquet_and_datasets_directories_give_the_same_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([{**r, "answer": str(r["answer"])} for r in RECORDS])
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"test": dataset}).save_to_disk(tmp_path / "splits")
    expected = [(r["problem"], str(r["answer"]), r["solution"]) for r in RECORDS]
    for name, split in (("a.parquet", "train"), ("plain", "train"), ("splits", "test")):
        rows = load(tmp_path / name, split=split)
        assert [(row.problem, row.answer, row.solution) for row in rows] == expected
    assert rows[0].row_id == "splits/test:0"
    assert len(load(tmp_path / "a.parquet", limit=2)) == 2
    with pytest.raises(DataError, match=r"splits: no split 'train'"):
        load(tmp_path / "splits")
    for name in ("plain", "a.parquet"):
        assert len(load(tmp_path / name, split="test")) == 3
        with pytest.raises(DataError, match=r"no splits in it, so no 'train\[:2\]'; drop data"):
            load(tmp_path / name, split="train[:2]")
    jsonl(tmp_path / "plain" / "more.jsonl", RECORDS)
    with pytest.raises(DataError, match=r"plain: more\.jsonl would not be read"):
        load(tmp_path / "plain")


@pytest.mark.parametrize(
    ("names", "readme", "refused"),
    [
        ("a.jsonl b.csv", "", r"b\.csv would not be read"),
        ("a.jsonl b.csv.gz", "", r"b\.csv\.gz would"),
        ("a.jsonl b.JSONL", "", r"b\.JSONL would"),
        ("a.jsonl b.jsonl.incomplete", "", r"b\.jsonl\.incomplete: an unfinished download"),
        ("a.jsonl b.parquet.part", "", r"b\.parquet\.part: an unfinished"),
        ("train.jsonl b.jsonl c.jsonl d.jsonl e.jsonl", "", r"b\..*, d\.jsonl and 1 more would"),
        ("train/a.jsonl extra/b.jsonl", "", r"extra/b\.jsonl would"),
        (
            "a.jsonl b.jsonl",
            "---\nconfigs:\n- {config_name: c, data_files: a.jsonl}\n---",
            "b.jsonl",
        ),
        ("train-00000-of-00003.jsonl train-00002-of-00003.jsonl", "", r"train-\*-of.*number 1 is"),
        ("train-1-of-3.jsonl train-3-of-3.jsonl", "", "number 2 is missing"),
        ("train.jsonl test-00001-of-00002.jsonl config.json .c/b.jsonl dataset_infos.json", "", ""),
        ("a-1-of-2.jsonl a-2-of-2.jsonl", "", ""),
        (
            "one/train.jsonl two/train.jsonl",
            "---\nconfigs:\n"
            "- {config_name: one, data_files: one/*.jsonl}\n"
            "- {config_name: two, data_files: two/*.jsonl}\n"
            "- {config_name: three, data_files: not_downloaded/*.jsonl}\n---",
            "",
        ),
    ],
)
def test_no_file_of_a_folder_is_passed_over(tmp_path, names, readme, refused):
    pytest.importorskip("datasets")
    text = '{"problem": "1+1", "answer": "2"}\n'
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}" if name == "dataset_infos.json" else text)
    (tmp_path / "README.md").write_text(readme)
    options = {"configuration": "one"} if "one" in readme else {}
    if not refused:
        assert {row.answer for row in load(tmp_path, options=options)} == {"2"}
        return
    with pytest.raises(DataError, match=refused):
        load(tmp_path, options=options)
    first, *others = names.split()
    load(tmp_path / first)  # data.*.path=FILE
    (tmp_path / first).rename(tmp_path / "all.jsonl")
    (tmp_path / "README.md").write_text("")
    for other in others:
        (tmp_path / other).unlink()
    load(tmp_path)


@pytest.mark.parametrize("name", ["input", "system", "system_prompt"])
def test_a_part_of_the_prompt_in_a_column_of_its_own_is_refused(tmp_path, name):
    record = {"instruction": "Add.", "answer": "2"}
    names = ColumnsConfig(problem="instruction")
    for value in ("", None, 3):
        load(jsonl(tmp_path / "a.jsonl", [{**record, name: value}]), columns=names)
    path = jsonl(tmp_path / "a.jsonl", [record, {**record, name: "Think."}])
    with pytest.raises(DataError, match=rf"a\.jsonl:2: column '{name}' has a text \('Think\.'\)"):
        load(path, columns=names)


def test_a_conversations_system_message_may_be_in_a_column_of_its_own(tmp_path):
    system, ask = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}
    names, record = ColumnsConfig(messages="m", answer=None), {"m": [ask], "solution": "2"}
    rows = [{**record, name: "Add."} for name in ("system", "system_prompt")]
    rows += [{**record, "m": [system, ask], "system": "Think."}, {**record, "system": " "}]
    assert [row.messages for row in load(jsonl(tmp_path / "a.jsonl", rows), columns=names)] == [
        *[(system, ask)] * 3,
        (ask,),
    ]
    path = jsonl(tmp_path / "a.jsonl", [{**record, "system": "Add.", "system_prompt": "Think."}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: column 'system' has a text \('Add\.'\)"):
        load(path, columns=names)


@pytest.mark.parametrize("columns", [{"messages": "m"}, {"problem": "p"}])
def test_rows_with_images_are_refused(tmp_path, columns):
    record = {"m": [{"role": "user", "content": "Find x."}], "p": "Find x.", "answer": "2"}
    none = {"image": None, "images": [None], "video": "", "audio": {"bytes": None, "path": None}}
    load(jsonl(tmp_path / "a.jsonl", [record | none]), columns=ColumnsConfig(**columns))
    for some in (
        {"images": ["a.png"]},
        {"image": {"bytes": "x", "path": None}},
        {"video": "a.mp4"},
    ):
        path = jsonl(tmp_path / "a.jsonl", [record | none, record | some])
        (name,) = some
        with pytest.raises(DataError, match=rf"a\.jsonl:2: column '{name}' holds .* text only"):
            load(path, columns=ColumnsConfig(**columns))


@pytest.mark.parametrize(
    ("written", "answer"),
    [("1,200", "1200"), ("-$1,234,567.5", "-$1234567.5"), ("1,2000", "1,2000")],
)
def test_gsm8k_answers_are_extracted_and_boxed(tmp_path, written, answer):
    text = f"He runs 3*400=<<3*400=1200>>1200 meters.\n#### {written}"
    (row,) = load(
        jsonl(tmp_path / "g.jsonl", [{"question": "Far?", "answer": text}]), columns=GSM8K
    )
    assert row.answer == answer
    assert row.solution == f"He runs 3*400=1200 meters.\nThe answer is \\boxed{{{answer}}}."


@pytest.mark.parametrize(
    ("ending", "answer"),
    [
        ("#### (3,4)", "(3,4)"),
        ("#### 1, 2, 3", "1, 2, 3"),
        (r"#### \boxed{1}", r"\boxed{1}"),
        ("#### Final answer: **2**", "Final answer: **2**"),
        ("It runs `cout << a << b >> c;`.", None),
        (r"It is \boxed{2}.", None),
    ],
)
@pytest.mark.parametrize("column", ["answer", "messages"])
def test_solutions_are_left_as_they_are_unless_all_have_gsm8k_s_form(
    tmp_path, ending, answer, column
):
    texts = ["Two.\n#### 2", f"<think>\nHm <<1>>.\n</think>\n{ending}"]
    turns = [
        [{"role": r, "content": c} for r, c in (("user", "?"), ("assistant", t))] for t in texts
    ]
    records = [
        {"question": "?", "answer": t, "turns": m} for t, m in zip(texts, turns, strict=True)
    ]
    columns = {"answer": GSM8K, "messages": ColumnsConfig(messages="turns", answer="answer")}[
        column
    ]
    rows = load(jsonl(tmp_path / "g.jsonl", records), columns=columns)
    assert [row.solution for row in rows] == texts
    assert [row.answer for row in rows] == ["2", answer or texts[1]]
    (first,) = load(tmp_path / "g.jsonl", columns=columns, limit=1)
    assert first.solution == "Two.\nThe answer is \\boxed{2}."


def test_real_gsm8k():
    rows = load(real_data("gsm8k/test.jsonl"), columns=GSM8K)
    assert len(rows) == 1319
    assert rows[0].answer == "18"
    for row in rows:
        assert row.solution.endswith(f"\\boxed{{{row.answer}}}.")
        assert "<<" not in row.solution
        assert "####" not in row.solution


def test_dotted_columns_reach_into_nested_values(tmp_path):
    # The layout of Elliott/Openr1-Math-46k-8192.
    record = {
        "data_source": "openr1",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}],
        "target": [{"role": "assistant", "content": "<think>\n</think>\n2"}],
        "reward_model": {"ground_truth": "2"},
    }
    columns = ColumnsConfig(
        problem="prompt.1.content",
        answer="reward_model.ground_truth",
        solution="target.0.content",
    )
    (row,) = load(jsonl(tmp_path / "p.jsonl", [record]), columns=columns)
    assert (row.problem, row.answer, row.solution) == ("1+1?", "2", "<think>\n</think>\n2")


GOOD = json.dumps(RECORDS[0])


BAD_ROWS = [
    ([GOOD, '{"problem": "cut'], r"bad\.jsonl:2: not valid JSON"),
    ([GOOD, "", "[1, 2]"], r"bad\.jsonl:3: a JSON list, not an object"),
    (['{"problem": "x", "answer": null}'], r":1: column 'answer' \(answer\) is empty"),
    (['{"problem": "x", "answer": []}'], r":1: column 'answer' \(answer\) is empty"),
    (['{"problem": "", "answer": "1"}'], r":1: column 'problem' \(problem\) is empty"),
    (['{"problem": ["x"], "answer": "1"}'], r"column 'problem' \(problem\) holds list"),
    (['{"problem": "x", "answer": {"a": 1}}'], r"column 'answer' \(answer\) holds dict"),
    (['{"problem": "x", "answer": true}'], r"column 'answer' \(answer\) holds bool"),
    (['{"problem": "x", "answer": false}'], r"column 'answer' \(answer\) holds bool"),
    (['{"problem": "x", "answer": NaN}'], r":1: column 'answer' \(answer\) is nan"),
    (['{"problem": "x", "answer": -Infinity}'], r":1: column 'answer' \(answer\) is -inf"),
    (['{"problem": "x", "answer": [1, 1e999]}'], r":1: column 'answer' \(answer\) is inf"),
    (["[" * 100_000], r"bad\.jsonl:1: not valid JSON: maximum recursion"),
    (["\x00\x01\x7fELF"], r"bad\.jsonl:1: not valid JSON"),
    (['{"problem": "x", "answer": "1", "solution": 2}'], None),
]  # lines, message


def test_bad_rows_are_named(tmp_path):
    for lines, message in BAD_ROWS:
        path = jsonl(tmp_path / "bad.jsonl", lines)
        if message is None:
            assert load(path)[0].solution == "2"
            continue
        with pytest.raises(DataError, match=message):
            load(path)


def test_tables_add_no_arguments_to_tool_calls(tmp_path):
    """Arrow gives each object the keys of all others in its column."""
    datasets = pytest.importorskip("datasets")
    calls = [("weather", {"city": "Paris", "days": [{"n": 1}]}), ("add", {"a": 1, "b": {"c": 2}})]
    records = [
        {"m": [{"role": "assistant", "tool_calls": [{"function": {"name": n, "arguments": a}}]}]}
        for n, a in calls
    ]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "folder")
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "t.parquet")
    for name in ("t.parquet", "folder"):
        rows = [record for _, record in read_records(SourceConfig(path=str(tmp_path / name)))]
        found = [row["m"][0]["tool_calls"][0]["function"] for row in rows]
        assert [(each["name"], each["arguments"]) for each in found] == calls


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_floats_of_tables_keep_their_digits(tmp_path, kind):
    floats = pa.array(np.array([0.1, -2.5, 0.0], kind))
    lists = pa.ListArray.from_arrays([0, 2, 3, 3], floats)
    table = pa.table({"problem": ["a", "b", "c"], "answer": floats, "list": lists})
    pq.write_table(table, tmp_path / "train.parquet")
    for path in (tmp_path / "train.parquet", tmp_path):
        rows = load_rows(SourceConfig(path=str(path)), with_columns=True)
        assert [row.answer for row in rows] == ["0.1", "-2.5", "0.0"]
        assert [(row.columns or {})["list"] for row in rows] == [[0.1, -2.5], [0.0], []]


def test_only_the_needed_columns_of_parquet_are_read_with_their_own_types(tmp_path):
    table = pa.table(
        {"a": list(range(150)), "big": ["x"] * 150, "n": [{"m": i} for i in range(150)]}
    )
    # A file's own word for `datasets` would make it open the images that these texts name.
    stored = json.dumps({"info": {"features": {"a": {"_type": "Image"}}}})
    table = table.replace_schema_metadata({"huggingface": stored})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=70)
    rows = list(read_file(tmp_path / "t.parquet", ["a", "n.m", "absent"]))
    assert rows == [(i, {"a": i, "n": {"m": i}}) for i in range(150)]


def test_lines_are_numbered_and_have_a_limit(tmp_path, monkeypatch):
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n\n{"a": "\x85 \u2028"}')
    assert list(read_file(tmp_path / "t.jsonl")) == [(1, {"a": 1}), (3, {"a": "\x85 \u2028"})]
    monkeypatch.setattr(sources, "_MAX_LINE_BYTES", 16)
    (tmp_path / "g.jsonl").write_bytes(b"x" * 64)
    with pytest.raises(DataError, match=r"g\.jsonl:1: a line over 64 MiB"):
        next(read_file(tmp_path / "g.jsonl"))


def test_hub_data_are_those_of_their_commit(tmp_path):
    card = b"---\nconfigs:\n- config_name: default\n  data_files: rows.jsonl\n---\n"
    files = {"README.md": card, "rows.jsonl": b'{"problem": "1+1", "answer": "2"}\n'}
    code = """
import sys
from stable_opd_mcore.config.data import SourceConfig
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.errors import DataError

for revision in sys.argv[1:]:
    try:
        print(load_rows(SourceConfig(path="me/rows", options={"revision": revision}))[0].answer)
    except DataError as error:
        print(error)
"""

    def read(*revisions: str, **where: str) -> list[str]:
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", **where}
        command = [sys.executable, "-c", code, *revisions]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    with hub_server({"datasets/me/rows": files}) as (url, _):
        # datasets itself takes what its cache has, at whatever commit
        answer, refusal = read(COMMIT, "1" * 40, HF_ENDPOINT=url)
        assert answer == "2"
        wanted = rf"me/rows: commit 1{{40}} cannot be downloaded, and the cache has {COMMIT}; "
        assert re.match(wanted, refusal)
    assert read(COMMIT, HF_HUB_OFFLINE="1") == ["2"]


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "thrift.parquet").write_bytes(b"PAR1" + b"\xff" * 40 + b"\x20\0\0\0PAR1")
    with pytest.raises(DataError, match=r"thrift\.parquet: not readable as parquet"):
        load(tmp_path / "thrift.parquet")
    (tmp_path / "latin.jsonl").write_bytes('{"problem": "é", "answer": "1"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl:1: .*UTF-8"):
        load(tmp_path / "latin.jsonl")
