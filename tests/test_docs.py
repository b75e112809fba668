"""The documents against the repository: what they name exists, and what cites them is there."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from stable_opd_mcore.cli import app
from stable_opd_mcore.config.load import load_config

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "BENCHMARKS.md",
        *ROOT.glob("docs/**/*.md"),
    ]
)
LINK = re.compile(r"\]\(([^)#\s]+)")
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
TEXTS = [path for path in TRACKED if Path(path).suffix in {".py", ".md", ".yaml", ".sh", ".toml"}]
ROOT_FOLDERS = sorted({path.split("/")[0] for path in TRACKED if "/" in path})
# What runs and jobs write, and what a user downloads; not in the repository.
WRITTEN = (
    *("runs/", "rollouts/", "tokens/", "checkpoints/", "model/", "adapter/", "sglang/", "stacks/"),
    *("attempt_1/", "own_code/", "teacher/", "cold_start/", "evaluation/", "environments/"),
)


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


def test_linked_files_exist():
    for document in DOCUMENTS:
        for target in LINK.findall(document.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                assert (document.parent / target).exists(), f"{document.name} links {target}"


def test_named_files_exist():
    folders = "|".join(map(re.escape, ROOT_FOLDERS))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for name in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]*\w", text):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
        for name in re.findall(r"`([\w./-]+\.py|[\w./-]+/)`", text):
            found = any(f"/{name}" in f"/{path}" for path in TRACKED)
            assert found or name.startswith(WRITTEN), f"{document.name} names {name}"


COMMAND = typer.main.get_command(app)
KEYS = set(re.findall(r"^- `([\w.]+)`", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))
PLACEHOLDER = re.compile(r"(?<![\w$])[A-Z][A-Z_]{2,}(?![\w-])")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = r"make|stable-opd|torchrun(\.sh)?|sbatch|bash|ssh|hf|git|docker|enroot|nemo|python[\d.]*"
SAYS_HOW = [*DOCUMENTS, ROOT / "configs" / "README.md"]


def shell_commands(text: str) -> Iterator[tuple[list[str], str]]:
    """The words of each command in the shell blocks of a document, and its line."""
    for language, block in BLOCK.findall(text):
        if language not in ("", "bash", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:  # what a command printed
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words and re.fullmatch(PROGRAMS, Path(words[0]).name):
                yield words, line


def check_command(words: Sequence[str], line: str) -> None:
    """Fail where a command of this project would not be understood as it is printed."""
    program = Path(words[0]).name
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for target in (word for word in words[1:] if "=" not in word):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
    elif program in ("stable-opd", "torchrun.sh"):
        assert program == "stable-opd" or (ROOT / words[0]).is_file(), line
        check_verb(words[1:], line)
    elif "stable_opd_mcore" in words:
        check_verb(words[words.index("stable_opd_mcore") + 1 :], line)
    elif program in ("sbatch", "bash") or re.fullmatch(r"python[\d.]*", program):
        script = next((n for n, word in enumerate(words) if word.endswith((".sh", ".py"))), None)
        if script is not None and not words[script].startswith("build/"):
            assert (ROOT / words[script]).is_file(), line
            if words[script].startswith("slurm/"):
                check_settings(words[script + 1 :], line)


def check_verb(words: Sequence[str], line: str) -> None:
    verb = COMMAND.commands[words[0]]  # pyright: ignore[reportAttributeAccessIssue]
    verb.make_context(words[0], list(words[1:]))  # raises for an option that does not exist
    check_settings([word for word in words[1:] if not word.startswith("-")], line)


def check_settings(words: Sequence[str], line: str) -> None:
    """The configs exist and load with the overrides; no path of another machine is left in them."""
    overrides = [word for word in words if "=" in word]
    for override in overrides:
        assert override.partition("=")[0] in KEYS, line
    assert not any("..." in word for word in words), f"{line}: say what to put in"
    for path in (word for word in words if word.endswith(".yaml") and not word.startswith("runs/")):
        assert (ROOT / path).is_file(), line
        config = load_config(ROOT / path, [o for o in overrides if not PLACEHOLDER.search(o)])
        given = {override.partition("=")[0] for override in overrides}
        needed = {
            "data.train.path": config.data.train.path,
            "tokenizer.path": config.tokenizer.path,
        }
        if config.data.eval is not None:
            needed["data.eval.path"] = config.data.eval.path
        outside = {key for key, value in needed.items() if value and value.startswith("../")}
        assert outside <= given, f"{line}: {path} needs {outside - given} too"


def test_commands_run_as_printed_or_say_what_to_put_in():
    for document in SAYS_HOW:
        text = document.read_text(encoding="utf-8")
        explained = BLOCK.sub("", text) + " ".join(re.findall(r"#.*", text))
        shown = set(re.findall(r"^# (\S+\.py)$", text, re.MULTILINE))  # files that readers write
        for words, line in shell_commands(text):
            check_command([w for w in words if not any(f"={path}:" in w for path in shown)], line)
            for name in set(PLACEHOLDER.findall(" ".join(words[1:]))):
                assert name in explained or f"{name}=" in line, f"{line}: what is {name}?"


def test_every_page_can_be_reached_from_the_readme():
    reached: set[Path] = set()
    pages = {ROOT / "README.md"}
    while pages:
        reached |= pages
        links = {
            (page.parent / target).resolve()
            for page in pages
            for target in LINK.findall(page.read_text(encoding="utf-8"))
        }
        pages = {link for link in links - reached if link.suffix == ".md"}
    assert {*DOCUMENTS, ROOT / "configs" / "README.md"} <= reached
