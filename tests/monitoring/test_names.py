"""The listed metrics: each once, with a meaning; others are refused by name."""

import pytest

from stable_opd_mcore.monitoring.names import _ALL, NAMES, require_known


def test_every_metric_is_listed_once_with_an_area_and_a_meaning():
    assert len(NAMES) == len(_ALL)
    for key, name in NAMES.items():
        assert key == "grad_norm" or key.count("/") == 1
        assert name.meaning


def test_unknown_metrics_are_refused_by_name():
    require_known(["loss/total", "grad_norm"])
    with pytest.raises(ValueError, match="unknown metrics loss/a, loss/b: describe"):
        require_known(["loss/b", "loss/total", "loss/a"])
