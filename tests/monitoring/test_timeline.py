"""The timeline of a step: servers that ranks share, the share that each role waits, the file."""

import json
from pathlib import Path

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.monitoring import timeline as module
from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.monitoring.timeline import (
    MAX_SERVERS,
    RESOLUTION,
    TIMELINE_FILE,
    Role,
    Timeline,
    drawn,
    gather_timeline,
    read_timeline,
    waited,
    write_timeline,
)
from stable_opd_mcore.serving.activity import Span
from tests.monitoring.make_run import HOSTILE
from tests.parallel.launch import run_ranks

TRAINER = Role(
    "trainer",
    "rank 0",
    (
        Span("rollout", 0, 4),
        Span("score", 4, 5),
        Span("sync", 9, 10),
        Span("update", 5, 9),
        Span("wait", 1, 3),
    ),
)


def server(name: str, *spans: Span, kind="server") -> Role:
    return Role(kind, name, spans)


def timer_of(seconds: float, began: float) -> PhaseTimer:
    """A timer after its step, by a clock that showed `began` when the step began."""
    timer = PhaseTimer()
    timer.began, timer.ended = began, began + seconds
    timer._start, timer._phases = began, [("update", began + 1.0, began + 2.0)]
    return timer


def test_a_server_waits_where_it_neither_draws_nor_receives_weights():
    busy = server("a", Span("draws", 0, 6), Span("weights", 8, 9))
    idle = server("b", Span("draws", 2, 3))
    teacher = server("c", Span("scores", 0, 1), kind="teacher")
    found = waited(Timeline(1, 10, (TRAINER, busy, idle, teacher)))
    require_known(found)
    assert (found["perf/servers_waited"].total, found["perf/servers_waited"].count) == (12, 20)
    assert found["perf/teacher_waited"].value() == 0.9


def test_without_servers_there_is_the_trainers_row_and_no_metric():
    timeline = gather_timeline(3, timer_of(4, began=0.0), {"server": None, "teacher": None})
    assert timeline == Timeline(3, 4, (Role("trainer", "rank 0", (Span("update", 1, 2),)),))
    assert waited(timeline) == Metrics()


def ranks_share_a_server(rank: int, _: int, folder: str) -> None:
    """Rank 1 has another clock and a server of its own; a step that is longer than rank 0's."""
    timer, own = timer_of(10 + rank, began=1000.0 * rank), {}
    spans = [[(-3, 2), (3, 5)], [(1, 4), (9, 12)]][rank]
    own["shared"] = [Span("draws", *(1000 * rank + end for end in span)) for span in spans]
    if rank:
        own["single"] = [Span("draws", 1002, 1003), Span("weights", 1002.5, 1004)]
    timeline = gather_timeline(7, timer, {"server": own, "teacher": None})
    if rank:
        assert timeline.seconds == 10
        assert {role.name: role.spans for role in timeline.roles} == {
            "rank 0": (Span("update", 1, 2),),
            "shared": (Span("draws", 0, 5), Span("draws", 9, 10)),
            "single": (Span("draws", 2, 3), Span("weights", 2.5, 4)),
        }
    share = waited(timeline)["perf/servers_waited"]
    assert (share.total, share.count) == (4 + 8, 20)
    Path(folder, str(rank)).write_text(repr(timeline))


def test_a_server_draws_while_any_rank_has_a_request_there(tmp_path):
    run_ranks(2, ranks_share_a_server, str(tmp_path))
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


def test_the_file_is_read_as_it_was_written(tmp_path):
    written = Timeline(12, 10, (TRAINER, server("a", Span("draws", 0.25, 6))))
    write_timeline(tmp_path, written)
    assert read_timeline(tmp_path, last_step=12) == written
    assert read_timeline(tmp_path, last_step=11) is None, "a resumed run takes the step again"
    assert read_timeline(tmp_path / "elsewhere", last_step=12) is None


