"""The figures of the report: the metrics of each figure, and the curves of each run.

The first three are the paper's Figures 2-4: truncation, repetition and accuracy; log-probabilities
and advantage; repetitive and regular tokens. Metrics of no figure are drawn in a last one. Curves
are plain lists for JSON; the page's script smooths and draws them (templates/figures.js). Not here:
reading files (page.py) and tables (tables.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stable_opd_mcore.monitoring.names import NAMES

WINDOW = 5  # steps of the trailing mean
SMOOTH_FROM = 25  # rows from which curves are trailing means
MAX_FAINT_RUNS = 6  # with more runs, single steps are not drawn behind the trailing means

MAX_POINTS = 1000  # of one curve; longer ones are means over equal numbers of steps
OTHERS = "Other metrics"

# The colours of labels are the style sheet's --run-0 to --run-7, which differ for the colour-blind.
# Further labels repeat the colours with dashed lines.
NUM_COLOURS = 8
DASHES = ("solid", "dash", "dot", "dashdot")

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
    title: str
    caption: str
    panels: tuple[Panel, ...]


FIGURES = (
    Figure(
        "Truncation, repetition, accuracy",
        "In a collapse truncation and repetition rise within tens of steps, and accuracy falls "
        "(the paper's Figure 2).",
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
        "All three rise when a collapse begins: the student moves to tokens that both models "
        "find probable, not to better answers (the paper's Figure 3).",
        (
            Panel("logprob/student", "Student log-probability"),
            Panel("logprob/teacher", "Teacher log-probability", term=True),
            Panel("advantage/mean", "Mean advantage"),
        ),
    ),
    Figure(
        "Repetitive and regular tokens",
        "In a collapse the advantage is near zero inside repetitive tails and negative elsewhere, "
        "so its mean rises with the share of repetitive tokens (the paper's Figure 4).",
        (
            Panel("advantage/repetitive", "Advantage, repetitive tokens"),
            Panel("advantage/regular", "Advantage, regular tokens"),
            Panel("tokens/repetitive_share", "Repetitive tokens", share=True),
            Panel("advantage/abs_share_repetitive", "|Advantage| in repetitive tails", share=True),
        ),
    ),
    Figure(
        "Loss and gradient",
        "The loss is the sum of its parts, coefficients included.",
        (
            Panel("loss/total", "Total"),
            Panel("loss/pg", "Policy gradient", term=True),
            Panel("loss/kl", "KL to the reference", term=True),
            Panel("loss/sft", "Golden solutions", term=True),
            Panel("loss/moe_aux", "Balance of experts", term=True),
            Panel("grad_norm", "Gradient norm"),
            Panel("optimizer/lr", "Learning rate"),
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
        "The 16 most probable tokens of each model; in a healthy run the shared ones hold nearly "
        "all probability. If the teacher does not stop where the student stops, the student is "
        "trained not to stop.",
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
    """Colour and dash of the index-th label; the first 32 differ."""
    return {
        "colour": f"--run-{index % NUM_COLOURS}",
        "dash": DASHES[index // NUM_COLOURS % len(DASHES)],
    }


def draw_all(
    runs: Sequence[tuple[str, Sequence[Row]]], points: int = MAX_POINTS, with_others: bool = True
) -> list[dict[str, Any]]:
    """All figures that have values, the metrics of no figure last if wanted."""
    figures = (*FIGURES, _others(runs)) if with_others else FIGURES
    drawn = (draw(figure, runs, points) for figure in figures)
    return [figure for figure in drawn if figure is not None]


def points_of_curve(points: int, num_runs: int) -> int:
    """The points that a curve of `num_runs` in a panel may have, of `points` for a single run."""
    return max(points // 10, min(points, 4 * points // max(1, num_runs)))


def draw(
    figure: Figure, runs: Sequence[tuple[str, Sequence[Row]]], points: int = MAX_POINTS
) -> dict[str, Any] | None:
    """The figure's panels with a curve per (label, rows); None if no run has values for them.

    A curve has its run's place in `runs`, steps and values. Its `window` is the number of points of
    the trailing mean to draw, 1 for none. `faint` asks for the single points behind the mean,
    `dots` for a dot at every point.
    """
    panels = [
        {
            "title": panel.title,
            "key": panel.key,
            "meaning": NAMES[panel.key].meaning if panel.key in NAMES else "",
            "unit": NAMES[panel.key].unit if panel.key in NAMES else "",
            "share": panel.share,
            "curves": curves,
        }
        for panel in figure.panels
        if (curves := _curves(panel.key, runs, points)) and not (panel.term and _all_zero(curves))
    ]
    if not panels:
        return None
    return {
        "title": figure.title,
        "caption": figure.caption,
        "panels": panels,
        "columns": len(panels) if len(panels) in (2, 4) else 3,
        "closed": figure.title == OTHERS,
    }


def trailing_mean(values: Sequence[float | None], window: int = WINDOW) -> list[float | None]:
    """Mean of each value and the window - 1 before it, without None; None if all are None."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        defined = [value for value in values[max(0, end - window) : end] if value is not None]
        means.append(sum(defined) / len(defined) if defined else None)
    return means


def _others(runs: Sequence[tuple[str, Sequence[Row]]]) -> Figure:
    """The metrics of `runs` that no figure shows, in the order of monitoring/names.py."""
    shown = {panel.key for figure in FIGURES for panel in figure.panels} | {"step", "non_finite"}
    found = {key for _, rows in runs for row in rows for key in row} - shown
    known = [key for key in NAMES if key in found]
    panels = tuple(Panel(key, key, term=True) for key in (*known, *sorted(found - NAMES.keys())))
    return Figure(
        OTHERS, "Every other metric that the runs wrote and that is not always 0.", panels
    )


def _curves(
    key: str, runs: Sequence[tuple[str, Sequence[Row]]], points_of_one_run: int
) -> list[dict[str, Any]]:
    points_of_run = [
        [(row["step"], row.get(key)) for row in rows if key in row] for _, rows in runs
    ]
    limit = points_of_curve(points_of_one_run, len(runs))
    curves = []
    for index, points in enumerate(points_of_run):
        if all(value is None for _, value in points):
            continue
        # Evaluations are few: each is a dot.
        smooth = len(points) >= SMOOTH_FROM and not key.startswith("eval")
        steps, values = _thinned(points, limit)
        curves.append(
            {
                "run": index,
                "steps": steps,
                "values": values,
                "window": WINDOW if smooth else 1,
                "faint": smooth and len(runs) <= MAX_FAINT_RUNS,
                "dots": not smooth,
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
