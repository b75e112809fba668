"""Finding, checking and reading the files of a source."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.preparation import inputs
from stable_opd_mcore.preparation.inputs import find_files, open_input, read_part


def rows_of(path, columns):
    file, parts = open_input(path, path.name, columns)
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert file.num_bytes == path.stat().st_size
    return parts, [row for part in parts for row in read_part(part, columns)]


def test_parquet_row_groups_are_parts_and_only_needed_columns_are_read(tmp_path):
    table = pa.table(
        {"a": list(range(150)), "big": ["x"] * 150, "n": [{"m": i} for i in range(150)]}
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=70)
    parts, rows = rows_of(tmp_path / "t.parquet", ["a", "n.m"])
    assert [(part.first_row, part.num_rows) for part in parts] == [(0, 70), (70, 70), (140, 10)]
    assert rows == [(i, {"a": i, "n": {"m": i}}) for i in range(150)]


@pytest.mark.parametrize("part_bytes", [1, 40, 10_000])
@pytest.mark.parametrize("end", ["", "\n"])
def test_jsonl_parts_hold_whole_lines_and_number_them(tmp_path, monkeypatch, part_bytes, end):
    monkeypatch.setattr(inputs, "_PART_BYTES", part_bytes)
    lines = [json.dumps({"a": "x" * i}) for i in range(9)]
    lines.insert(3, "")
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + end)
    parts, rows = rows_of(tmp_path / "t.jsonl", ["a"])
    assert (len(parts) > 1) == (part_bytes < 10_000)
    assert [number for number, _ in rows] == [1, 2, 3, *range(5, 11)]
    assert [len(row["a"]) for _, row in rows] == list(range(9))
    assert sum(part.num_rows for part in parts) == 10


def test_bad_files_are_named(tmp_path, monkeypatch):
    def refuses(name, content, message, columns=("a",)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            rows_of(tmp_path / name, columns)

    refuses("a.parquet", b"PAR1 not really", r"a\.parquet: not a readable parquet file")
    refuses("b.jsonl", b"", r"b\.jsonl: no rows in it")
    refuses("c.jsonl", b'{"b": 1}\n', r"c\.jsonl: no column 'a'; it has b\. .*--recipe|no column")
    refuses("d.jsonl", b'{"a": 1}\n{"a"', r"d\.jsonl:2: not a JSON value")
    refuses("e.jsonl", b'{"a": 1}\n[2]\n', r"e\.jsonl:2: a JSON list")
    pq.write_table(pa.table({"b": [1]}), tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"f\.parquet: no column 'a'"):
        open_input(tmp_path / "f.parquet", "f", ["a"])
    monkeypatch.setattr(inputs, "_MAX_LINE_BYTES", 16)
    monkeypatch.setattr(inputs, "_PART_BYTES", 4)
    refuses("g.jsonl", b"x" * 64, "a line of more than")


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
