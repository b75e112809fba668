"""One self-contained HTML page with the curves and rollouts of one run or of several.

The page needs no other file, and its security policy forbids every request. All text from the runs
is escaped. `live_page` makes the page of the live view, which asks its own server (watch.py).
"""

import json
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
from stable_opd_mcore.commands.report.run_events import marks
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.host.run_directory import RunDirectory

TEMPLATES = Path(__file__).with_name("templates")
SCRIPTS = ("uplot.min.js", "figures.js", "reader.js", "watch.js")
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
    them.

    Raises:
        UserError: no runs, or a missing or malformed file; the message names file and line.
    """
    named = named_runs(runs)
    if not named:
        raise UserError("no runs to report on: give at least one run directory")
    written = seeds_together([read_written(run) for run in named])
    values = _page_values([one.run for one in written], written, title, caption)
    rollouts = embedded(written)
    write_atomically(Path(output), _rendered(values, rollouts, has_reader=bool(rollouts)))
    return Path(output)


def live_page(runs: Sequence[ReportRun]) -> bytes:
    """The page of the live view, whose rollouts come from its server, as UTF-8.

    Runs that have not started or cannot be read are named in it.
    """
    waiting = [run for run in runs if not RunDirectory(run.directory).metrics.exists()]
    written, problems = [], []
    for run in runs:
        try:
            written += [] if run in waiting else [read_written(run)]
        except UserError as error:  # a file that someone has edited
            problems.append(printable(str(error), MAX_TEXT))
    shown = {
        "live": True,
        "problems": problems,
        "waiting": printable(", ".join(str(run.directory) for run in waiting), MAX_TEXT),
    }
    written = seeds_together(written)
    values = _page_values([*(one.run for one in written), *waiting], written)
    return _rendered(values | shown, rollouts="", has_reader=True)


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
        "live": False,
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
        "outcomes": tables.outcome_table(written),
        "benchmarks": tables.benchmark_table(written),
        "differences": tables.config_differences(written),
        "plotted": {
            "labels": styled,
            "runs": of_run,
            "events": [{key: event[key] for key in ("run", "step", "title")} for event in events],
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


def _rendered(values: Mapping[str, Any], rollouts: str, has_reader: bool) -> bytes:
    page = _template().render(values, rollouts=rollouts, has_reader=has_reader)
    return page.encode("utf-8", "replace")


def _script(name: str) -> str:
    code = (TEMPLATES / name).read_text(encoding="utf-8")
    assert "</script" not in code.lower(), f"{name} would end its script element"
    return code