def test_the_file_is_bounded(tmp_path):
    """Many short requests become at most RESOLUTION + 1 spans of the same extent."""
    spans = [Span("draws", i / 1000, (i + 0.5) / 1000) for i in range(10_000)]
    gaps = [Span("weights", i / 50, (i + 0.5) / 50) for i in range(500)]
    timeline = Timeline(1, 10, (TRAINER, *(server(str(i), *spans, *gaps) for i in range(40))))
    write_timeline(tmp_path, timeline)
    assert (tmp_path / TIMELINE_FILE).stat().st_size < module.MAX_FILE_BYTES / 2
    found = read_timeline(tmp_path, last_step=1)
    assert found is not None
    assert (len(found.roles), found.left_out) == (1 + MAX_SERVERS, 40 - MAX_SERVERS)
    draws = [span for span in found.roles[1].spans if span.what == "draws"]
    assert draws == [Span("draws", 0, 9.9995)]
    assert len(found.roles[1].spans) <= 1 + RESOLUTION + 1


GOOD = {
    "step": 1,
    "seconds": 2.0,
    "left_out": 0,
    "roles": [{"kind": "server", "name": "a", "spans": {"draws": [[0, 1]]}}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": "1"},
        {"seconds": 0},
        {"seconds": float("nan")},
        {"seconds": 10**400},
        {"left_out": True},
        {"roles": [{"kind": "spy", "name": "a", "spans": {}}]},
        {"roles": [{"kind": "server", "name": "a" * 1001, "spans": {}}]},
        {"roles": [{"kind": "server", "name": "a", "spans": {"draws": [[0]]}}]},
        {"roles": [{"kind": "server", "name": "a", "spans": {"draws": [[0, "1"]]}}]},
        {"roles": [{"kind": "server", "name": "a", "spans": {"draws": [[-1, 1]]}}]},
        {"roles": [{"kind": "server", "name": "a", "spans": {"draws": [[0, 1]] * 252}}]},
        {"roles": GOOD["roles"] * 49},
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path, change):
    (tmp_path / TIMELINE_FILE).write_text(json.dumps(GOOD))
    assert read_timeline(tmp_path, last_step=1) is not None
    (tmp_path / TIMELINE_FILE).write_text(json.dumps(GOOD | change))
    with pytest.raises(UserError, match=r"timeline\.json: column "):
        read_timeline(tmp_path, last_step=1)


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b"[" * 100_000, b" " * 1_100_000])
def test_what_is_no_object_is_refused_by_name(tmp_path, text):
    (tmp_path / TIMELINE_FILE).write_bytes(text)
    with pytest.raises(UserError, match=r"timeline\.json: .*; delete it"):
        read_timeline(tmp_path, last_step=1)


def test_times_outside_the_step_and_other_parts_are_not_drawn(tmp_path):
    spans = {"draws": [[1, 9], [5, 4], [3, 9]], HOSTILE: [[0, 1]]}
    role = {"kind": "server", "name": HOSTILE * 9, "spans": spans}
    (tmp_path / TIMELINE_FILE).write_text(json.dumps(GOOD | {"roles": [role]}))
    found = read_timeline(tmp_path, last_step=1)
    assert found is not None
    assert found.roles[0].spans == (Span("draws", 1, 2),)
    assert len(found.roles[0].name) <= module.MAX_NAME + 1
    assert "\u202e" not in found.roles[0].name


def test_what_is_drawn():
    roles = (TRAINER, server("a", Span("draws", 0, 5), Span("draws", 5.0001, 5.0002)))
    shown = drawn(Timeline(3, 10, roles), "a-run")
    assert shown["ticks"] == ["0 s", "2.5 s", "5 s", "7.5 s", "10 s"]
    trainer, of_server = shown["rows"]
    assert (trainer["name"], trainer["idle"]) == ("trainer", "30 %")
    assert [path["what"] for path in trainer["paths"]] == [
        *("rollout", "score", "update", "sync", "wait")  # the wait over the rollout that it is in
    ]
    assert (of_server["name"], of_server["idle"]) == ("a", "50 %")
    assert of_server["paths"][0]["path"] == "M0 0H500V1H0ZM500 0H501V1H500Z"  # never invisible
    assert of_server["text"] == "sampling 5 s"
    assert list(shown["parts"]) == [
        *("sampling", "scoring", "updating", "weights on their way", "waiting for responses")
    ]
