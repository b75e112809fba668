"""JSON objects of others: bounded, and every fault one message with the file's name."""

import pytest
from pydantic import BaseModel

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.json_files import object_in_line, read_json_object, validated


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{]", "not valid JSON: .* line 1"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON: 'utf-16"),
        (b"[" * 10**5, "not valid JSON: "),
        (b'"text"', "a JSON str, not an object"),
        (b'{"a": {"b": 1, "c": 0, "b": 2}}', "'b' has two values, 1 and 2; keep the right one"),
        (b'{"a": 1' + b" " * 2**20 + b"}", r"1\.0 MiB, more than 1 MiB"),
    ],
)
def test_a_broken_file_is_named(content, words, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=f"a.json: {words}"):
        read_json_object(tmp_path / "a.json", 2**20)
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_json_object(tmp_path / "a.json", 2**20) == {"a": 1}


def test_a_line_without_an_object_is_named():
    assert object_in_line(b'{"a": 1}\n', "rows.jsonl:7") == {"a": 1}
    assert object_in_line(b'{"a": 1, "a": 1}\n', "rows.jsonl:7") == {"a": 1}
    with pytest.raises(DataError, match=r"rows.jsonl:7: 'a' has two values, \[1\] and 'x'"):
        object_in_line('{"a": [1], "a": "x"}', "rows.jsonl:7")
    with pytest.raises(DataError, match=r"rows.jsonl:7: a JSON list, not an"):
        object_in_line(b"[1]", "rows.jsonl:7")


class Row(BaseModel, strict=True):
    ids: list[int]


@pytest.mark.parametrize(
    ("record", "words"),
    [({}, "column ids is missing"), ({"ids": [1, "\x1b"]}, r"column ids\[1\] is '\\x1b': Input")],
)
def test_a_record_that_is_no_row_is_named(record, words):
    assert validated(Row, {"ids": [1]}, "x").ids == [1]
    with pytest.raises(DataError, match=f"rows.jsonl:7: {words}"):
        validated(Row, record, "rows.jsonl:7")
