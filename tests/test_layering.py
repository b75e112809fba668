"""Which file may import which: the two rings, the rows of the trainer's, and never in a circle.

The trainer imports nothing from `commands/`. A command imports the trainer and, of the other
commands, only those that SHARED names. Within the trainer a file imports only lower rows and its
own folder. Every import counts: also those inside functions and those only for type checkers.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = "stable_opd_mcore"
ROOT = Path(__file__).parents[1] / PACKAGE
SHARED = {"options", "check", "plan", "report", "train"}  # what other commands are made of
ROWS = {
    "__main__": 11,
    "cli": 10,
    "commands": 9,
    "train": 8,
    "monitoring": 7,
    "evaluation": 6,
    "inputs": 6,
    "scoring": 5,
    "rollout": 5,
    "placement": 4,
    "models": 3,
    "serving": 3,  # processes and HTTP; knows neither models nor weights
    "losses": 2,  # losses and data know no model: one below, so that models may name a Head
    "data": 2,
    "parallel": 2,
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
        "commands/rehearse",
    },
    "triton": {"losses/triton_ops"},
    "transformers": {
        "models",
        "data/chat",
        "data/template_variables",
        "data/tokenizer_backend",
        "data/tool_calls",
    },
    "math_verify": {"evaluation/grading_worker"},
    "pebble": {"evaluation/grading"},
    "sglang": {"serving/launch_server"},
    "h11": {"serving/exchange"},
    "uvicorn": {"serving/endpoint"},
    "tensorboard": {"monitoring"},
    "wandb": {"monitoring/trackers"},
    "trackio": {"monitoring/trackers"},
    "swanlab": {"monitoring/trackers"},
    "mlflow": {"monitoring/trackers"},
    "typer": {"cli", "commands"},
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


def may_import(here: list[str], there: list[str]) -> bool:
    """Whether a module may import another one; both by the parts of their names."""
    if here[0] != there[0]:
        return ROWS[there[0]] < ROWS[here[0]]
    return here[0] != "commands" or there[1:2] in (here[1:2], []) or there[1] in SHARED


def test_imports_point_inwards_and_downwards():
    wrong = []
    for path in FILES:
        here = module_of(path).split(".")[1:]
        for module in imported_modules(path):
            package, *there = module.split(".")
            if package == PACKAGE and there and not may_import(here, there):
                wrong.append(f"{'.'.join(here)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_third_parties_stay_in_their_place():
    wrong = []
    for path in FILES:
        name = str(path.relative_to(ROOT).with_suffix(""))
        for module in imported_modules(path):
            allowed = THIRD_PARTIES.get(module.split(".")[0])
            if allowed and not any(name == a or name.startswith(a + "/") for a in allowed):
                wrong.append(f"{name} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_over_others():
    modules = {module_of(path): path for path in FILES}
    imports = {name: imported_modules(path) & modules.keys() for name, path in modules.items()}
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle
