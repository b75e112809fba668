"""The figures of the report: the metrics of each figure, and the curves of each run.

The page of `stable-opd report`, the live view and the demo's report draw these. Captions say what
is drawn; what a run did is computed (outcomes.py). Metrics of no figure are drawn in a last one.
Curves are plain lists for JSON, which the page's script smooths and draws (templates/figures.js).
Not here: reading files (sinks.py), the page (report.py), tables (tables.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stable_opd_mcore.monitoring.names import NAMES

WINDOW = 5  # steps of the trailing mean
SMOOTH_FROM = 25  # rows from which curves are trailing means
MAX_FAINT_RUNS = 6  # with more runs, single steps are not drawn behind the trailing means
SCHEDULES = frozenset({"optimizer/lr", "kl/beta", "mixture/lambda"})  # drawn as they were set

MAX_POINTS, LEAST_POINTS = 1000, 20  # of one curve; longer ones are means over equal numbers
CURVE_BYTES = 1_000_000  # of all curves of a page
BYTES_OF_A_POINT, BYTES_OF_A_CURVE = 9, 60  # as JSON
OTHERS = "Other metrics"

# Angle between the hues of two labels in a row, 360 / golden ratio^2: all hues of a page differ.
HUE_STEP, FIRST_HUE = 137.508, 250
DASHES = ("", "8 4", "2 3", "8 3 2 3")  # as in SVG; the next one after 8 labels
LABELS_OF_A_DASH = 8

Row = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a metric over steps."""

    key: str
    title: str
    share: bool = False  # the axis runs from 0 to 1
    term: bool = False  # of a term that a run may lack: left out where all values are 0


@dataclass(frozen=True)
class Figure:
    """Panels that stand together under one title."""

    title: str
    caption: str
    panels: tuple[Panel, ...]


FIGURES = (
    Figure(
        "Truncation, repetition, accuracy",
        "Over the rollouts of a step and over held-out problems (the paper's Figure 2).",
        (
            Panel("rollout/truncation_rate", "Rollouts truncated", share=True),
            Panel("rollout/repetition_rate", "Rollouts repetitive", share=True),
            Panel("rollout/accuracy", "Rollout accuracy", share=True),
            Panel("eval/truncation_rate", "Held-out responses truncated", share=True),
            Panel("eval/repetition_rate", "Held-out responses repetitive", share=True),
            Panel("eval/accuracy", "Held-out accuracy", share=True),
        ),
    ),
    Figure(
        "Log-probabilities and advantage",
        "Means over the tokens of a step's rollouts (the paper's Figure 3).",
        (
            Panel("logprob/student", "Student log-probability"),
            Panel("logprob/teacher", "Teacher log-probability", term=True),
            Panel("advantage/mean", "Mean advantage"),
        ),
    ),
    Figure(
        "Repetitive and regular tokens",
        "The advantage inside and outside the loops that responses end in, and how many tokens are "
        "in loops (the paper's Figure 4).",
        (
            Panel("advantage/repetitive", "Advantage, repetitive tokens"),
            Panel("advantage/regular", "Advantage, regular tokens"),
            Panel("tokens/repetitive_share", "Repetitive tokens", share=True),
            Panel("advantage/abs_share_repetitive", "|Advantage| in repetitive tails", share=True),
        ),
    ),
    Figure(
        "Loss, gradient and schedules",
        "The loss is the sum of its parts, coefficients included. Schedules are drawn as they were "
        "set, without a mean.",
        (
            Panel("loss/total", "Total"),
            Panel("loss/pg", "Policy gradient", term=True),
            Panel("loss/kl", "KL to the reference", term=True),
            Panel("loss/sft", "Golden solutions", term=True),
            Panel("loss/moe_aux", "Balance of experts", term=True),
            Panel("grad_norm", "Gradient norm"),
            Panel("optimizer/lr", "Learning rate"),
            Panel("kl/beta", "\u03b2, weight of the KL", term=True),
            Panel("mixture/lambda", "\u03bb, weight of golden solutions", term=True),
        ),
    ),
    Figure(
        "Response length",
        "In tokens, the stop token included.",
        (
            Panel("rollout/response_length_mean", "Rollouts, mean"),
            Panel("rollout/response_length_p95", "Rollouts, 95th percentile"),
            Panel("eval/response_length_mean", "Held-out responses, mean"),
        ),
    ),
    Figure(
        "Entropy and divergence",
        "On rollout tokens. Sampled estimates are mean log-ratios and may be negative.",
        (
            Panel("entropy/student", "Entropy of the student"),
            Panel("kl/teacher", "KL(student || teacher)", term=True),
            Panel("kl/reference", "KL(student || reference)", term=True),
            Panel("kl/reference_sampled", "KL(student || reference), sampled", term=True),
            Panel("logprob/rollout_gap_mean", "|Engine - trainer| log-probability"),
            Panel("ratio/clip_share", "Clipped ratios", share=True, term=True),
        ),
    ),
    Figure(
        "Student and teacher",
        "The 16 most probable tokens of each model, and the probability of stopping at the last "
        "position of a response.",
        (
            Panel("overlap/ratio", "Shared top tokens", share=True),
            Panel("overlap/student_mass", "Student's mass on them", share=True),
            Panel("overlap/advantage", "Advantage on them"),
            Panel("entropy/gap", "Entropy gap"),
            Panel("stop/student_mass", "Student's stop probability", share=True),
            Panel("stop/teacher_mass", "Teacher's stop probability", share=True),
        ),
    ),
    Figure(
        "Speed and memory",
        "Wall-clock time of a step and its phases; peak memory since the process started.",
        (
            Panel("throughput/tokens_per_second", "Throughput"),
            Panel("time/total", "Step"),
            Panel("time/rollout", "Rollout phase"),
            Panel("time/score", "Score phase"),
            Panel("time/update", "Update phase"),
            Panel("memory/peak_gib", "Peak memory"),
        ),
    ),
)


