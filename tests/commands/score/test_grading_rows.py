"""Columns by name, and rows that nobody should trust."""

import io
import json

import pytest

from stable_opd_mcore.commands.score import grading_rows
from stable_opd_mcore.commands.score.grading_rows import (
    Columns,
    ResponseRow,
    RowError,
    find_columns,
    parse_row,
    read_lines,
)
from stable_opd_mcore.errors import DataError

ALL = Columns("r", "g", "i", "f", "t", "c")
ROW = {"r": "x", "g": "2", "i": 7, "f": "eos", "t": [1, 2], "c": "easy"}
OF_A_RUN = {"prompt_token_ids": [1]}


READ = ResponseRow(response="x", gold="2", id="7", group="easy", finish="stop", tokens=[1, 2])


def parsed(columns=ALL, **changes):
    return parse_row(json.dumps(ROW | changes).encode(), columns)


def found_in(path, columns):
    with path.open("rb") as file:
        return find_columns(read_lines(file), path.name, columns)


def test_usual_names_are_found_in_the_first_readable_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"id": 1, "completion": "x", "reward_model": {"ground_truth": "2"}, "truncated": True}
    line = json.dumps(row | {"level": None}) + "\n"
    path.write_text("[]\nno json\n" + line)
    found = found_in(path, Columns(group="level"))
    expected = Columns("completion", "reward_model.ground_truth", "id", "truncated", group="level")
    assert found == expected
    expected_row = ResponseRow(response="x", gold="2", id="1", finish="length")
    assert parse_row(line.encode(), found) == expected_row
    nested = found_in(path, Columns(response="reward_model.ground_truth", gold="none"))
    assert (nested.response, nested.gold) == ("reward_model.ground_truth", None)
    path.write_text('{"id": 0, "error": "time-out"}\n' + path.read_text())  # no response
    assert found_in(path, Columns(group="level")) == expected
    assert found_in(path, Columns(response="level", gold="none")).response == "level"
    with pytest.raises(
        DataError, match="no column reply among error, id; name the response's with"
    ):
        found_in(path, Columns(response="reply"))
    with pytest.raises(DataError, match=r"no column a\.b; give --group one of completion, id, "):
        found_in(path, Columns(group="a.b"))


def test_every_column_is_read():
    assert parsed() == READ
    assert parsed(answer_format="latex", opens_thinking=None) == READ  # not a run's
    others = {"answer_format": "bracket", "opens_thinking": True}
    changed = READ.model_copy(update=others | {"group": None})
    assert parsed(**others, **OF_A_RUN, c=None) == changed


FORMS = [
    ("f", "MAX_TOKENS", "length"),
    ("f", True, "length"),
    ("f", False, "stop"),
    ("f", None, None),
    ("f", {"type": "stop", "matched": 5}, "stop"),
    ("f", "abort", "abort"),
    ("g", 2, "2"),
    ("g", 2.5, "2.5"),
    ("g", ["a", 3], "a, 3"),
    ("g", None, None),
    ("g", "  ", None),
    ("g", [], None),
]  # column, value, expected


def test_values_of_several_forms_are_read():
    for column, value, expected in FORMS:
        row = parsed(**{column: value})
        assert (row.finish if column == "f" else row.gold) == expected


OTHER_TYPES = [
    ({"r": None}, "column r is None: Input should be a valid string"),
    ({"g": True}, "column g is True: expected text, a number or null"),
    ({"g": float("nan")}, "column g is nan: expected text, a number or null"),
    ({"g": {"a": 1}}, "column g is {'a': 1}: expected text, a number or null"),
    ({"i": [1]}, "column i is [1]: expected text or a number"),
    ({"t": [1, -1]}, "column t is [1, -1]: Input should be greater than or equal to 0"),
    ({"t": [1, True]}, "column t is [1, True]: Input should be a valid integer"),
    (
        {"t": None},
        "column t is null: expected a list of token ids; --tokenizer counts those of",
    ),
    (OF_A_RUN | {"answer_format": "box"}, "column answer_format is 'box': Input should"),
    (OF_A_RUN | {"opens_thinking": "no"}, "column opens_thinking is 'no': Input should"),
]  # changes, reason


def test_values_of_another_type_are_refused():
    for changes, reason in OTHER_TYPES:
        with pytest.raises(RowError) as refused:
            parsed(**changes)
        assert str(refused.value).startswith(reason)


@pytest.mark.parametrize("value", ["bored", {"type": 3}, [], 2])
def test_an_unknown_finish_reason_is_refused_with_the_way_out(value):
    with pytest.raises(RowError, match="--finish none ignores it"):
        parsed(f=value)
    assert parsed(Columns("r"), f=value).finish is None


NO_ROWS = [
    (None, "longer than 64 MiB"),
    (b"\n", "an empty line"),
    (b"[1, 2]\n", "not a JSON object but list"),
    (b'{"r": "x"', "not JSON: "),
    (b'{"r": "\xff"}', "not UTF-8 at byte 7"),
    (b"[" * 100_000, "not JSON: "),
    (b'{"r": ' + b"1" * 10_000 + b"}", "not JSON: "),
    (b'{"s": "x", "\x1b": 1}', "not JSON: "),
    (b'{"s": "x", "\\u001b[2J": 1}', "no column r among ␛[2J, s"),
]  # line, reason


def test_lines_that_are_no_row_are_refused():
    for line, reason in NO_ROWS:
        with pytest.raises(RowError) as refused:
            parse_row(line, Columns("r"))
        assert str(refused.value).startswith(reason)
        assert str(refused.value).isprintable()


def test_the_response_of_an_episode_is_its_last_turn():
    turns = [
        {"num_tokens": 3, "finish_reason": "length"},
        {"num_tokens": 1, "finish_reason": "stop"},
    ]
    episode = {"t": [4, 5, 6, 7], "f": "length", "turns": turns}
    row = parsed(**OF_A_RUN, **episode)
    assert (row.tokens, row.finish) == ([7], "stop")
    played = {"seed": 3, "reward": 0.5, "grading_failure": None}
    assert parsed(**OF_A_RUN, **episode, **played).reward == 0.5
    assert parsed(**OF_A_RUN, **episode, **played).item(stopped=True) is None
    assert parsed(**OF_A_RUN, reward=0.5).reward is None  # the text of a response is graded
    outside = parsed(**episode, **played)  # outside a run these are any columns
    assert (outside.tokens, outside.reward) == ([4, 5, 6, 7], None)
    assert parsed(Columns("r"), **OF_A_RUN, **episode).tokens is None
    with pytest.raises(RowError, match=r"column turns is \[7\]: expected the turns of an episode"):
        parsed(**OF_A_RUN, turns=[7])


def test_half_an_emoji_is_text():
    assert parse_row(b'{"r": "\\ud83d"}', Columns("r")).response == "\ud83d"


@pytest.mark.parametrize("size", [4, 8, 100])
def test_lines_are_read_with_bounded_memory(monkeypatch, size):
    monkeypatch.setattr(grading_rows, "MAX_LINE_BYTES", size)
    text = b"abc\n" + b"x" * 30 + b"\n\nab\n" + b"y" * size
    lines = list(read_lines(io.BytesIO(text)))
    long = None if size <= 30 else b"x" * 30 + b"\n"
    assert lines == [b"abc\n", long, b"\n", b"ab\n", None]
