"""Figures: their metrics and styles, trailing means, and the curves of known rows."""

from stable_opd_mcore.monitoring.figures import (
    DASHES,
    FIGURES,
    MAX_FAINT_RUNS,
    MAX_POINTS,
    NUM_COLOURS,
    draw,
    draw_all,
    style,
    trailing_mean,
)
from stable_opd_mcore.monitoring.names import require_known


def test_figures_show_known_metrics_once():
    keys = [panel.key for figure in FIGURES for panel in figure.panels]
    require_known(keys)
    assert len(keys) == len(set(keys))


def test_labels_have_different_styles():
    styles = [tuple(style(index).values()) for index in range(NUM_COLOURS * len(DASHES))]
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
    assert curve == {
        "run": 0,
        "steps": list(range(30)),
        "values": [float(step) for step in range(30)],
        "window": 5,
        "faint": True,
        "dots": False,
    }
    accuracy = draw(figures["Truncation, repetition, accuracy"], [("a", rows)])
    (curve,) = accuracy["panels"][0]["curves"]
    assert curve == {
        "run": 0,
        "steps": [3, 9],
        "values": [0.25, 0.75],
        "window": 1,
        "faint": False,
        "dots": True,
    }
    assert draw(figures["Speed and memory"], [("a", rows)]) is None


def test_many_runs_are_drawn_without_their_single_steps():
    rows = [{"step": step, "grad_norm": 1 / 3} for step in range(30)]
    (loss,) = [figure for figure in FIGURES if figure.title == "Loss and gradient"]
    for count, single_steps in ((MAX_FAINT_RUNS, True), (MAX_FAINT_RUNS + 1, False)):
        drawn = draw(loss, [(str(run), rows) for run in range(count)])
        assert drawn is not None
        curves = drawn["panels"][0]["curves"]
        assert [curve["run"] for curve in curves] == list(range(count))
        assert all(curve["faint"] == single_steps for curve in curves)
        assert curves[0]["values"] == [0.33333] * 30


def test_terms_that_no_run_uses_are_left_out():
    rows = [
        {"step": step, "loss/kl": 0.0, "loss/sft": 0.5 * step, "grad_norm": 0.0} for step in (1, 2)
    ]
    (loss,) = draw_all([("a", rows)])
    assert [panel["key"] for panel in loss["panels"]] == ["loss/sft", "grad_norm"]


def test_metrics_of_no_figure_come_last_and_closed():
    rows = [{"step": 1, "grad_norm": 1.0, "time/sync": 2.0, "of/a/later/version": 3.0}]
    first, last = draw_all([("a", rows)])
    assert not first["closed"]
    assert last["closed"]
    assert [panel["key"] for panel in last["panels"]] == ["time/sync", "of/a/later/version"]
    assert last["panels"][0]["unit"] == "s"


def test_long_curves_are_means_over_equal_numbers_of_steps():
    count = 2 * MAX_POINTS + 2
    rows = [{"step": step, "grad_norm": float(step)} for step in range(1, count + 1)]
    curve = draw_all([("a", rows)])[0]["panels"][0]["curves"][0]
    assert len(curve["steps"]) <= MAX_POINTS
    assert curve["steps"][:2] == [3, 6]
    assert curve["values"][:2] == [2.0, 5.0]
    assert curve["steps"][-1] == count
    assert draw_all([("a", rows)] * 40)[0]["panels"][0]["curves"][0]["steps"][0] == 21
