"""The ablation's figure: valid SVG, every mark at its number."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from stable_opd_mcore.demo.ablation import ablation_rows
from stable_opd_mcore.demo.ablation_figure import LEFT, PANEL, ablation_figure
from tests.demo.test_ablation import SUMMARY

SVG = "{http://www.w3.org/2000/svg}"
ARMS = [
    SUMMARY,
    replace(SUMMARY, seed=1, final_accuracy=1.0),
    replace(SUMMARY, arm="a<b", final_accuracy=0.0),
    replace(SUMMARY, arm="a<b", seed=1, final_accuracy=0.0),
]


def test_marks_are_at_their_numbers():
    figure = ElementTree.fromstring(ablation_figure(ablation_rows(ARMS), ARMS))
    left_panel = [
        (float(circle.attrib["cx"]) - LEFT) / PANEL for circle in figure.iter(f"{SVG}circle")
    ]
    assert left_panel[:2] == [0.75, 0.0]
    dashed = [line for line in figure.iter(f"{SVG}line") if "stroke-dasharray" in line.attrib]
    assert (float(dashed[0].attrib["x1"]) - LEFT) / PANEL == 0.25
    ticks = [line for line in figure.iter(f"{SVG}line") if line.attrib["stroke"] == "#888888"]
    assert len(ticks) == 2 * len(ARMS)


def test_arms_are_named_and_equal_results_give_equal_files():
    text = ablation_figure(ablation_rows(ARMS), ARMS)
    figure = ElementTree.fromstring(text)
    labels = {label.text for label in figure.iter(f"{SVG}text")}
    assert {"opd", "a<b", "sampled accuracy at the end", "greedy accuracy at the end"} <= labels
    assert text == ablation_figure(ablation_rows(ARMS), ARMS)
