"""Models: one source of weights each, and teachers in the trainer or on servers."""

import pytest

from stable_opd_mcore.errors import ConfigError
from tests.config.cases import run_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("student.path=a student.architecture={}", "path and architecture are both set"),
        ("teacher.path=a teacher.architecture={}", "path and architecture are both set"),
        ("teacher.engine=sglang", "sglang needs one of them, and only sglang reads them"),
        ("teacher.urls=[http://a:1]", "sglang needs one of them, and only sglang reads them"),
        ("teacher.routes.math=[http://a:1]", "needs one of them, and only sglang reads them"),
        (
            "teacher.engine=sglang teacher.urls=[http://a:1] teacher.routes.math=[http://b:1]",
            "and teacher.routes .several.: drop one",
        ),
        ("teacher.engine=sglang teacher.urls=[http://a:1] teacher.window=9", "teacher.window or"),
        (
            "teacher.path=self teacher.weights=live",
            r"weights=live and no teacher\.prompt: .*nothing to learn",
        ),
        ("teacher.path=a teacher.weights=ema", r"weights=ema with teacher\.path=a"),
        ("teacher.path=self teacher.window=9", r"teacher\.window=9 with teacher\.path=self"),
        (
            "teacher.path=self teacher.weights=live teacher.prompt=x fp8.teacher=tensorwise",
            r"fp8\.teacher=tensorwise with teacher\.weights=live",
        ),
        (
            "student.path=a student.lora.rank=4 reference.update=ema kl.beta=0.1",
            r"reference\.update=ema with student\.lora: .* set reference\.update=every",
        ),
        (
            "student.path=a student.lora.rank=4 reference.update=every kl.beta=1 reference.path=b",
            r"reference\.update=every with student\.lora, reference\.path=b and",
        ),
        (
            "student.path=a student.lora.path=b kl.beta=1 fp8.reference=tensorwise",
            r"fp8\.reference=tensorwise with student\.lora\.path .* set fp8\.reference=null",
        ),
        (
            "student.path=a student.lora.rank=4 teacher.path=self teacher.weights=ema",
            r"teacher\.weights=ema with student\.lora: .* set teacher\.weights=frozen",
        ),
        ("student.lora.rank=0", "student.lora.rank: Input should be greater than 0"),
        ("student.window=0", "student.window: Input should be greater than 0"),
        ("student.rope_theta=.inf", "student.rope_theta: Input should"),
    ],
)
def test_models_with_two_sources_or_none_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        run_of(settings)
