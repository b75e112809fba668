"""What each role of a run did in one step: the trainer, rollout servers, teacher servers.

    timeline = gather_timeline(step, timer, {"server": engine.take_activity()})
    metrics = metrics | waited(timeline)
    write_timeline(directory, timeline)

Times are seconds since the step began. Every rank measures them with its own clock, because ranks
of several hosts share none; they begin a step together, within the time of one message. The
trainer's row is rank 0's. A server that several ranks share draws while any of them has a request
in flight.

A run holds one timeline, `timeline.json`, in which gaps of less than 1/250 of the step are closed.
Not here: noting the spans (serving/activity.py, throughput.py), the page (report.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.json_files import read_json_object, validated
from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import gather_objects
from stable_opd_mcore.serving.activity import Span, Spans

TIMELINE_FILE = "timeline.json"
RESOLUTION = 250  # of a step: shorter gaps are closed, so a row has at most 251 spans of a kind
MAX_SERVERS = 16  # of each kind in a file
MAX_FILE_BYTES = 2**20
MAX_NAME = 80  # characters
WIDTH = 1000  # of a drawn row
PARTS = {
    "rollout": "sampling",
    "score": "scoring",
    "update": "updating",
    "sync": "weights on their way",
    "wait": "waiting for responses",
    "draws": "sampling",
    "scores": "scoring",
    "weights": "weights on their way",
}  # what a role does, as `Span.what`; a later one is drawn over an earlier one
_TRAINER_WAITS = ("wait", "sync")  # as perf/trainer_waited counts them
Kind = Literal["trainer", "server", "teacher"]


@dataclass(frozen=True)
class Role:
    kind: Kind
    name: str
    spans: tuple[Span, ...]  # those of one kind in order, without overlaps


@dataclass(frozen=True)
class Timeline:
    step: int
    seconds: float  # of the whole step
    roles: tuple[Role, ...]  # the trainer first
    left_out: int = 0  # servers that a file does not name


def gather_timeline(step: int, timer: PhaseTimer, seen: Mapping[Kind, Spans | None]) -> Timeline:
    """The timeline of a finished step. With servers it is collective, and the same on every rank.

    Args:
        timer: of the step, after its `metrics`.
        seen: what this rank saw the servers of each kind do since the step before; None of a kind
            without servers, on every rank alike.
    """
    seconds, phases = timer.ended - timer.began, timer.spans()
    own: dict[tuple[Kind, str], list[Span]] = {
        (kind, name): [
            Span(what, start - timer.began, end - timer.began) for what, start, end in spans
        ]
        for kind, servers in seen.items()
        for name, spans in (servers or {}).items()
    }
    everywhere = [(seconds, phases, own)]
    if any(servers is not None for servers in seen.values()):
        everywhere = gather_objects(everywhere[0])
    seconds, phases, _ = everywhere[0]
    together: dict[tuple[Kind, str], list[Span]] = {("trainer", "rank 0"): phases}
    for _, _, of_rank in everywhere:
        for key, spans in of_rank.items():
            together.setdefault(key, []).extend(spans)
    roles = [Role(*key, _joined(spans, seconds)) for key, spans in together.items()]
    return Timeline(step, seconds, tuple(roles))


def waited(timeline: Timeline) -> Metrics:
    """`perf/servers_waited` and `perf/teacher_waited`, where there are such servers: the share of
    the step in which a server did nothing, as a mean over them."""
    keys: dict[Kind, str] = {"server": "perf/servers_waited", "teacher": "perf/teacher_waited"}
    idle = {
        key: [_idle(role, timeline.seconds) for role in timeline.roles if role.kind == kind]
        for kind, key in keys.items()
    }
    return Metrics(
        {key: Mean(sum(each), len(each) * timeline.seconds) for key, each in idle.items() if each}
    )


def write_timeline(directory: Path, timeline: Timeline) -> None:
    """Replace the run's timeline."""
    kept: list[Role] = []
    for kind in ("trainer", "server", "teacher"):
        kept += [role for role in timeline.roles if role.kind == kind][:MAX_SERVERS]
    record = {
        "step": timeline.step,
        "seconds": round(timeline.seconds, 6),
        "left_out": len(timeline.roles) - len(kept),
        "roles": [_record(role, timeline.seconds) for role in kept],
    }
    write_atomically(directory / TIMELINE_FILE, json.dumps(record, allow_nan=False).encode())


