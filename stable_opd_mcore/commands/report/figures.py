"""The figures of the report: the metrics of each figure, and the curves of each run.

monitoring/metrics.yaml says which metrics a figure has. Captions say what is plotted; outcomes.py
computes what a run did. The last figure has the metrics that no other shows. Curves are plain lists
for JSON, which the page's script smooths and plots (templates/figures.js).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stable_opd_mcore.monitoring.names import NAMES, TABLE, Name, name_of

WINDOW = 5  # steps of the trailing mean
SMOOTH_FROM = 25  # rows from which curves are trailing means
MAX_FAINT_RUNS = 6  # with more runs, single steps are not plotted behind the means
SCHEDULES = frozenset({"optimizer/lr", "kl/beta", "mixture/lambda"})  # plotted as they were set
# Metrics of terms that a run may lack: left out where all values are 0.
TERMS = ("loss/", "logprob/teacher", "kl/", "mixture/", "ratio/")

MAX_POINTS = 2000  # a longer curve keeps every n-th point and the last
OTHERS = "Other metrics"

# Angle between the hues of two labels in a row, 360 / golden ratio^2: all hues of a page differ.
HUE_STEP, FIRST_HUE = 137.508, 250
DASHES = ("", "8 4", "2 3", "8 3 2 3")  # SVG's notation; the next one after 8 labels
LABELS_OF_A_DASH = 8

Row = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    title: str
    caption: str
    panels: dict[str, str]  # metric -> the panel's title


FIGURES = tuple(Figure(**figure) for figure in TABLE["figures"])


def style(index: int) -> dict[str, str]:
    """Colour and dash of the index-th label. No two labels share a hue."""
    hue = round((FIRST_HUE + HUE_STEP * index) % 360, 1)
    return {
        "colour": f"light-dark(oklch(0.54 0.16 {hue}), oklch(0.76 0.14 {hue}))",
        "dash": DASHES[index // LABELS_OF_A_DASH % len(DASHES)],
    }


def plot_data(
    runs: Sequence[Sequence[Row]], arms: Sequence[int] = ()
) -> tuple[list[dict[str, Any]], list[tuple[int, ...]]]:
    """The figures that have values, and the lists of steps that their curves share.

        figure  title, caption, `closed`, panels
        panel   key, title, meaning, unit, a curve of each run that has values
        curve   place of its run in `runs`, place of its list of steps, values, `window` of the
                trailing mean (1: none), `faint`: single points are plotted behind the mean

    `arms` holds the arm of each run; the runs of an arm are its seeds. Their mean is a curve with
    `mean`, which has the first seed's run. If `arms` is empty, each run is an arm.
    """
    figures: list[dict[str, Any]] = []
    steps: dict[tuple[int, ...], int] = {}
    for figure in (*FIGURES, _others(runs)):
        closed, panels = figure.title == OTHERS, []
        for key, title in figure.panels.items():
            curves = _curves(key, runs, steps)
            curves += _means(curves, arms, list(steps), steps)
            is_zero = not any(value for curve in curves for value in curve["values"])
            if curves and not (is_zero and (closed or key.startswith(TERMS))):
                name = (name_of(key) or Name("", ""))._asdict()
                panels.append({"key": key, "title": title, **name, "curves": curves})
        if panels:
            shown = {"title": figure.title, "caption": figure.caption, "closed": closed}
            figures.append({**shown, "panels": panels})
    return figures, list(steps)


def _others(runs: Sequence[Sequence[Row]]) -> Figure:
    """The metrics of `runs` that no figure shows, in the order of monitoring/metrics.yaml."""
    shown = {key for figure in FIGURES for key in figure.panels} | {"step", "non_finite"}
    found = {key for rows in runs for row in rows for key in row} - shown
    keys = [*(key for key in NAMES if key in found), *sorted(found - NAMES.keys())]
    caption = "Every other metric that the runs wrote and that is not always 0."
    return Figure(OTHERS, caption, {key: key for key in keys})


def _curves(
    key: str, runs: Sequence[Sequence[Row]], all_steps: dict[tuple[int, ...], int]
) -> list[dict[str, Any]]:
    """The curves of a metric; their steps are added to `all_steps`."""
    curves: list[dict[str, Any]] = []
    for index, rows in enumerate(runs):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if all(value is None for _, value in points):
            continue
        smooth = len(points) >= SMOOTH_FROM and not key.startswith("eval") and key not in SCHEDULES
        each = -(-len(points) // (MAX_POINTS - 1))
        kept = [*points[:-1:each], points[-1]]
        curves.append(
            {
                "run": index,
                "steps": all_steps.setdefault(tuple(step for step, _ in kept), len(all_steps)),
                "values": [None if v is None else float(f"{v:.5g}") for _, v in kept],
                "window": WINDOW if smooth else 1,
                "faint": smooth and len(runs) <= MAX_FAINT_RUNS,
            }
        )
    return curves


def _means(
    curves: Sequence[dict[str, Any]],
    arms: Sequence[int],
    steps: Sequence[tuple[int, ...]],
    all_steps: dict[tuple[int, ...], int],
) -> list[dict[str, Any]]:
    """The mean over the seeds of each arm that has several, at every step that one of them has."""
    means: list[dict[str, Any]] = []
    for arm in dict.fromkeys(arms):
        seeds = [curve for curve in curves if arms[curve["run"]] == arm]
        if len(seeds) < 2:
            continue
        found: dict[int, list[float]] = {}
        for curve in seeds:
            curve["faint"] = False
            for step, value in zip(steps[curve["steps"]], curve["values"], strict=True):
                found.setdefault(step, []).extend([] if value is None else [value])
        values = [
            float(f"{sum(at) / len(at):.5g}") if at else None for _, at in sorted(found.items())
        ]
        place = all_steps.setdefault(tuple(sorted(found)), len(all_steps))
        means.append(seeds[0] | {"steps": place, "values": values, "mean": True})
    return means
