"""Settings that messages name exist: a remedy of an error or finding can be carried out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "stable_opd_mcore"
PAGE = (REPOSITORY / "docs" / "configuration.md").read_text()
KEYS = set(re.findall(r"^- `([a-z_\d.\[\]]+)` \(", PAGE, re.MULTILINE))
SECTIONS = {key.partition(".")[0] for key in KEYS}
# A value in braces, or a star, stands for one part of the key.
NAME = re.compile(
    rf"(?<![\w./{{}}-])((?:{'|'.join(sorted(SECTIONS))})(?:\[\d*\])?(?:\.(?:[a-z_\d]+|\*|{{}}))+)(?![\w/(*])"
)
FILES = {"json", "jsonl", "md", "model", "parquet", "py", "safetensors", "yaml"}
# Said to be gone; a tensor; a function.
NO_SETTINGS = {"rollout.order", "optimizer.state.{}.{}", "train.samples.collecting.sample_rollouts"}
NO_SETTINGS |= {"memory.max", "memory.limit_in_bytes", "memory.used"}  # of cgroups and nvidia-smi


def texts_of(path: Path) -> Iterator[str]:
    """String literals of code, without docstrings and assertions; the lines of another file."""
    if path.suffix != ".py":
        yield from re.sub(r"{\w+!?r?}", "{}", path.read_text()).splitlines()
        return
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.JoinedStr):
            yield "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not isinstance(node, ast.JoinedStr | ast.Assert) and not is_text:
            nodes += ast.iter_child_nodes(node)


def unknown_names(text: str) -> list[str]:
    names = [name for name in NAME.findall(text) if name.rpartition(".")[2] not in FILES]
    return [name for name in names if not exists(name)]


def exists(name: str) -> bool:
    """Whether the page has the key or a key below it."""
    name = re.sub(r"^(teacher\.(?:models|routes))\..*", r"\1", name)  # keys are the user's
    name = re.sub(r"^data\.train(\[\d*\]|\.{})", "data.train", name)  # one of its list
    pattern = re.escape(name)
    pattern = pattern.replace(r"\*", "[^.]+").replace(r"\{\}", "[^.]+")
    return any(re.match(rf"{pattern}(?:\.|$)", key.replace("[]", "")) for key in KEYS)


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("set data.*.columns.{} to one", []),
        ("set data.*.columns.message to a text column", ["data.*.columns.message"]),
        ("lower rollout.sglang.bucket_mib=512, or kl.beta", ["rollout.sglang.bucket_mib"]),
        ("data.train[1].path and teacher.{}, or teacher.path/tokenizer.json", []),
        ("tokenizer.json, train.jsonl and objective.nothing.", ["objective.nothing"]),
    ],
)
def test_names_of_settings_are_found_in_a_text(text, unknown):
    assert unknown_names(text) == unknown


def test_messages_and_findings_name_settings_that_exist():
    files = {*PACKAGE.rglob("*.py"), PACKAGE / "commands" / "check" / "findings.yaml"}
    named = [(path, text) for path in sorted(files) for text in texts_of(path)]
    assert sum(bool(NAME.search(text)) for _, text in named) > 200
    unknown = {(path.name, name) for path, text in named for name in unknown_names(text)}
    assert {one for one in unknown if one[1] not in NO_SETTINGS} == set()
