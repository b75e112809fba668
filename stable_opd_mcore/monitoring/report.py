"""One self-contained HTML page with the curves and rollouts of one run or of several.

    write_report(["runs/opd", "runs/stable_opd"], "report.html")

The page holds the paper's Figures 2-4 and the other curves with the runs' events marked, a table of
outcomes, benchmark results, the settings that differ between the runs, and a reader of rollouts. It
contains all that it needs; its security policy forbids every request. All text from the runs is
escaped. A page has at most MAX_BYTES: of long or many runs it shows less, and says so.
`render_page` also makes the page of the live view, which asks its own server (watch.py).

It changes nothing in the runs. Not here: which runs a command names (chosen_runs.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.printable_text import beginning, printable
from stable_opd_mcore.monitoring import tables
from stable_opd_mcore.monitoring.chosen_runs import ReportRun, named_runs
from stable_opd_mcore.monitoring.figures import Row, draw_all, points_that_fit, style
from stable_opd_mcore.monitoring.reader import BUDGET_BYTES, embedded
from stable_opd_mcore.monitoring.run_events import marks
from stable_opd_mcore.monitoring.sinks import METRICS_FILE, read_run

TEMPLATES = Path(__file__).with_name("templates")
SCRIPTS = ("uplot.min.js", "figures.js", "reader.js", "watch.js")
MAX_NAMES = 3  # of runs in a title
MAX_TEXT = 1000  # characters of a title, a subtitle and a message
MAX_EVENTS = 100  # of a section
MAX_BYTES = 2_000_000  # of a page
LEAST_ROLLOUT_BYTES = 200_000  # that the rest of a page leaves to its rollouts


@dataclass(frozen=True)
class _Read:
    """What a run has written so far."""

    run: ReportRun
    rows: list[Row]
    events: list[dict[str, Any]]


def write_report(
    runs: Sequence[str | Path | ReportRun],
    output: str | Path,
    *,
    title: str | None = None,
    captions: Mapping[str, str] | None = None,
) -> Path:
    """Write the report of `runs` to `output` atomically and return its path.

    Args:
        runs: run directories, folders of runs, or `ReportRun`s.
        output: the HTML file; its directory is created.
        title: the page's heading; None: the names of the runs.
        captions: section -> a sentence under its heading.

    Raises:
        UserError: no runs, a run without metrics.jsonl, or a malformed metrics, config, evaluation
            or rollout file; the message names file and line.
    """
    named = named_runs(runs)
    if not named:
        raise UserError("no runs to report on: give at least one run directory")
    page = render_page(named, title=title, captions=captions)
    write_atomically(Path(output), page)
    return Path(output)


def render_page(
    runs: Sequence[ReportRun],
    *,
    title: str | None = None,
    captions: Mapping[str, str] | None = None,
    live: bool = False,
    problem: str | None = None,
) -> bytes:
    """The page as UTF-8; arguments and errors as those of `write_report`.

    Args:
        live: the page of the live view: rollouts come from its server.
            Runs that cannot be read yet are named in the page.
        problem: what is wrong with the files of the runs at the moment; then nothing is read.
    """
    waiting = [one for one in runs if live and not (one.directory / METRICS_FILE).exists()]
    started = [one for one in runs if one not in waiting]
    read, problems = ([], [problem]) if problem else _read_all(started, live)
    labels = dict.fromkeys(run.label for run in runs)
    styles = {label: style(index) for index, label in enumerate(labels)}
    points = points_that_fit([one.rows for one in read])
    sections = [
        _section(name, [one for one in read if one.run.section == name], styles, points)
        for name in dict.fromkeys(one.run.section for one in read)
    ]
    values = {
        "title": _shown(title or _names(list(labels))),
        "subtitle": _shown(_subtitle(runs)),
        "problems": [_shown(text) for text in problems],
        "waiting": _shown(", ".join(str(one.directory) for one in waiting)),
        "live": live,
        "scripts": {name.partition(".")[0]: _script(name) for name in SCRIPTS},
        "captions": {printable(key): text for key, text in (captions or {}).items()},
        "sections": sections,
        "data": _json_script([section.pop("drawn") for section in sections]),
        "points": points,
    }
    page = _rendered(values, rollouts="", has_reader=True)
    room = MAX_BYTES - len(page)
    if room < LEAST_ROLLOUT_BYTES:
        raise UserError(
            f"{len(runs)} runs do not fit into a page of {MAX_BYTES / 1e6:.0f} MB: give fewer"
        )
    if live:
        return page
    found = [(one.run.name, one.run.directory, one.rows) for one in read]
    rollouts = embedded(found, min(BUDGET_BYTES, room))
    return _rendered(values, rollouts, has_reader=bool(rollouts))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


def _rendered(values: Mapping[str, Any], rollouts: str, has_reader: bool) -> bytes:
    page = _template().render(values, rollouts=rollouts, has_reader=has_reader)
    return page.encode("utf-8", "replace")


def _shown(text: str) -> str:
    """Printable; of a long text the beginning."""
    return printable(beginning(text, MAX_TEXT))


def _read_all(runs: Sequence[ReportRun], live: bool) -> tuple[list[_Read], list[str]]:
    """What the runs have written, and what is wrong with those that a live view cannot read."""
    read, problems = [], []
    for run in runs:
        try:
            read.append(_Read(run, *read_run(run.directory / METRICS_FILE)))
        except UserError as error:
            if not live:
                raise
            problems.append(str(error))
    return read, problems


def _names(labels: Sequence[str]) -> str:
    more = len(labels) - MAX_NAMES
    return ", ".join(labels[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _subtitle(runs: Sequence[ReportRun]) -> str:
    if len(runs) != 1:
        return f"{len(runs)} runs of on-policy distillation"
    return tables.described(runs[0].directory)


def _section(
    name: str, read: Sequence[_Read], styles: Mapping[str, Mapping[str, str]], points: int
) -> dict[str, Any]:
    """The template's values for one section; "drawn" holds the data of its script."""
    labels = list(dict.fromkeys(one.run.label for one in read))
    styled = [{"name": label, **styles[label]} for label in labels]
    named = [(one.run.name, one.run.directory) for one in read]
    figures = draw_all([one.rows for one in read], points)
    each = max(2, MAX_EVENTS // len(read))
    events = [
        {**mark, "of": labels.index(one.run.label)}
        for index, one in enumerate(read)
        for mark in marks(_ends(one.events, each), index)
    ]
    outcomes = tables.outcome_table([(one.run.name, one.run.directory, one.rows) for one in read])
    return {
        "name": name,
        "seeds": len(labels) < len(read),
        "labels": styled,
        "figures": figures,
        "events": events,
        "events_left_out": sum(len(one.events) for one in read) - len(events),
        "events_each": each // 2,
        "tiles": tables.tiles(read[0].run.directory, read[0].rows) if len(read) == 1 else None,
        "outcomes": outcomes if len(read) > 1 else None,
        "benchmarks": tables.benchmark_table(named),
        "differences": tables.config_differences(
            [(one.run.label, one.run.directory) for one in read]
        ),
        "drawn": _drawn(styled, [labels.index(one.run.label) for one in read], events, figures),
    }


def _ends(events: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most `limit` events: the first and the last ones."""
    half = limit // 2
    return events if len(events) <= limit else [*events[:half], *events[-half:]]


def _drawn(
    labels: Sequence[Mapping[str, str]],
    of_run: Sequence[int],
    events: Sequence[Mapping[str, Any]],
    figures: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What the page's script draws. A curve names its steps, which most share, by their place."""
    steps: dict[tuple[int, ...], int] = {}
    for curve in (c for figure in figures for panel in figure["panels"] for c in panel["curves"]):
        curve["steps"] = steps.setdefault(tuple(curve["steps"]), len(steps))
    return {
        "labels": labels,
        "runs": of_run,
        "events": [{key: event[key] for key in ("run", "step", "title")} for event in events],
        "figures": [figure["panels"] for figure in figures],
        "steps": list(steps),
    }


def _json_script(data: Any) -> str:
    """JSON for a <script> element: without "<", which could end or open an element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _script(name: str) -> str:
    code = (TEMPLATES / name).read_text(encoding="utf-8")
    assert "</script" not in code.lower(), f"{name} would end its script element"
    return code
