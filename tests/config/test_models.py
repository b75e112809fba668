"""Models: one source of weights each, and teachers in the trainer or on servers."""

import pytest

from stable_opd_mcore.errors import ConfigError
from tests.config.cases import run_with


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"student": {"path": "a", "architecture": {}}}, "give either path or architecture"),
        ({"teacher": {"path": "a", "architecture": {}}}, "give either path or architecture"),
        ({"teacher": {"engine": "sglang"}}, "teacher.urls or teacher.routes go together"),
        ({"teacher": {"urls": ["http://a"]}}, "teacher.urls or teacher.routes go together"),
        ({"teacher": {"routes": {"math": ["http://a"]}}}, "teacher.urls or teacher.routes go tog"),
        (
            {
                "teacher": {
                    "engine": "sglang",
                    "urls": ["http://a"],
                    "routes": {"math": ["http://b"]},
                }
            },
            "give either teacher.urls",
        ),
        (
            {"teacher": {"urls": ["http://a"], "engine": "sglang", "window": 9}},
            "teacher.window and",
        ),
        ({"student": {"window": 0}}, "student.window: Input should be greater than 0"),
        ({"student": {"rope_theta": float("inf")}}, "student.rope_theta: Input should"),
    ],
)
def test_models_with_two_sources_or_none_are_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        run_with(**sections)
