"""Figures: their metrics and styles, and the curves of known rows."""

from itertools import pairwise

from stable_opd_mcore.commands.report.figures import (
    FIGURES,
    MAX_FAINT_RUNS,
    MAX_POINTS,
    plot_data,
    style,
)
from stable_opd_mcore.monitoring.names import require_known

STEPS = range(30)


def curves_of(runs, key):
    figures, steps = plot_data(runs)
    (panel,) = [p for figure in figures for p in figure["panels"] if p["key"] == key]
    return [curve | {"steps": list(steps[curve["steps"]])} for curve in panel["curves"]]


def test_figures_show_known_metrics_once():
    keys = [key for figure in FIGURES for key in figure.panels]
    require_known(keys)
    assert len(keys) == len(set(keys))


def test_no_two_labels_share_a_hue():
    hues = sorted(float(style(index)["colour"].split()[2].rstrip("),")) for index in range(50))
    assert min(after - before for before, after in pairwise(hues)) > 2


def test_curves_keep_gaps_and_evaluations_have_no_mean():
    rows = [{"step": step, "loss/total": float(step)} for step in STEPS]
    rows[3] |= {"eval/accuracy": 0.25}
    rows[9] |= {"eval/accuracy": None}
    rows[12] |= {"eval/accuracy": 0.75}
    assert [figure["title"] for figure in plot_data([rows])[0]] == [
        "Truncation, repetition, accuracy",
        "Loss, gradient and schedules",
    ]
    assert curves_of([rows], "loss/total") == [
        {
            "run": 0,
            "steps": list(STEPS),
            "values": [float(step) for step in STEPS],
            "window": 5,
            "faint": True,
        }
    ]
    assert curves_of([rows], "eval/accuracy") == [
        {"run": 0, "steps": [3, 9, 12], "values": [0.25, None, 0.75], "window": 1, "faint": False}
    ]


def test_schedules_are_plotted_as_set_and_many_runs_without_their_single_steps():
    for key in ("optimizer/lr", "kl/beta", "mixture/lambda"):
        (curve,) = curves_of([[{"step": step, key: float(step > 20)} for step in STEPS]], key)
        assert (curve["window"], curve["faint"]) == (1, False)
    rows = [{"step": step, "grad_norm": 1 / 3} for step in STEPS]
    for count, single_steps in ((MAX_FAINT_RUNS, True), (MAX_FAINT_RUNS + 1, False)):
        curves = curves_of([rows] * count, "grad_norm")
        assert [curve["run"] for curve in curves] == list(range(count))
        assert all(curve["faint"] == single_steps for curve in curves)
        assert curves[0]["values"] == [0.33333] * len(STEPS)


def test_terms_that_no_run_uses_are_left_out_and_metrics_of_no_figure_come_last_and_closed():
    rows = [{"step": 1, "loss/kl": 0.0, "grad_norm": 0.0, "time/sync": 2.0, "of/a/later": 3.0}]
    (first, last), steps = plot_data([rows])
    assert steps == [(1,)]
    assert [panel["key"] for panel in first["panels"]] == ["grad_norm"]
    assert (first["closed"], last["closed"]) == (False, True)
    assert [panel["key"] for panel in last["panels"]] == ["time/sync", "of/a/later"]
    assert last["panels"][0]["unit"] == "s"


def test_long_curves_are_every_nth_point_and_the_last():
    rows = [{"step": step, "grad_norm": float(step)} for step in range(1, 2 * MAX_POINTS + 3)]
    (curve,) = curves_of([rows], "grad_norm")
    assert MAX_POINTS // 2 < len(curve["steps"]) <= MAX_POINTS
    assert curve["values"] == [float(step) for step in curve["steps"]]
    assert (curve["steps"][:3], curve["steps"][-1]) == ([1, 4, 7], 2 * MAX_POINTS + 2)


def test_seeds_of_an_arm_have_a_mean():
    runs = [
        [{"step": 1, "grad_norm": 1.0}, {"step": 2, "grad_norm": None}],
        [{"step": 1, "grad_norm": 4.0}, {"step": 2, "grad_norm": 6.0}, {"step": 3}],
        [{"step": 1, "grad_norm": 9.0}],
    ]
    figures, steps = plot_data(runs, arms=[0, 0, 1])
    (panel,) = [p for figure in figures for p in figure["panels"] if p["key"] == "grad_norm"]
    means = [curve for curve in panel["curves"] if "mean" in curve]
    assert [(curve["run"], curve["values"]) for curve in means] == [(0, [2.5, 6.0])]
    assert steps[means[0]["steps"]] == (1, 2)
