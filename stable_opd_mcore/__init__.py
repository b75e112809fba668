"""Stable on-policy distillation of large language models on Megatron-Core."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip refuses it, a checkout in PYTHONPATH comes here
    raise ImportError(
        f"Python {sys.version.split()[0]} ({sys.executable}), but stable_opd_mcore needs 3.11 "
        "or later: start it with another, such as python3.12"
    )

from stable_opd_mcore.parallel import megatron_import

megatron_import.install()