def style(index: int) -> dict[str, str]:
    """Colour and dash of the index-th label. No two labels share a hue."""
    hue = round((FIRST_HUE + HUE_STEP * index) % 360, 1)
    return {
        "colour": f"light-dark(oklch(0.54 0.16 {hue}), oklch(0.76 0.14 {hue}))",
        "dash": DASHES[index // LABELS_OF_A_DASH % len(DASHES)],
    }


def draw_all(runs: Sequence[Sequence[Row]], points: int = MAX_POINTS) -> list[dict[str, Any]]:
    """The figures that have values, with the metrics of no figure last.

    A figure has a title, a caption, `closed` and panels. A panel has key, title, meaning, unit,
    `share` and a curve per run that has values. A curve has its run's place in `runs`, steps,
    values, the `window` of the trailing mean to draw, 1 for none, and `faint`: single points are
    drawn behind the mean.

    Args:
        runs: the rows of each run.
        points: of one curve, at most.
    """
    figures: list[dict[str, Any]] = []
    for figure in (*FIGURES, _others(runs)):
        panels = [
            {
                "key": panel.key,
                "title": panel.title,
                "meaning": NAMES[panel.key].meaning if panel.key in NAMES else "",
                "unit": NAMES[panel.key].unit if panel.key in NAMES else "",
                "share": panel.share,
                "curves": curves,
            }
            for panel in figure.panels
            if (curves := _curves(panel.key, runs, points))
            and not (panel.term and _all_zero(curves))
        ]
        if panels:
            closed = figure.title == OTHERS
            shown = {"title": figure.title, "caption": figure.caption, "closed": closed}
            figures.append({**shown, "panels": panels})
    return figures


def points_that_fit(runs: Sequence[Sequence[Row]]) -> int:
    """The points of one curve with which all curves of `runs` have about CURVE_BYTES."""
    curves = sum(len({key for row in rows for key in row}) for rows in runs)
    room = CURVE_BYTES // max(1, curves) - BYTES_OF_A_CURVE
    return max(LEAST_POINTS, min(MAX_POINTS, room // BYTES_OF_A_POINT))


def _others(runs: Sequence[Sequence[Row]]) -> Figure:
    """The metrics of `runs` that no figure shows, in the order of monitoring/names.py."""
    shown = {panel.key for figure in FIGURES for panel in figure.panels} | {"step", "non_finite"}
    found = {key for rows in runs for row in rows for key in row} - shown
    keys = [*(key for key in NAMES if key in found), *sorted(found - NAMES.keys())]
    return Figure(
        OTHERS,
        "Every other metric that the runs wrote and that is not always 0.",
        tuple(Panel(key, key, term=True) for key in keys),
    )


def _curves(key: str, runs: Sequence[Sequence[Row]], limit: int) -> list[dict[str, Any]]:
    curves: list[dict[str, Any]] = []
    for index, rows in enumerate(runs):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if all(value is None for _, value in points):
            continue
        smooth = len(points) >= SMOOTH_FROM and not key.startswith("eval") and key not in SCHEDULES
        steps, values = _thinned(points, limit)
        curves.append(
            {
                "run": index,
                "steps": steps,
                "values": values,
                "window": WINDOW if smooth else 1,
                "faint": smooth and len(runs) <= MAX_FAINT_RUNS,
            }
        )
    return curves


def _thinned(
    points: Sequence[tuple[int, float | None]], limit: int
) -> tuple[list[int], list[float | None]]:
    """At most `limit` points: equal numbers of them are replaced by their last step and mean.

    Values have five digits, which keep the page small.
    """
    each = -(-len(points) // limit)
    steps, values = [], []
    for start in range(0, len(points), each):
        group = points[start : start + each]
        steps.append(group[-1][0])
        defined = [value for _, value in group if value is not None]
        values.append(float(f"{sum(defined) / len(defined):.5g}") if defined else None)
    return steps, values


def _all_zero(curves: Sequence[Mapping[str, Any]]) -> bool:
    return all(not value for curve in curves for value in curve["values"])
