"""The ablation's figure: one line per arm with its mean, its interval and every seed, as SVG.

Plain text, so that equal results give equal files. Not here: the numbers (ablation.py).
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from stable_opd_mcore.demo.ablation import AblationRow, Estimate
from stable_opd_mcore.demo.summary import ArmSummary

LINE_HEIGHT, TOP, LEFT, PANEL, GAP, BOTTOM = 26, 44, 120, 300, 30, 34
SAMPLED, GREEDY = "#0072B2", "#D55E00"


def ablation_figure(rows: Sequence[AblationRow], arms: Sequence[ArmSummary]) -> str:
    """An SVG with two panels, sampled and greedy accuracy at the end, on axes from 0 to 1.

    A dot is the mean over seeds, a bar its interval, a tick one seed. The dashed line is the mean
    accuracy of the students at the start.
    """
    starts = {(arm.seed, arm.initial_accuracy, arm.greedy_initial_accuracy) for arm in arms}
    mean_start = [sum(start[field] for start in starts) / len(starts) for field in (1, 2)]
    height = TOP + LINE_HEIGHT * len(rows) + BOTTOM
    width = LEFT + 2 * PANEL + GAP + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    parts += [_text(LEFT - 10, _line(index) + 4, row.arm, "end") for index, row in enumerate(rows)]
    panels = (
        ("sampled accuracy at the end", LEFT, SAMPLED),
        ("greedy accuracy at the end", LEFT + PANEL + GAP, GREEDY),
    )
    for panel, (title, left, colour) in enumerate(panels):
        parts += _axes(title, left, len(rows))
        start = left + PANEL * mean_start[panel]
        parts.append(_stroke(start, TOP - 8, start, _line(len(rows)) - 10, "#555555", dash="4 3"))
        for index, row in enumerate(rows):
            seeds = [
                (arm.final_accuracy, arm.greedy_final_accuracy)[panel]
                for arm in arms
                if arm.arm == row.arm
            ]
            estimate = (row.sampled, row.greedy)[panel]
            parts += _arm(left, _line(index), estimate, seeds, colour)
    return "\n".join([*parts, "</svg>", ""])


def _arm(
    left: float, y: float, estimate: Estimate, seeds: Sequence[float], colour: str
) -> list[str]:
    low, high = left + PANEL * estimate.low, left + PANEL * estimate.high
    ticks = [
        _stroke(left + PANEL * value, y - 6, left + PANEL * value, y + 6, "#888888")
        for value in seeds
    ]
    mean = left + PANEL * estimate.mean
    dot = f'<circle cx="{mean:.1f}" cy="{y}" r="5" fill="{colour}"/>'
    return [*ticks, _stroke(low, y, high, y, colour, thickness=3), dot]


def _axes(title: str, left: float, lines: int) -> list[str]:
    """The title, and a grid line with its label at every fifth from 0 to 1."""
    bottom = _line(lines) - 10
    parts = [_text(left, TOP - 22, title, "start")]
    for tick in range(6):
        x = left + PANEL * tick / 5
        parts.append(_stroke(x, TOP - 8, x, bottom, "#dddddd"))
        parts.append(_text(x, bottom + 16, f"{tick / 5:.1f}", "middle"))
    return parts


def _line(index: int) -> float:
    return TOP + LINE_HEIGHT * index + 8


def _stroke(
    x1: float, y1: float, x2: float, y2: float, colour: str, thickness: int = 1, dash: str = ""
) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{thickness}"{dashes}/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
