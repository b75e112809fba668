"""Rollout files: an exact round trip, and errors that name line and column."""

import json
import math
from dataclasses import replace

import numpy as np
import orjson
import pytest

from stable_opd_mcore.data.rollout_files import read_rollouts, write_rollouts
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.records import Prompt, Rollout, Segment, Turn

ROLLOUTS = [
    Rollout(
        prompt=Prompt(
            "train:3", '1+1 =\u2028?\n"<b>" \x00', (5, 0, 7), "2", (9, 1), "bracket", True
        ),
        sample_index=1,
        token_ids=(4, 4, 151645),
        rollout_logprobs=(-0.1, -1e-17, -(2**0.5)),
        finish_reason="stop",
        weight_version=12,
        text="a whole emoji 🦆,\r\n</script>",
        reward=0.0,
    ),
    Rollout(
        prompt=Prompt("train:4", "", ()),
        sample_index=0,
        token_ids=(),
        rollout_logprobs=(),
        finish_reason="abort",
        weight_version=0,
        reward=0.0,
        grading_failure="timeout",
    ),
    Rollout(
        prompt=Prompt("train:5", "", (1,)),
        sample_index=0,
        token_ids=(4, 5, 6),
        rollout_logprobs=(-0.5, -1.0, -1.5),
        finish_reason="length",
        weight_version=3,
        segments=(Segment(1, 3), Segment(2, 5)),
        account={"begun": 1, "sampled_tokens": 3},
    ),
]
EPISODES = [
    replace(ROLLOUTS[2], turns=turns)
    for turns in (
        (Turn(1, "stop"), Turn(0, "length", (7, 8)), Turn(2, "stop", (0, 2), restarts=True)),
        (Turn(3, "length", (9,), restarts=True),),
        (Turn(3, "stop"),),  # that of the rollout is "length"
    )
]


def test_round_trip_is_exact(tmp_path):
    path = RunDirectory(tmp_path).rollouts(12)
    write_rollouts(path, ROLLOUTS)
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    assert read_rollouts(path) == ROLLOUTS
    assert b"turns" not in path.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_strict_readers_take_what_an_environment_may_say(tmp_path):
    """Other programs refuse JSON with half an emoji, and a column with values of many types."""
    half, message = "half \ud83d", {"role": "user", "content": "\ud83d"}
    turns = (Turn(1, "stop", text=half), Turn(2, "stop", (7,), observed=half, messages=[message]))
    given = replace(ROLLOUTS[2], feedback=half, metrics={half: 1.0}, turns=turns)
    write_rollouts(tmp_path / "x.jsonl", [given])
    row = orjson.loads((tmp_path / "x.jsonl").read_bytes())
    assert (row["feedback"], row["metrics"]) == ("half ?", {"half ?": 1.0})
    assert [turn["text"] + turn["observed"] for turn in row["turns"]] == ["half ?"] * 2
    assert "messages" not in row["turns"][1]
    (found,) = read_rollouts(tmp_path / "x.jsonl")
    assert (found.token_ids == given.token_ids).all()
    assert (found.rollout_logprobs == given.rollout_logprobs).all()


def test_turns_come_back(tmp_path):
    limits = [64, None, 1]  # of a turn; they do not count where prompts are compared
    prompts = [replace(EPISODES[0].prompt, max_new_tokens=limit) for limit in limits]
    given = [replace(one, prompt=own) for one, own in zip(EPISODES, prompts, strict=True)]
    write_rollouts(tmp_path / "x.jsonl", given)
    found = read_rollouts(tmp_path / "x.jsonl")
    assert found == EPISODES
    assert [one.prompt.max_new_tokens for one in found] == limits
    assert len({one.turns for one in EPISODES}) == 3


def test_experts_are_not_written(tmp_path):
    routed = replace(ROLLOUTS[2], routed_experts=np.zeros((3, 2, 2), np.int16))
    write_rollouts(tmp_path / "x.jsonl", [routed])
    assert read_rollouts(tmp_path / "x.jsonl") == ROLLOUTS[2:]


