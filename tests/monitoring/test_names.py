"""The listed metrics: each once, with a meaning; others are refused by name."""

import pytest

from stable_opd_mcore.monitoring.names import NAMES, TABLE, name_of, require_known


def test_every_metric_is_listed_once_with_an_area_and_a_meaning():
    assert NAMES.keys() >= {key for key in TABLE["metrics"] if "*" not in key}
    for key, name in NAMES.items():
        assert key == "grad_norm" or key.count("/") == 1
        assert name.meaning


def test_metrics_of_sources_have_a_meaning_under_any_name_and_unknown_ones_are_refused():
    require_known(["source/a.jsonl/kl", "teacher/math/row_share"])
    assert name_of("source/x/accuracy") == name_of("teacher/y/accuracy")
    assert name_of("source/x/accuracy") is not None
    with pytest.raises(ValueError, match="unknown metrics loss/a, source/kl, source/x/gain: desc"):
        require_known(["source/x/gain", "loss/a", "loss/total", "source/kl"])
