"""Settings of served rollouts and teachers that exclude each other."""

import pytest

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.errors import ConfigError


def settings(**sections):
    return {
        "run": {"name": "r"},
        "student": {"architecture": {}},
        "tokenizer": {"path": "synthetic"},
        "data": {"train": {"path": "synthetic:arithmetic"}},
    } | sections


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"async_steps": 1, "max_staleness": 1}}, "needs rollout.engine=sglang"),
        ({"rollout": {"engine": "sglang", "async_steps": 1}}, "set rollout.max_staleness=1"),
        (
            {"rollout": {"engine": "sglang", "sglang": {"placement": "external"}}},
            "external and sglang.urls",
        ),
        ({"teacher": {"engine": "sglang"}}, "teacher.urls or teacher.routes"),
        (
            {
                "teacher": {"engine": "sglang", "urls": ["http://a"]},
                "sampling": {"temperature": 0.7},
            },
            "scores prompts at temperature 1 alone",
        ),
        (
            {"teacher": {"engine": "sglang", "urls": ["http://a"]}, "parallel": {"context": 2}},
            "set parallel.context=1 or teacher.engine=megatron",
        ),
    ],
)
def test_conflicting_settings_are_refused_with_the_remedy(sections, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(settings(**sections), origin="here")
