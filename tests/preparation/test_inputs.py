"""Finding, checking and loading the files of a source."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.preparation import inputs
from stable_opd_mcore.preparation.inputs import find_files, lines_of, load_file, open_input


def test_only_the_needed_columns_of_parquet_are_loaded_with_their_own_types(tmp_path):
    table = pa.table(
        {"a": list(range(150)), "big": ["x"] * 150, "n": [{"m": i} for i in range(150)]}
    )
    # A file's own word for `datasets` would make it open the images that these texts name.
    stored = json.dumps({"info": {"features": {"a": {"_type": "Image"}}}})
    table = table.replace_schema_metadata({"huggingface": stored})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=70)
    file = open_input(tmp_path / "t.parquet", "t", ["a", "n.m"])
    rows = load_file(file, ["a", "n.m"], tmp_path / "cache")
    assert list(rows) == [{"a": i, "n": {"m": i}} for i in range(150)]


def test_lines_are_numbered_and_blank_ones_left_out(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n\n{"a": "\x85 \u2028"}')
    file = open_input(tmp_path / "t.jsonl", "t", ["a"])
    rows = list(load_file(file, ["a"], tmp_path / "cache"))
    assert rows == list(lines_of(tmp_path / "t.jsonl"))
    assert [row["number"] for row in rows] == [1, 3]


def test_bad_files_are_named(tmp_path, monkeypatch):
    def refuses(name, content, message):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_input(tmp_path / name, name, ["a"])

    refuses("a.parquet", b"PAR1 not really", r"a\.parquet: not a readable parquet file")
    refuses("b.jsonl", b"", r"b\.jsonl: no rows in it")
    refuses("c.jsonl", b'{"b": 1}\n', r"c\.jsonl: no column 'a'; it has b\. .*--problem")
    refuses("d.jsonl", b'\n{"a"', r"d\.jsonl:2: not a JSON value")
    refuses("e.jsonl", b"[2]\n", r"e\.jsonl:1: a JSON list")
    pq.write_table(pa.table({"b": [1]}), tmp_path / "f.parquet")
    refuses("f.parquet", (tmp_path / "f.parquet").read_bytes(), r"f\.parquet: no column 'a'")
    monkeypatch.setattr(inputs, "_MAX_LINE_BYTES", 16)
    refuses("g.jsonl", b"x" * 64, r"g\.jsonl:1: more than 64 MiB in a line")


def test_the_first_matching_glob_names_the_files(tmp_path):
    for name in ("data/train-1.parquet", "data/train-0.parquet", "all/x.parquet", "y.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = find_files(tmp_path, ("data/train-*.parquet", "*.jsonl"))
    assert [path.name for path in found] == ["train-0.parquet", "train-1.parquet"]
    assert find_files(tmp_path, ("*.parquet", "*.jsonl")) == [tmp_path / "y.jsonl"]
    assert find_files(tmp_path / "y.jsonl", ()) == [tmp_path / "y.jsonl"]
    with pytest.raises(DataError, match=r"no file that matches \*\.csv.*--source"):
        find_files(tmp_path, ("*.csv",))
    (tmp_path / "z.csv").write_text("")
    with pytest.raises(DataError, match=r"z\.csv: unknown kind of file"):
        find_files(tmp_path / "z.csv", ())
