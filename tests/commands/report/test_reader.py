"""The reader's records: what is kept of long texts, the steps of a page, tokens with values."""

import base64
import gzip
import json
from dataclasses import replace

import pytest

from stable_opd_mcore.commands.report.chosen_runs import ReportRun, WrittenRun
from stable_opd_mcore.commands.report.reader import (
    MIN_STEPS,
    Limits,
    _chosen_steps,
    complete_rollouts,
    detail,
    embedded,
    listed,
    stored_steps,
)
from stable_opd_mcore.data.rollout_files import write_rollouts
from stable_opd_mcore.data.token_files import TokenText, write_tokens
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.records import Prompt, Rollout, Segment, Turn

WIDE = Limits(tokens=100, characters=1000)


def rollout(text="ab", ids=(3, 4), index=0, finish="stop") -> Rollout:
    prompt = Prompt("train:7", "1+1", (1, 2), "2")
    return Rollout(prompt, index, ids, (-0.25,) * len(ids), finish, 5, text, 1.0)


def tokens(pieces, **values) -> TokenText:
    return TokenText("train:7", 0, tuple(pieces), values, "a golden solution")


def test_the_list_says_what_happened():
    loop = rollout("x" * 60, ids=(1, 2) + (9,) * 58, index=3, finish="length")
    loop = replace(loop, segments=(Segment(40, 5), Segment(20, 6)))
    record = listed(loop, run=1, step=12, index=4, budget=None)
    assert record | {"compression": 0, "snippet": ""} == {
        "run": 1,
        "step": 12,
        "index": 4,
        "prompt_id": "train:7",
        "sample": 3,
        "tokens": 60,
        "finish": "length",
        "reward": 1.0,
        "version": 5,
        "segments": [[40, 5], [20, 6]],
        "repeats": 58,
        "compression": 0,
        "snippet": "",
    }
    assert record["snippet"] == "1+1"
    assert record["compression"] > 4 > 1 > listed(rollout(), 1, 12, 4, None)["compression"]


@pytest.mark.parametrize(("own", "repeats"), [(None, 0), (1024, 0), (64, 20)])
def test_the_limit_of_a_turn_decides_how_long_a_loop_is(tmp_path, own, repeats):
    """A loop has at least a quarter of it, or 32 tokens. A prompt's limit overrides the run's."""
    given = rollout(ids=(1, 2) + (9,) * 20)
    given = replace(given, prompt=replace(given.prompt, max_new_tokens=own))
    write_rollouts(tmp_path / "stored.jsonl", [given])
    (stored,) = complete_rollouts(tmp_path / "stored.jsonl")
    assert listed(stored, 0, 1, 0, 1024)["repeats"] == repeats


def test_tokens_have_their_text_and_values():
    others = [TokenText("train:7", 1, ("?", "?"), {}, None), TokenText("other", 0, (), {}, None)]
    shown = detail(rollout(), [*others, tokens("ab", advantage=(0.5, None))], 0, WIDE)
    assert shown["pieces"] == ["a", "b"]
    assert shown["values"] == {"advantage": [0.5, None], "rollout_logprob": [-0.25, -0.25]}
    assert shown["golden"] == "a golden solution"
    assert shown["gap"] is None
    assert detail(rollout(), [tokens("ab")], 1, WIDE)["values"]["repetition"] == [0, 1]


def test_tokens_before_the_answer_are_thoughts():
    pieces = ["<think>", "Hm.", "</think>", "2"]
    for told, expected in (
        (pieces, [1, 1, 1, 0]),
        (
            ["<|channel|>analysis<|message|>", "Hm.", "<|channel|>final<|message|>", "2"],
            [1, 1, 1, 0],
        ),
        (["<think>", "Hm.", " So", " 2"], [1, 1, 1, 1]),
        (["It", " is", " 2", "."], None),
    ):
        shown = detail(rollout(ids=range(4)), [tokens(told)], 0, WIDE)
        assert shown["values"].get("thought") == expected


def test_without_fitting_tokens_the_text_is_shown():
    for stored in ([], [tokens("abc")], [TokenText("train:7", 1, ("a", "b"), {}, None)]):
        shown = detail(rollout(), stored, 0, WIDE)
        assert (shown["text"], shown["pieces"]) == ("ab", None)


def test_long_responses_keep_their_beginning_and_end():
    ids = tuple(range(50))
    shown = detail(rollout(ids=ids), [tokens([f"<{i}>" for i in ids])], 0, Limits(10, 1000))
    assert shown["pieces"] == [f"<{i}>" for i in (*range(6), *range(46, 50))]
    assert shown["gap"] == {"at": 6, "tokens": 40}
    text = detail(rollout("head" + "x" * 1_000_000 + "tail"), [], 0, Limits(10, 100))["text"]
    assert text.startswith("head")
    assert text.endswith("tail")
    assert "999,908 characters are left out" in text