def _record(role: Role, seconds: float) -> dict[str, Any]:
    spans: dict[str, list[tuple[float, float]]] = {}
    for what, start, end in _joined(role.spans, seconds, gap=seconds / RESOLUTION):
        spans.setdefault(what, []).append((round(start, 6), round(end, 6)))
    return {"kind": role.kind, "name": role.name, "spans": spans}


_Seconds = Annotated[FiniteFloat, Field(ge=0, le=1e9)]


class _Role(BaseModel):
    model_config = ConfigDict(strict=True)
    kind: Kind
    name: Annotated[str, Field(max_length=1000)]
    spans: dict[
        str,
        Annotated[
            list[Annotated[list[_Seconds], Field(min_length=2, max_length=2)]],
            Field(max_length=RESOLUTION + 1),
        ],
    ]


class _File(BaseModel):
    model_config = ConfigDict(strict=True)
    step: Annotated[int, Field(ge=0, lt=2**63)]
    seconds: Annotated[FiniteFloat, Field(gt=0, le=1e9)]
    left_out: Annotated[int, Field(ge=0, lt=2**31)]
    roles: Annotated[list[_Role], Field(max_length=3 * MAX_SERVERS)]


def read_timeline(directory: Path, last_step: int) -> Timeline | None:
    """The run's timeline; None without one, or where it is of a step after `last_step`, which a
    resumed run takes again.

    Raises:
        UserError: a malformed file; the message names it.
    """
    path = directory / TIMELINE_FILE
    if not path.is_file():
        return None
    record = read_json_object(path, MAX_FILE_BYTES, remedy="delete it")
    found = validated(_File, record, str(path))
    roles = []
    for role in found.roles:
        spans = [
            Span(what, *span) for what in PARTS for span in role.spans.get(what, ())
        ]  # others are of no part that is drawn
        roles.append(Role(role.kind, printable(role.name, MAX_NAME), _joined(spans, found.seconds)))
    timeline = Timeline(found.step, found.seconds, tuple(roles), found.left_out)
    return timeline if found.step <= last_step else None


def drawn(timeline: Timeline, label: str) -> dict[str, Any]:
    """What the page shows of a run's timeline: a row of paths for each role, each path the spans
    of one part in a box of WIDTH x 1.

    Args:
        label: the run's name.
    """
    used = {span.what for role in timeline.roles for span in role.spans}
    return {
        "label": label,
        "step": timeline.step,
        "ticks": [f"{timeline.seconds * part / 4:.3g} s" for part in range(5)],
        "parts": {text: what for what, text in PARTS.items() if what in used},
        "width": WIDTH,
        "rows": [_row(role, timeline.seconds) for role in timeline.roles],
        "left_out": timeline.left_out,
    }


def _row(role: Role, seconds: float) -> dict[str, Any]:
    paths, told = [], []
    for what, text in PARTS.items():
        spans = [span for span in role.spans if span.what == what]
        if spans:
            told.append(f"{text} {sum(span.end - span.start for span in spans):.3g} s")
            ends = [(int(s.start / seconds * WIDTH), round(s.end / seconds * WIDTH)) for s in spans]
            path = "".join(f"M{a} 0H{max(a + 1, b)}V1H{a}Z" for a, b in ends)
            paths.append({"what": what, "path": path, "text": told[-1]})
    idle = f"{_idle(role, seconds) / seconds:.0%}".replace("%", " %")
    host = role.name.removeprefix("http://")
    name = {"trainer": "trainer", "teacher": f"teacher {host}"}.get(role.kind, role.name)
    return {"name": name, "paths": paths, "idle": idle, "text": "; ".join(told)}


def _idle(role: Role, seconds: float) -> float:
    """Seconds of the step in which the role did nothing; of the trainer those in which it waits."""
    if role.kind == "trainer":
        return sum(end - start for what, start, end in role.spans if what in _TRAINER_WAITS)
    busy = _joined([Span("", start, end) for _, start, end in role.spans], seconds)
    return seconds - sum(end - start for _, start, end in busy)


def _joined(spans: Sequence[Span], seconds: float, gap: float = 0.0) -> tuple[Span, ...]:
    """The spans within the step; those of one kind that overlap, or are at most `gap` apart, as
    one."""
    joined: list[Span] = []
    for what, start, end in sorted(spans):
        start, end = max(0.0, start), min(seconds, end)
        if start >= end:
            continue
        if joined and joined[-1].what == what and start - joined[-1].end <= gap:
            joined[-1] = Span(what, joined[-1].start, max(end, joined[-1].end))
        else:
            joined.append(Span(what, start, end))
    return tuple(joined)
