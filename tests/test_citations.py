"""What comments, docstrings and documents cite exists: files, names in modules, commands.

A bare `step.py` is a file of the same folder; other folders are named. Not here: links and shell
blocks of documents, and sections of docs/method.md (test_docs.py).
"""

import ast
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import typer

from stable_opd_mcore.cli import app

ROOT = Path(__file__).parents[1]
PACKAGE = "stable_opd_mcore"
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
FOLDERS = (PACKAGE, "slurm", "launch", "benchmarks", "tools", "docs", "configs")
CITING = [
    path
    for path in TRACKED
    if (path.startswith(FOLDERS) or "/" not in path)
    and path.endswith((".py", ".sh", ".md"))
    and path not in ("CHANGELOG.md", "docs/configuration.md")
]
SETTINGS = set(
    re.findall(r"^- `([\w.]+)`", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
)
SECTIONS = {key.rpartition(".")[0] for key in SETTINGS} | {key.split(".")[0] for key in SETTINGS}
# Files of others, of runs, and stand-ins for a name: not in the repository.
ELSEWHERE = re.compile(
    r"(?:config\.resolved(?:\.\d+)?|other)\.yaml|(?:path/to/)?file\.py|results\.md"
    r"|(?:build|envs|runs|pytorch|transformers|transformer_engine|torch|megatron|sglang)/.*"
)
FILE_ENDINGS = (".py", ".json", ".jsonl", ".html", ".yaml", ".md", ".log")
FILE = re.compile(r"(?<![\w./*<-])((?:[\w-]+/)*[\w-]+(?:\.[\w-]+)*\.(?:py|sh|md|yaml))(?![\w/])")
DOTTED = re.compile(r"(?<![\w./-])((?:[a-z_]+\.)+[A-Za-z_]\w*)(?![\w./=])")


@cache
def prose(path: str) -> str:
    """Comments and docstrings of a program; the whole text of a document."""
    return "\n".join(_pieces(path))


def _pieces(path: str) -> Iterator[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        yield re.sub(r"https?://\S+", "", text)
    elif path.endswith(".sh"):
        yield from re.findall(r"(?:^|\s)# (.*)", text)
    else:
        with (ROOT / path).open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT:
                    yield token.string
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


@cache
def names_of(path: str) -> set[str]:
    """What a module defines or imports: functions, classes, variables, and fields of classes."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def begins_in_package(dotted: str) -> bool:
    """Whether a name begins with a folder of the package that is not a section of the settings."""
    first = dotted.split(".")[0]
    named = first in SECTIONS | {"config", "models"}  # also variables of these names
    return (ROOT / PACKAGE / first).is_dir() and not named


def module_file(folder: str, parts: list[str]) -> tuple[str, list[str]] | None:
    """The module that a dotted name begins with, and the names inside it; None: none begins so."""
    for base in (f"{folder}/", f"{PACKAGE}/", ""):
        for count in range(len(parts), 0, -1):
            path = f"{base}{'/'.join(parts[:count])}.py"
            if path in TRACKED:
                return path, parts[count:]
    return None


def test_cited_files_exist():
    wrong = []
    for path in CITING:
        folder = Path(path).parent
        for name in set(FILE.findall(prose(path))):
            places = [folder / name, Path(name), Path(PACKAGE) / name]
            if "/" in name or path.endswith(".md"):
                places += [Path(known) for known in TRACKED if known.endswith(f"/{name}")]
            if not ELSEWHERE.fullmatch(name) and not any(str(place) in TRACKED for place in places):
                wrong.append(f"{path} cites {name}")
    assert wrong == []


def test_cited_names_of_modules_exist():
    wrong = []
    for path in CITING:
        for dotted in set(DOTTED.findall(prose(path))):
            if dotted in SETTINGS | SECTIONS or dotted.endswith(FILE_ENDINGS):
                continue
            found = module_file(str(Path(path).parent), dotted.split("."))
            if found is None:
                missing = begins_in_package(dotted)
            else:
                missing = bool(found[1]) and found[1][0] not in names_of(found[0])
            if missing:
                wrong.append(f"{path} cites {dotted}")
    assert wrong == []


def test_cited_commands_exist():
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    wrong = []
    for path in CITING:
        text = prose(path)
        verbs = set(re.findall(r"(?:`|^ *)(?:\S*/)?stable-opd ([a-z][\w-]+)", text, re.MULTILINE))
        cited = set(re.findall(r"(?:^|`)make ([a-z][\w-]+)", text, re.MULTILINE))
        modules = re.findall(rf"python3? -m ((?:{PACKAGE}|benchmarks|tools)[\w.]*)", text)
        wrong += [f"{path} cites {name}" for name in modules if not find_spec(name)]
        wrong += [f"{path} cites {name}" for name in (verbs - commands.keys()) | (cited - targets)]
    assert wrong == []