def store(directory, steps, count=2):
    for step in steps:
        rollouts = [rollout(f"step {step}", index=index) for index in range(count)]
        write_rollouts(RunDirectory(directory).rollouts(step), rollouts)
        write_tokens(RunDirectory(directory).tokens(step), [tokens("ab", advantage=(0.5, 0.5))])


def written(name: str, directory, rows=()) -> WrittenRun:
    return WrittenRun(ReportRun(directory, name, name=name), list(rows), [], {}, {})


def unpacked(text: str) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_a_page_holds_the_rollouts_of_its_runs(tmp_path):
    store(tmp_path, [2, 10, 100])
    (tmp_path / "rollouts" / "notes.txt").write_text("not a step")
    assert stored_steps(tmp_path) == [2, 10, 100]
    rows = [{"step": 10, "rollout/repetition_rate": 0.5}, {"step": 11}]
    found = unpacked(embedded([written("a", tmp_path, rows), written("none", tmp_path / "none")]))
    assert found["runs"] == [
        {"label": "a", "steps": [2, 10, 100], "stored": 3, "per_step": 8},
        {"label": "none", "steps": [], "stored": 0, "per_step": 8},
    ]
    assert [(r["step"], r["sample"]) for r in found["rollouts"]] == [
        (step, sample) for step in (2, 10, 100) for sample in (0, 1)
    ]
    assert found["rollouts"][0]["detail"]["values"]["advantage"] == [0.5, 0.5]
    many = [written(str(number), tmp_path, rows) for number in range(40)]
    assert len(unpacked(embedded(many))["rollouts"]) == 40 * MIN_STEPS * 2
    assert embedded([written("none", tmp_path / "none")]) == ""


def test_the_steps_between_are_spread():
    bad = [{"step": 70, "rollout/repetition_rate": 0.5}]
    assert _chosen_steps(range(100), bad, 3) == [0, 70, 99]
    assert _chosen_steps(range(100), bad, 6) == [0, 25, 50, 70, 75, 99]
    assert _chosen_steps(range(5), [], 6) == [0, 1, 2, 3, 4]


def test_bytes_that_are_no_text_are_shown_as_replaced(tmp_path):
    store(tmp_path, [1])
    for path in (RunDirectory(tmp_path).rollouts(1), RunDirectory(tmp_path).tokens(1)):
        path.write_bytes(
            path.read_bytes().replace(b"step 1", b"\xff\xfe").replace(b'"a"', b'"\xff"')
        )
    first, second = unpacked(embedded([written("a", tmp_path)]))["rollouts"]
    assert first["detail"]["pieces"] == ["�", "b"]
    assert second["detail"]["text"] == "��"


def test_a_transcript_shows_what_was_observed(tmp_path):
    """Its list entry is about the last turn, in which nothing repeats."""
    turns = (
        Turn(40, "stop", text="first", observed=""),
        Turn(3, "stop", (7,), text="second", observed="so?"),
        Turn(2, "length", (8,), restarts=True, text="third", observed="x" * 9000),
    )
    episode = replace(rollout("third", ids=(9,) * 43 + (1, 2)), turns=turns)
    record = listed(episode, 0, 1, 0, None)
    assert (record["turns"], record["repeats"], record["tokens"]) == (3, 0, 45)
    shown = detail(episode, [], 0, Limits(10, 900))["turns"]
    assert [turn["text"] for turn in shown] == ["first", "second", "third"]
    assert [turn["observed"] for turn in shown][:2] == ["", "so?"]
    assert "8,700 characters are left out" in shown[2]["observed"]
    assert [turn["restarts"] for turn in shown] == [False, False, True]
    assert detail(episode, [], 0, WIDE)["contexts"] == [
        {"first": 1, "last": 2, "continues": 0, "tokens": 2 + 40 + 1 + 3},
        {"first": 3, "last": 3, "continues": 0, "tokens": 1 + 2},
    ]
    pieces = tokens([f"<{i}>" for i in range(45)])
    for limit, places in ((100, [0, 40, 43]), (10, [0, None, 8]), (2, [0, None, None])):
        shown = detail(episode, [pieces], 0, Limits(limit, 900))
        assert [(turn["at"], turn["text"]) for turn in shown["turns"]] == [
            (at, "") for at in places if at is not None
        ]
    assert "turns" not in listed(rollout(), 0, 1, 0, None) | detail(rollout(), [], 0, WIDE)
