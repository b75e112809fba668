"""The summary of verdicts: groups, labels, refused rows, the table."""

import json

import pytest

from stable_opd_mcore.commands.score.grading_summary import NUM_LISTED, summarise, table


def verdict(row, length=10, reward=None, group=None, loop=0):
    return {
        "row": row,
        "id": f"r{row}",
        "group": group,
        "is_episode": False,
        "length": length,
        "finish_reason": "length" if loop else None,
        "reward": reward,
        "grading_failure": "timeout" if reward == 0.0 else None,
        "loop": {"length": loop, "period": min(loop, 2)},
        "repetitive": None,
        "repetitive_10k": False,
        "right_in_loop": False,
    }


RECORDS = [
    verdict(1, reward=1.0, group="a"),
    verdict(2, reward=0.0, group="b"),
    {"row": 3, "refused": "not JSON"},
    verdict(4, length=50, group="a", loop=40),
]


def test_numbers_of_all_rows_and_of_each_group():
    summary = summarise(RECORDS, "tokens", max_length=50)
    numbers = summary["all"]["numbers"]
    assert (summary["num_rows"], summary["all"]["num_responses"]) == (4, 3)
    assert numbers["accuracy"] == 0.5
    assert numbers["loop_token_share"] == pytest.approx(40 / 70)
    assert numbers["loop_onset_mean"] == 10
    assert numbers["grading_timeouts"] == 1
    assert (numbers["repetition_rate"], numbers["repetition_rate_10k"]) == (None, 0.0)
    groups = {name: one["numbers"]["accuracy"] for name, one in summary["groups"].items()}
    assert groups == {"a": 1.0, "b": 0.0}
    assert (summary["refused"], summary["num_refused"]) == ({"3": "not JSON"}, 1)
    assert json.loads(json.dumps(summary)) == summary


def test_the_table_names_groups_and_what_needs_attention():
    looping = verdict(5, reward=1.0, loop=9) | {"right_in_loop": True, "file": "a.jsonl"}
    lines = table(summarise([*RECORDS, looping], "tokens", None)).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["all", "4"], ["a", "2"], ["b", "1"]]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[4:] == [
        "lengths in tokens",
        "1 right responses hold the gold answer, but loop until their budget ends",
        "  row a.jsonl:5: r5",
        "1 of 5 rows refused",
        "  row 3: not JSON",
        "1 of 5 rows have no gold answer and are not in the accuracy",
        "  row 4: r4",
    ]
    lines = table(summarise([RECORDS[2], RECORDS[3]], "tokens", None)).splitlines()
    assert lines[-1] == "no row has a gold answer; name its column with --gold"


def test_a_group_called_all_and_control_characters_do_no_harm():
    records = [verdict(1, group="all"), verdict(2, group="\x1b[2J")]
    summary = summarise(records, "tokens", None)
    assert summary["all"]["num_responses"] == 2
    lines = table(summary).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["all", "2"], ["␛[2J", "1"], ["all", "1"]]


def test_long_names_of_files_are_shown_by_the_ends_that_differ():
    place = "/mnt/a_rather_long_directory_name/of_many_runs"
    files = [f"{place}/{run}/rollouts/{step}.jsonl" for run in "ab" for step in (1, 2)]
    names = ["easy", *files, f"{place}/c.jsonl", "x" * 90]
    lines = table(summarise([verdict(1, group=name) for name in names], "tokens", None))
    shown = [line.split()[0] for line in lines.splitlines()[2:9]]
    ends = [f"{run}/rollouts/{step}.jsonl" for run in "ab" for step in (1, 2)]
    assert shown == [*ends, "c.jsonl", "easy", "x" * 79 + "…"]


def test_long_lists_are_cut_and_counted():
    refused = [{"row": k, "refused": "x"} for k in range(NUM_LISTED + 5)]
    summary = summarise(refused, "characters", None)
    assert len(summary["refused"]) == NUM_LISTED
    shown = table(summary)
    assert "  … and 5 more in verdicts.jsonl" in shown
    assert shown.splitlines()[1].split() == ["all", "0", *["\N{EN DASH}"] * 9]
