"""The report's figures: the metrics of each figure, and the curves of each run.

The first three are the paper's Figures 2-4: truncation, repetition and accuracy; log-probabilities
and advantage; repetitive and regular tokens. Curves are plain lists for JSON, and the page's script
draws them (templates/figures.js.j2). Not here: reading files (report.py) and tables (tables.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stable_opd_mcore.monitoring.names import NAMES

WINDOW = 5  # steps of the trailing mean
SMOOTH_FROM = 25  # rows from which curves are trailing means
MAX_FAINT_RUNS = 6  # with more runs, single steps are not drawn behind the trailing means

# Six colours of Okabe and Ito, which colour-blind readers can distinguish, then grey and dark red.
# Further labels repeat the colours with dashed lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#AA3377")
DASHES = ("solid", "dash", "dot", "dashdot")

Row = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a metric over steps."""

    key: str
    title: str
    share: bool = False  # the axis runs from 0 to 1


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
            Panel("logprob/teacher", "Teacher log-probability"),
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
            Panel("loss/pg", "Policy gradient"),
            Panel("loss/kl", "KL to the reference"),
            Panel("loss/sft", "Golden solutions"),
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
            Panel("kl/teacher", "KL(student || teacher)"),
            Panel("kl/reference", "KL(student || reference)"),
            Panel("kl/reference_sampled", "KL(student || reference), sampled"),
            Panel("logprob/rollout_gap_mean", "|Engine - trainer| log-probability"),
            Panel("ratio/clip_share", "Clipped ratios", share=True),
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
        "colour": COLOURS[index % len(COLOURS)],
        "dash": DASHES[index // len(COLOURS) % len(DASHES)],
    }


def draw(figure: Figure, runs: Sequence[tuple[str, Sequence[Row]]]) -> dict[str, Any] | None:
    """The figure's panels with a curve per (label, rows); None if no run has values for them."""
    panels = [
        {
            "title": panel.title,
            "meaning": NAMES[panel.key].meaning,
            "key": panel.key,
            "unit": NAMES[panel.key].unit,
            "share": panel.share,
            "curves": curves,
        }
        for panel in figure.panels
        if (curves := _curves(panel.key, runs))
    ]
    if not panels:
        return None
    return {
        "title": figure.title,
        "caption": figure.caption,
        "panels": panels,
        "columns": len(panels) if len(panels) in (2, 4) else 3,
    }


def trailing_mean(values: Sequence[float | None], window: int = WINDOW) -> list[float | None]:
    """Mean of each value and the window - 1 before it, without None; None if all are None."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        defined = [value for value in values[max(0, end - window) : end] if value is not None]
        means.append(sum(defined) / len(defined) if defined else None)
    return means


def _curves(key: str, runs: Sequence[tuple[str, Sequence[Row]]]) -> list[dict[str, Any]]:
    curves = []
    for label, rows in runs:
        points = [(row["step"], row.get(key)) for row in rows if key in row]
        if all(value is None for _, value in points):
            continue
        steps, values = [step for step, _ in points], [value for _, value in points]
        # Evaluations are few: each is a dot.
        smooth = len(points) >= SMOOTH_FROM and not key.startswith("eval")
        curve = {
            "label": label,
            "steps": steps,
            "values": _rounded(trailing_mean(values) if smooth else values),
            "dots": not smooth,
        }
        if smooth and len(runs) <= MAX_FAINT_RUNS:
            curve["each"] = _rounded(values)
        curves.append(curve)
    return curves


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """Values with six digits, which keep the page small."""
    return [None if value is None else float(f"{value:.6g}") for value in values]
