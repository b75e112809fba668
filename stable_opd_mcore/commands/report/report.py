"""One self-contained HTML page with the curves and rollouts of one run or of several.

The page needs no other file, and its security policy forbids every request. All text from the runs
is escaped. Where follow.py serves the page, it may ask that server for itself again.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from stable_opd_mcore.commands.report import tables
from stable_opd_mcore.commands.report.chosen_runs import (
    ReportRun,
    WrittenRun,
    named_runs,
    read_written,
    seeds_together,
)
from stable_opd_mcore.commands.report.figures import MAX_POINTS, plot_data, style
from stable_opd_mcore.commands.report.reader import embedded
from stable_opd_mcore.commands.report.run_events import SYMBOLS, marks
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.host.run_directory import RunDirectory

TEMPLATES = Path(__file__).with_name("templates")
SCRIPTS = ("uplot.min.js", "figures.js", "reader.js", "follow.js")
GENERATOR = '<meta name="generator" content="stable-opd report">'
_LOG = logging.getLogger(__name__)
MAX_NAMES = 3  # runs that a title names
MAX_TEXT = 1000  # length limit of a title, a subtitle or a message, in characters


def write_report(
    runs: Sequence[str | Path | ReportRun],
    output: str | Path,
    *,
    title: str | None = None,
    caption: str = "",
) -> Path:
    """Write the report of `runs` to `output` atomically and return its path.

    The runs are directories, folders of runs, or `ReportRun`s. Without a title the heading names
    them. A run that cannot be read is named in the log and on the page, if another one can.

    Raises:
        UserError: no runs, none that can be read, or a malformed file of rollouts; the message
            names file and line. Or the output is a file that is no report.
    """
    named = named_runs(runs)
    if not named:
        raise UserError("no runs to report on: give at least one run directory")
    output = Path(output)
    _require_report(output)
    written, errors = _readable(named)
    if not written:
        raise errors[0]
    for error in errors:
        _LOG.warning("left out of the report: %s", error)
    values = _page_values([one.run for one in written], written, title, caption)
    problems = [printable(str(error), MAX_TEXT) for error in errors]
    rollouts = embedded(written)
    write_atomically(output, _rendered(values | {"problems": problems}, rollouts))
    return output


def growing_page(runs: Sequence[ReportRun], version: str) -> bytes:
    """The page of runs that train, as UTF-8, which asks its server for itself again.

    Runs that have not started or cannot be read are named in it. `version` is that of their files.
    """
    waiting = [run for run in runs if not RunDirectory(run.directory).metrics.exists()]
    written, errors = _readable([run for run in runs if run not in waiting])
    rollouts = ""
    try:
        rollouts = embedded(written)
    except UserError as error:  # a file that someone has edited
        errors.append(error)
    shown = {
        "follow": version,
        "problems": [printable(str(error), MAX_TEXT) for error in errors],
        "waiting": printable(", ".join(str(run.directory) for run in waiting), MAX_TEXT),
    }
    values = _page_values([*(one.run for one in written), *waiting], written)
    return _rendered(values | shown, rollouts)


def _readable(runs: Sequence[ReportRun]) -> tuple[list[WrittenRun], list[UserError]]:
    """The runs that can be read, and what is wrong with the others."""
    written: list[WrittenRun] = []
    errors: list[UserError] = []
    for run in runs:
        try:
            written.append(read_written(run))
        except UserError as error:
            errors.append(error)
    return seeds_together(written), errors


def _require_report(path: Path) -> None:
    """Refuse to replace a file that is no report."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if GENERATOR.encode() in file.read(2048):
                return
    elif not path.is_dir():
        return
    raise UserError(f"{path} exists and is no report, so it is kept; give another --output")


def _page_values(
    runs: Sequence[ReportRun],
    written: Sequence[WrittenRun],
    title: str | None = None,
    caption: str = "",
) -> dict[str, Any]:
    labels = list(dict.fromkeys(run.label for run in runs))
    more = len(labels) - MAX_NAMES
    names = ", ".join(labels[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
    about = f"{len(runs)} runs of on-policy distillation"
    if len(runs) == 1:
        about = tables.described(written[0].settings if written else {})
    styles = {label: style(index) for index, label in enumerate(labels)}
    content = _content(written, styles) if written else {"plotted": None}
    plotted = json.dumps(content.pop("plotted"), separators=(",", ":"), allow_nan=False)
    return {
        "title": printable(title or names, MAX_TEXT),
        "subtitle": printable(about, MAX_TEXT),
        "problems": [],
        "waiting": "",
        "follow": "",
        "generator": GENERATOR,
        "scripts": {name.partition(".")[0]: _script(name) for name in SCRIPTS},
        "caption": printable(caption),
        "data": plotted.replace("<", "\\u003c"),  # a "<" could end or open an element
        "points": MAX_POINTS,
        "content": content,
    }


def _content(
    written: Sequence[WrittenRun], styles: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Tables, figures and events for the template; "plotted" is what the page's script plots."""
    labels = list(dict.fromkeys(one.run.label for one in written))
    of_run = [labels.index(one.run.label) for one in written]
    styled = [{"name": label, **styles[label]} for label in labels]
    figures, steps = plot_data([one.rows for one in written], of_run)
    events = [
        {**mark, "of": of_run[index]}
        for index, one in enumerate(written)
        for mark in marks(one.events, index)
    ]
    return {
        "seeds": tables.seed_table(written),
        "labels": styled,
        "figures": figures,
        "events": events,
        "symbols": SYMBOLS,
        "outcomes": tables.outcome_table(written),
        "benchmarks": tables.benchmark_table(written),
        "differences": tables.config_differences(written),
        "plotted": {
            "labels": styled,
            "runs": of_run,
            "events": [
                {key: event[key] for key in ("run", "step", "title", "kind")} for event in events
            ],
            "symbols": SYMBOLS,
            "figures": [figure["panels"] for figure in figures],
            "steps": steps,
        },
    }


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


def _rendered(values: Mapping[str, Any], rollouts: str) -> bytes:
    has_reader = bool(rollouts or values["follow"])  # a run that starts will have some
    page = _template().render(values, rollouts=rollouts, has_reader=has_reader)
    return page.encode("utf-8", "replace")


def _script(name: str) -> str:
    code = (TEMPLATES / name).read_text(encoding="utf-8")
    assert "</script" not in code.lower(), f"{name} would end its script element"
    return code
