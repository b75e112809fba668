"""One self-contained HTML page with the curves of one run or of several.

    write_report(["runs/opd", "runs/stable_opd"], "report.html")

The page holds the paper's Figures 2-4 and the other curves, a table of outcomes, the settings that
differ between the runs, and sample rollouts. It contains the plotting library; its security policy
forbids every download. All text from the runs is escaped.

Not a live view (TensorBoard is), and it changes nothing in the runs.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from stable_opd_mcore.atomic_files import write_atomically
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.monitoring import tables
from stable_opd_mcore.monitoring.figures import FIGURES, Row, draw, style
from stable_opd_mcore.monitoring.sinks import METRICS_FILE, read_metrics

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class ReportRun:
    """A run with its label and section in the report.

    Runs of one section share its figures. Runs with one label (the seeds of an arm) share a colour
    and, in each section, a legend entry.
    """

    directory: Path
    label: str
    section: str = ""


def write_report(
    runs: Sequence[str | Path | ReportRun],
    output: str | Path,
    *,
    title: str = "On-policy distillation",
    summary: Sequence[Mapping[str, Any]] = (),
    captions: Mapping[str, str] | None = None,
) -> Path:
    """Write the report of `runs` to `output` atomically and return its path.

    Args:
        runs: run directories, labelled by their names, or `ReportRun`s.
        output: the HTML file; its directory is created.
        title: the page's heading.
        summary: flat records for a table at the top, e.g. `arms` of the demo's summary.json.
        captions: section -> a sentence under its heading.

    Raises:
        UserError: no runs, a run without metrics.jsonl, or a malformed metrics, config or rollout
            file; the message names file and line.
    """
    named = _named(runs)
    if not named:
        raise UserError("no runs to report on: give at least one run directory")
    rows = {run.directory: read_metrics(run.directory / METRICS_FILE) for run in named}
    styles = {
        label: style(index) for index, label in enumerate(dict.fromkeys(run.label for run in named))
    }
    sections = [
        _section(name, [run for run in named if run.section == name], rows, styles)
        for name in dict.fromkeys(run.section for run in named)
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(
        title=tables.printable(title),
        plotly=_script(get_plotlyjs()),
        data=_json_script([section.pop("drawn") for section in sections]),
        sections=sections,
        summary=tables.table_of_records(summary) if summary else None,
        captions={tables.printable(key): text for key, text in (captions or {}).items()},
    )
    write_atomically(Path(output), page.encode("utf-8", "replace"))
    return Path(output)


def _named(runs: Sequence[str | Path | ReportRun]) -> list[ReportRun]:
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
        label, section = tables.printable(run.label), tables.printable(run.section)
        named.append(ReportRun(Path(run.directory), label, section))
    return named


def _resolved(run: str | Path) -> Path:
    """As `Path.resolve`, which raises RuntimeError for a loop of links; reading names the loop."""
    return Path(os.path.realpath(run))


def _section(
    name: str,
    runs: Sequence[ReportRun],
    rows: Mapping[Path, Sequence[Row]],
    styles: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """The template's values for one section; "drawn" holds the data of its script."""
    labelled = [(run.label, rows[run.directory]) for run in runs]
    drawn = [figure for figure in (draw(figure, labelled) for figure in FIGURES) if figure]
    labels = list(dict.fromkeys(run.label for run in runs))
    first_of_label = {run.label: run.directory for run in reversed(runs)}
    return {
        "name": name,
        "seeds": len(labels) < len(runs),
        "labels": [{"name": label, **styles[label]} for label in labels],
        "figures": drawn,
        "outcomes": tables.outcome_table(
            [(run.label, run.directory, rows[run.directory]) for run in runs]
        ),
        "differences": tables.config_differences([(run.label, run.directory) for run in runs]),
        "samples": [
            {"label": label, "style": styles[label], "rollouts": samples}
            for label in labels
            if (
                samples := tables.sample_rollouts(
                    first_of_label[label], rows[first_of_label[label]]
                )
            )
        ],
        "drawn": {
            "figures": [[_for_script(panel) for panel in figure["panels"]] for figure in drawn],
            "styles": [[label, styles[label]] for label in labels],
        },
    }


def _for_script(panel: Mapping[str, Any]) -> dict[str, Any]:
    """A panel for the script. Names are escaped, because Plotly interprets markup in them."""
    curves = [{**curve, "name": html.escape(curve["label"])} for curve in panel["curves"]]
    return {"key": panel["key"], "unit": panel["unit"], "share": panel["share"], "curves": curves}


def _json_script(data: Any) -> str:
    """JSON for a <script> element: without "<", which could end or open an element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _script(code: str) -> str:
    assert "</script" not in code.lower(), "the plotting library would end its script element"
    return code
