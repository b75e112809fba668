"""Every module that computes something has a test file of its name, or an entry here.

An entry says why the module needs no test of its own, or names the test file that covers it.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_TEST = {
    "__main__": "calls cli.main",
    "config/data": "settings without code",
    "config/evaluation": "settings without code",
    "config/section": "the base class of all settings",
    "data/rows": "a record",
    "errors": "exception classes",
    "models/spec": "hands Megatron the classes that test_attention.py tests",
    "records": "records",
    "rollout/sglang/records": "records",
    "train/state": "a record",
}
TESTED_BY = {
    "rollout/sglang/build": "integration/test_sglang_training.py",
    "rollout/sglang/engine": "integration/test_sglang_server.py",
    "rollout/sglang/group": "rollout/sglang/test_sync.py",
    "rollout/sglang/transports": "rollout/sglang/test_sync.py",
}
MODULES = sorted(
    path.relative_to(ROOT / "stable_opd_mcore").with_suffix("")
    for path in (ROOT / "stable_opd_mcore").rglob("*.py")
    if path.name != "__init__.py" and "sglang_cpu_stand_in" not in path.parts
)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_has_a_test_file(module):
    own = module.with_name(f"test_{module.name}.py")
    assert str(module) in NO_TEST or (ROOT / "tests" / TESTED_BY.get(str(module), own)).is_file()


def test_entries_are_of_modules_that_exist():
    assert {*NO_TEST, *TESTED_BY} <= set(map(str, MODULES))
