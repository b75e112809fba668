"""One self-contained HTML page with the curves and rollouts of one run or of several.

    write_report(["runs/opd", "runs/stable_opd"], "report.html")

The page holds the paper's Figures 2-4 and the other curves with the runs' events marked, a table of
outcomes, benchmark results, the settings that differ between the runs, and a reader of rollouts. It
contains all that it needs; its security policy forbids every request. All text from the runs is
escaped. A page has at most MAX_BYTES: of long or many runs it shows less, and says so.
`render_page` also makes the page of the live view, which asks its own server (watch.py).

It changes nothing in the runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.printable_text import beginning, printable
from stable_opd_mcore.monitoring import tables
from stable_opd_mcore.monitoring.events import marks
from stable_opd_mcore.monitoring.figures import (
    MAX_POINTS,
    Row,
    draw_all,
    points_of_curve,
    style,
)
from stable_opd_mcore.monitoring.reader import BUDGET_BYTES, embedded
from stable_opd_mcore.monitoring.sinks import METRICS_FILE, read_events, read_metrics

TEMPLATES = Path(__file__).with_name("templates")
SCRIPTS = ("uplot.min.js", "figures.js", "reader.js", "watch.js")
MAX_NAMES = 3  # of runs in a title
MAX_TEXT = 1000  # characters of a title, a subtitle and a message
MAX_BYTES = 2_000_000  # of a page
LEAST_ROLLOUT_BYTES = 300_000  # that the rest of a page leaves to its rollouts


@dataclass(frozen=True)
class ReportRun:
    """A run with its label and section in the report.

    Runs of one section share its figures. Runs with one label (the seeds of an arm) share a colour
    and, in each section, a legend entry.
    """

    directory: Path
    label: str
    section: str = ""


@dataclass(frozen=True)
class _Detail:
    """How much of the runs a page shows."""

    points: int  # of a curve of a single run
    rows: int  # of a table, and events of a section
    with_others: bool  # the metrics of no figure are drawn


DETAILS = (
    _Detail(MAX_POINTS, 400, True),
    _Detail(500, 200, True),
    _Detail(250, 100, True),
    _Detail(100, 50, False),
    _Detail(20, 50, False),
)


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
    summary: Sequence[Mapping[str, Any]] = (),
    captions: Mapping[str, str] | None = None,
) -> Path:
    """Write the report of `runs` to `output` atomically and return its path.

    Args:
        runs: run directories, labelled by their names, or `ReportRun`s.
        output: the HTML file; its directory is created.
        title: the page's heading; None: the names of the runs.
        summary: flat records for a table at the top, e.g. `arms` of the demo's summary.json.
        captions: section -> a sentence under its heading.

    Raises:
        UserError: no runs, a run without metrics.jsonl, or a malformed metrics, config, evaluation
            or rollout file; the message names file and line.
    """
    named = named_runs(runs)
    if not named:
        raise UserError("no runs to report on: give at least one run directory")
    page = render_page(named, title=title, summary=summary, captions=captions)
    write_atomically(Path(output), page)
    return Path(output)


def render_page(
    runs: Sequence[ReportRun],
    *,
    title: str | None = None,
    summary: Sequence[Mapping[str, Any]] = (),
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
    styles = {
        label: style(index) for index, label in enumerate(dict.fromkeys(run.label for run in runs))
    }
    values = {
        "title": _shown(title or _names(runs)),
        "subtitle": _shown(_subtitle(runs)),
        "problems": [_shown(text) for text in problems],
        "waiting": _shown(", ".join(str(one.directory) for one in waiting)),
        "live": live,
        "scripts": {name.partition(".")[0]: _script(name) for name in SCRIPTS},
        "captions": {printable(key): text for key, text in (captions or {}).items()},
    }
    for detail in DETAILS:
        sections = [
            _section(name, [one for one in read if one.run.section == name], styles, detail)
            for name in dict.fromkeys(one.run.section for one in read)
        ]
        shown = {
            "sections": sections,
            "data": _json_script([section.pop("drawn") for section in sections]),
            "summary": tables.shortened(tables.table_of_records(summary), detail.rows)
            if summary
            else None,
            "points": points_of_curve(detail.points, len(read)),
            "with_others": detail.with_others,
        }
        page = _rendered(values | shown, rollouts="", has_reader=True)
        room = MAX_BYTES - len(page)
        if room < LEAST_ROLLOUT_BYTES:
            continue
        if live:
            return page
        found = [(one.run.label, one.run.directory, one.rows) for one in read]
        rollouts = embedded(found, min(BUDGET_BYTES, room))
        return _rendered(values | shown, rollouts, has_reader=bool(rollouts))
    raise UserError(
        f"{len(runs)} runs do not fit into a page of {MAX_BYTES / 1e6:.0f} MB: give fewer"
    )


def _rendered(values: Mapping[str, Any], rollouts: str, has_reader: bool) -> bytes:
    links = [{"id": "figures", "name": "Figures"}] if values["sections"] else []
    if has_reader:
        links.append({"id": "rollouts", "name": "Rollouts"})
    template = _environment().get_template("page.html.j2")
    page = template.render(values, rollouts=rollouts, has_reader=has_reader, links=links)
    return page.encode("utf-8", "replace")


def _shown(text: str) -> str:
    """Printable; of a long text the beginning."""
    return printable(beginning(text, MAX_TEXT))


def named_runs(runs: Sequence[str | Path | ReportRun]) -> list[ReportRun]:
    """Directories as runs with their names as labels (parent/name for repeated names)."""
    paths = [_resolved(run) for run in runs if not isinstance(run, ReportRun)]
    names = [path.name for path in paths]
    named = []
    for run in runs:
        if not isinstance(run, ReportRun):
            path = _resolved(run)
            repeated = names.count(path.name) > 1
            label = f"{path.parent.name}/{path.name}" if repeated else path.name
            run = ReportRun(Path(run), label)
        label, section = printable(run.label), printable(run.section)
        named.append(ReportRun(Path(run.directory), label, section))
    return named


def _resolved(run: str | Path) -> Path:
    """As `Path.resolve`, which raises RuntimeError for a loop of links; reading names the loop."""
    return Path(os.path.realpath(run))


def _read_all(runs: Sequence[ReportRun], live: bool) -> tuple[list[_Read], list[str]]:
    """What the runs have written, and what is wrong with those that a live view cannot read."""
    read, problems = [], []
    for run in runs:
        try:
            read.append(_read(run))
        except UserError as error:
            if not live:
                raise
            problems.append(str(error))
    return read, problems


def _read(run: ReportRun) -> _Read:
    path = run.directory / METRICS_FILE
    return _Read(run, read_metrics(path), read_events(path))


def _names(runs: Sequence[ReportRun]) -> str:
    labels = list(dict.fromkeys(run.label for run in runs))
    more = len(labels) - MAX_NAMES
    return ", ".join(labels[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _subtitle(runs: Sequence[ReportRun]) -> str:
    if len(runs) != 1:
        return f"{len(runs)} runs of on-policy distillation"
    return tables.described(runs[0].directory)


def _section(
    name: str,
    read: Sequence[_Read],
    styles: Mapping[str, Mapping[str, str]],
    detail: _Detail,
) -> dict[str, Any]:
    """The template's values for one section; "drawn" holds the data of its script."""
    labels = list(dict.fromkeys(one.run.label for one in read))
    directories = [(one.run.label, one.run.directory) for one in read]
    figures = draw_all(
        [(one.run.label, one.rows) for one in read], detail.points, detail.with_others
    )
    each = max(2, detail.rows // len(read))
    kept_events = [_ends(one.events, each) for one in read]
    events = [mark for index, kept in enumerate(kept_events) for mark in marks(kept, index)]
    styled = [{"name": label, **styles[label]} for label in labels]
    of_run = [labels.index(one.run.label) for one in read]
    outcomes = None
    if len(read) > 1:
        outcomes = tables.outcome_table([(o.run.label, o.run.directory, o.rows) for o in read])
    return {
        "name": name,
        "seeds": len(labels) < len(read),
        "labels": styled,
        "figures": figures,
        "events": [{**mark, **_event_label(styled[of_run[mark["run"]]])} for mark in events],
        "events_left_out": sum(len(one.events) for one in read) - len(events),
        "events_each": each // 2,
        "tiles": tables.tiles(read[0].run.directory, read[0].rows) if len(read) == 1 else None,
        "outcomes": tables.shortened(outcomes, detail.rows),
        "benchmarks": tables.shortened(tables.benchmark_table(directories), detail.rows),
        "differences": tables.shortened(tables.config_differences(directories), detail.rows),
        "drawn": _drawn(styled, of_run, events, figures),
    }


def _event_label(label: Mapping[str, str]) -> dict[str, str]:
    return {"label": label["name"], "colour": label["colour"]}


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

    def of_panel(panel: Mapping[str, Any]) -> dict[str, Any]:
        curves = [
            curve | {"steps": steps.setdefault(tuple(curve["steps"]), len(steps))}
            for curve in panel["curves"]
        ]
        return {
            "key": panel["key"],
            "unit": panel["unit"],
            "share": panel["share"],
            "curves": curves,
        }

    panels = [[of_panel(panel) for panel in figure["panels"]] for figure in figures]
    return {
        "labels": labels,
        "runs": of_run,
        "events": [{key: event[key] for key in ("run", "step", "title")} for event in events],
        "figures": panels,
        "steps": list(steps),
    }


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _json_script(data: Any) -> str:
    """JSON for a <script> element: without "<", which could end or open an element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _script(name: str) -> str:
    code = (TEMPLATES / name).read_text(encoding="utf-8")
    assert "</script" not in code.lower(), f"{name} would end its script element"
    return code
