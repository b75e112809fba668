"""Finding and checking the files of a source."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.preparation.inputs import find_files, open_input


def test_bad_files_are_named(tmp_path):
    def refuses(name, content, message):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_input(tmp_path / name, name, ["a"])

    refuses("a.parquet", b"PAR1 not really", r"a\.parquet: not a readable parquet file")
    refuses("b.jsonl", b"", r"b\.jsonl: no rows in it")
    refuses("c.jsonl", b'{"b": 1}\n', r"c\.jsonl: no column 'a'; it has b\. .*--problem")
    refuses("d.jsonl", b'\n{"a"', r"d\.jsonl:2: not valid JSON")
    refuses("e.jsonl", b"[2]\n", r"e\.jsonl:1: a JSON list")
    pq.write_table(pa.table({"b": [1]}), tmp_path / "f.parquet")
    refuses("f.parquet", (tmp_path / "f.parquet").read_bytes(), r"f\.parquet: no column 'a'")
    refuses("z.csv", b"", r"z\.csv: unknown kind of file")


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
