"""Figures: their metrics and styles, trailing means, and the curves of known rows."""

from stable_opd_mcore.monitoring.figures import (
    COLOURS,
    DASHES,
    FIGURES,
    MAX_FAINT_RUNS,
    draw,
    style,
    trailing_mean,
)
from stable_opd_mcore.monitoring.names import require_known


def test_figures_show_known_metrics_once():
    keys = [panel.key for figure in FIGURES for panel in figure.panels]
    require_known(keys)
    assert len(keys) == len(set(keys))


def test_labels_have_different_styles():
    styles = [tuple(style(index).values()) for index in range(len(COLOURS) * len(DASHES))]
    assert len(set(styles)) == len(styles)


def test_trailing_mean_skips_what_is_undefined():
    assert trailing_mean([1, None, 5, None, None], window=2) == [1, 1, 5, 5, None]


def test_curves_keep_gaps_and_evaluations_are_dots():
    rows = [{"step": step, "loss/total": float(step)} for step in range(30)]
    rows[3] |= {"eval/accuracy": 0.25}
    rows[9] |= {"eval/accuracy": 0.75}
    figures = {figure.title: figure for figure in FIGURES}
    loss = draw(figures["Loss and gradient"], [("a", rows)])
    assert [panel["key"] for panel in loss["panels"]] == ["loss/total"]
    (curve,) = loss["panels"][0]["curves"]
    assert curve["steps"] == list(range(30))
    assert not curve["dots"]
    assert curve["values"][10] == 8.0
    assert curve["each"][10] == 10.0
    accuracy = draw(figures["Truncation, repetition, accuracy"], [("a", rows)])
    (curve,) = accuracy["panels"][0]["curves"]
    assert curve == {"label": "a", "steps": [3, 9], "values": [0.25, 0.75], "dots": True}
    assert draw(figures["Speed and memory"], [("a", rows)]) is None


def test_many_runs_are_drawn_without_their_single_steps():
    rows = [{"step": step, "grad_norm": 1 / 3} for step in range(30)]
    (loss,) = [figure for figure in FIGURES if figure.title == "Loss and gradient"]
    for count, single_steps in ((MAX_FAINT_RUNS, True), (MAX_FAINT_RUNS + 1, False)):
        drawn = draw(loss, [(str(run), rows) for run in range(count)])
        assert drawn is not None
        curves = drawn["panels"][0]["curves"]
        assert [curve["label"] for curve in curves] == [str(run) for run in range(count)]
        assert all(("each" in curve) == single_steps for curve in curves)
        assert curves[0]["values"] == [0.333333] * 30
