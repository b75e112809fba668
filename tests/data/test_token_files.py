"""Token files: written and read again, rounded, and refused by line where they are malformed."""

import math

import pytest

from stable_opd_mcore.data.token_files import TokenText, read_tokens, write_tokens
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.run_directory import RunDirectory

ONE = TokenText(
    "train:1", 2, ("a", "\ud83d"), {"advantage": (0.5, None), "kl_teacher": (0, 1)}, "g"
)


def test_what_is_written_is_read_again(tmp_path):
    path = RunDirectory(tmp_path).tokens(12)
    assert path.name == "step_000012.jsonl"
    write_tokens(path, [ONE, TokenText("b", 0, (), {}, None)])
    first, second = read_tokens(path)
    assert first.pieces == ("a", "?")
    assert first.values == {"advantage": [0.5, None], "kl_teacher": [0, 1]}
    assert (first.prompt_id, first.sample_index, first.golden) == ("train:1", 2, "g")
    assert second == TokenText("b", 0, (), {}, None)
    assert read_tokens(RunDirectory(tmp_path).tokens(13)) == []


def test_numbers_have_four_digits_and_are_finite(tmp_path):
    values = {"advantage": (0.123456, math.nan, -math.inf)}
    write_tokens(tmp_path / "t.jsonl", [TokenText("a", 0, ("x", "y", "z"), values, None)])
    assert read_tokens(tmp_path / "t.jsonl")[0].values == {"advantage": [0.1235, None, None]}


MALFORMED = [
    ("{", "not valid JSON"),
    ("[]", "a JSON list, not an object"),
    ('{"prompt_id": 1}', "column prompt_id is 1: Input should be a valid string"),
    ('{"prompt_id": "a", "sample_index": 0, "golden": 1}', "column golden is 1: Input"),
    ('{"prompt_id": "a", "sample_index": 0, "pieces": 3}', "column pieces is 3: Input"),
    ('{"prompt_id": "a", "sample_index": 0, "pieces": [3]}', r"column pieces\[0\] is 3: Input"),
    (
        '{"prompt_id": "a", "sample_index": 0, "pieces": ["b"], "advantage": [1, 2]}',
        "column advantage has 2 numbers for 1 pieces",
    ),
    (
        '{"prompt_id": "a", "sample_index": 0, "pieces": ["b"], "kl_teacher": [1e999]}',
        r"column kl_teacher\[0\] is inf: Input should be a finite number",
    ),
]  # row, message


def test_malformed_rows_are_named(tmp_path):
    for row, message in MALFORMED:
        write_tokens(tmp_path / "t.jsonl", [ONE])
        with (tmp_path / "t.jsonl").open("a") as file:
            file.write(row + "\n")
        with pytest.raises(DataError, match=rf"t\.jsonl, line 2: {message}"):
            read_tokens(tmp_path / "t.jsonl")
        write_tokens(tmp_path / "t.jsonl", [ONE])  # restored
        assert len(read_tokens(tmp_path / "t.jsonl")) == 1