def test_every_number_comes_back_and_older_files_are_read(tmp_path):
    """Older files have the digits of a double."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    edges = [10.0**k for k in range(-45, 39)] + [9.9999999e-5, 0.99999994, 1.1754944e-38]
    numbers = np.concatenate([numbers[np.isfinite(numbers)], -np.array(edges, np.float32), [0.0]])
    tokens = np.zeros(len(numbers))
    given = replace(ROLLOUTS[0], token_ids=tokens, rollout_logprobs=numbers, segments=(), turns=())
    write_rollouts(tmp_path / "new.jsonl", [given])
    row = json.loads((tmp_path / "new.jsonl").read_text("utf-8"))
    row["rollout_logprobs"] = given.rollout_logprobs.tolist()
    (tmp_path / "old.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("new.jsonl", "old.jsonl"):
        assert read_rollouts(tmp_path / name) == [given]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.jsonl"
    write_rollouts(path, ROLLOUTS)
    broken = Rollout(ROLLOUTS[0].prompt, 0, (4, 5), (-0.5, -math.inf), "length", 1)
    with pytest.raises(ValueError, match=r"train:3: log-probability -inf at token 1"):
        write_rollouts(path, [ROLLOUTS[0], broken])
    assert read_rollouts(path) == ROLLOUTS
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


def test_the_error_of_a_missing_file_names_the_setting(tmp_path):
    with pytest.raises(DataError, match=r"step_000007.jsonl: no such rollout file.*rollout.save"):
        read_rollouts(RunDirectory(tmp_path).rollouts(7))


MALFORMED = [
    ("reward", "good", "column reward is 'good': Input should be a valid number"),
    ("reward", True, "column reward is True"),
    ("response", None, "column response is None: Input should be a valid string"),
    ("finish_reason", "eos", "'eos': Input should be 'open', 'stop', 'length', 'turns', "),
    (
        "response_token_ids",
        [1, -2, 3],
        r"response_token_ids\[1\] is -2: Input should be greater than or equal to 0",
    ),
    ("response_token_ids", [1, 2], "2 response_token_ids but 3 rollout_logprobs"),
    ("segments", [{"num_tokens": 2, "weight_version": 1}], "segments of 2 tokens in all for 3"),
    ("turns", [vars(Turn(2, "stop"))], "turns of 2 tokens in all for 3"),
    ("turns", [vars(Turn(3, "eos"))], r"turns\[0\].finish_reason is 'eos'"),
    ("golden_token_ids", ["a"], r"golden_token_ids\[0\] is 'a'"),
    (
        "response_token_ids",
        [1, 10**400, 3],
        r"response_token_ids\[1\] is 1000",
    ),
    ("rollout_logprobs", [0, -(10**400), 0], r"rollout_logprobs\[1\] is -1000"),
    (
        "rollout_logprobs",
        [0, None, 0],
        r"rollout_logprobs\[1\] is None: Input should be a valid number",
    ),
]  # column, value, message


def test_a_malformed_row_is_named(tmp_path):
    for column, value, message in MALFORMED:
        path = tmp_path / "x.jsonl"
        write_rollouts(path, ROLLOUTS)
        lines = path.read_bytes().split(b"\n")
        row = json.loads(lines[0]) | {column: value}
        path.write_text("\n".join([json.dumps(row), json.dumps(row)]) + "\n")
        with pytest.raises(DataError, match=rf"x.jsonl, line 1: .*{message}.*restore the file"):
            read_rollouts(path)
        path.write_bytes(b"\n".join(lines))
        assert read_rollouts(path) == ROLLOUTS


NO_ROLLOUTS = [b'{"prompt_id": ', b"NaN", b"[1]", b"{}", b"\xff"]  # line


def test_a_line_that_is_no_rollout_is_named(tmp_path):
    for line in NO_ROLLOUTS:
        path = tmp_path / "x.jsonl"
        write_rollouts(path, ROLLOUTS[1:])
        with path.open("ab") as file:
            file.write(line)
        with pytest.raises(DataError, match=r"x.jsonl, line 3: "):
            read_rollouts(path)
