"""Which file may import which: only lower rows and its own folder, and never in a circle.

Every import counts: also those inside functions and those only for type checkers.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "stable_opd_mcore"
ROOT = Path(__file__).parents[1] / PACKAGE
ROWS = {
    "__main__": 11,
    "cli": 10,
    "cli_files": 9,
    "demo": 9,
    "rehearsal": 9,
    "train": 8,
    "preparation": 8,
    "checks": 7,
    "monitoring": 7,
    "evaluation": 6,
    "scoring": 5,
    "rollout": 5,
    "planning": 4,
    "run_inputs": 4,
    "models": 3,
    "losses": 2,  # losses and data know no model: one below, so that models may name a Head
    "data": 2,
    "parallel": 2,
    "serving": 2,  # processes and HTTP; knows neither models nor weights
    "config": 1,
    "records": 1,
    "sample_facts": 1,
    "metrics": 1,
    "endings": 0,
    "host": 0,
    "errors": -1,
}
THIRD_PARTIES = {
    "megatron": {
        "parallel",
        "models",
        "rollout/embedded",
        "rollout/inference",
        "train",
        "rehearsal",
    },
    "triton": {"losses/triton_ops"},
    "transformers": {
        "models",
        "data/chat",
        "data/template_variables",
        "data/tokenizer_backend",
    },
    "math_verify": {"evaluation/grading_worker"},
    "pebble": {"evaluation/grading"},
    "sglang": {"serving/launch_server"},
    "h11": {"serving/exchange"},
    "tensorboard": {"monitoring"},
    "wandb": {"monitoring/trackers"},
    "mlflow": {"monitoring/trackers"},
}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path):
    here = folder_of(path)
    for module in imported_modules(path):
        if not module.startswith(PACKAGE + "."):
            continue
        there = module.split(".")[1]
        assert there == here or ROWS[there] < ROWS[here], f"{path} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_third_parties_stay_in_their_place(path):
    name = str(path.relative_to(ROOT).with_suffix(""))
    for module in imported_modules(path):
        allowed = THIRD_PARTIES.get(module.split(".")[0])
        if allowed is not None:
            assert any(name == a or name.startswith(a + "/") for a in allowed), f"{name}: {module}"


def test_no_module_imports_itself_over_others():
    modules = {module_of(path): path for path in FILES}
    imports = {name: imported_modules(path) & modules.keys() for name, path in modules.items()}
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle
