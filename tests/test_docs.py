"""The documents against the repository: what they name exists, and what cites them is there."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from stable_opd_mcore.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "BENCHMARKS.md", *ROOT.glob("docs/*.md")]
)
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
TEXTS = [path for path in TRACKED if Path(path).suffix in {".py", ".md", ".yaml", ".sh", ".toml"}]
ROOT_FOLDERS = sorted({path.split("/")[0] for path in TRACKED if "/" in path})
# What runs and jobs write, and what a user downloads; not in the repository.
WRITTEN = ("runs/", "rollouts/", "tokens/", "checkpoints/", "model/", "attempt_1/")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def method_sections(text: str) -> set[str]:
    """Sections of docs/method.md that a text cites: "docs/method.md §1, §3", "… §1 and §2"."""
    cited = re.findall(r"docs/method\.md((?:[\s#,]|and|§\d+)*)", text)
    return set(re.findall(r"§(\d+)", " ".join(cited)))


def test_cited_sections_of_the_method_exist():
    method = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^## (\d+)\. ", method, re.MULTILINE))
    assert sections >= set("1234567")
    assert set(re.findall(r"§(\d+)", method)) - {"N"} <= sections
    for path in TEXTS:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert method_sections(text) <= sections, path
        assert not re.search(r"METHOD\s+§", text), f"{path} cites a document that is not here"


@every_document
def test_linked_files_exist(document):
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name} links {target}"


@every_document
def test_named_files_exist(document):
    text = document.read_text(encoding="utf-8")
    folders = "|".join(map(re.escape, ROOT_FOLDERS))
    for name in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]*\w", text):
        assert (ROOT / name).exists(), f"{document.name} names {name}"
    for name in re.findall(r"`([\w./-]+\.py|[\w./-]+/)`", text):
        found = any(f"/{name}" in f"/{path}" for path in TRACKED)
        assert found or name.startswith(WRITTEN), f"{document.name} names {name}"


@every_document
def test_named_commands_exist(document):
    text = document.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for module in re.findall(r"python3? -m ((?:stable_opd_mcore|benchmarks)[\w.]*)", text):
        assert importlib.util.find_spec(module), f"python -m {module}"
    commands = {
        command.callback.__name__ for command in app.registered_commands if command.callback
    }
    for line in re.findall(r"(?:^|`)[\w./-]*?stable-opd ([a-z]+)", text, re.MULTILINE):
        assert line in commands, f"stable-opd {line}"
