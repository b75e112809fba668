"""Every module that computes something has a test file of its name.

An entry of NO_TEST says why a module has none.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_TEST = {
    "__main__": "calls cli.main",
    "checks/finding": "a record",
    "config/data": "settings without code",
    "config/evaluation": "settings without code",
    "config/section": "the base class of all settings",
    "data/rows": "a record",
    "errors": "exception classes",
    "models/spec": "hands Megatron the classes that test_attention.py tests",
    "models/weights": "test_huggingface.py writes and refuses them, test_reference.py copies them",
    "preparation/recipes": "a table; test_job.py reads it",
    "rehearsal/pretended_gpu": "changes its process for good; test_te_layers.py starts one",
    "rollout/sglang/records": "records; test_dispatch.py extends and continues them",
    "serving/timeouts": "numbers",
    "train/run": "a record",
}
MODULES = sorted(
    path.relative_to(ROOT / "stable_opd_mcore").with_suffix("")
    for path in (ROOT / "stable_opd_mcore").rglob("*.py")
    if path.name != "__init__.py"
)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_has_a_test_file(module):
    own = ROOT / "tests" / module.with_name(f"test_{module.name}.py")
    assert own.is_file() != (str(module) in NO_TEST)


def test_entries_are_of_modules_that_exist():
    assert NO_TEST.keys() <= set(map(str, MODULES))
