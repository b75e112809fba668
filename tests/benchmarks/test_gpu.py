"""The GPU suite: a part that fails or hangs does not stop the next, and the tables say so."""

import importlib
import json
import re
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import bundle
from benchmarks.gpu.advice import ADVICE, lines_of, verdict
from benchmarks.gpu.measured_step import TINY, flops_of, shape_config
from benchmarks.gpu.one_step import StepRecord
from benchmarks.gpu.parts import layers, loss, step
from benchmarks.gpu.record import Entry, Record, read_entries
from benchmarks.gpu.report import JSON_FILE, MARKDOWN_FILE, read_results, write_results
from benchmarks.gpu.suite import PARTS, Part, PartResult, run_part
from tests.parallel.launch import start_process

# Stands in for `python -m benchmarks.gpu.part`, whose imports take seconds: NAME RECORD DEVICE ...
PROGRAM = """
import json, os, subprocess, sys, time
name, record = sys.argv[1:3]
def write(**entry):
    with open(record, "a") as file:
        file.write(json.dumps(entry) + "\\n")
write(kind="figure", name="speed", value=12345.6, unit="GB/s")
if name == "raises":
    raise RuntimeError("the kernel is wrong")
if name == "crashes":
    os.kill(os.getpid(), 11)
if name == "exceeds":
    write(kind="check", name="error", value=0.5, limit=0.1)
    write(kind="check", name="not a number", value=float("nan"), limit=0.1)
if name == "skips":
    print("no SGLang here")
    sys.exit(77)
if name == "hangs":
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    write(kind="figure", name="child", value=child.pid)
    open(record, "a").write('{"half": ')
    time.sleep(600)
"""
NAMES = ("raises", "crashes", "exceeds", "skips", "hangs", "passes")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    command = [sys.executable, "-S", "-c", PROGRAM]
    found = []
    for name in NAMES:
        part = Part(name, 10.0 if name == "hangs" else 60.0, "")
        found.append(run_part(part, folder, "cuda", "", command))
        write_results(found, folder, "cuda")
    return {result.name: result for result in found}, folder


def test_every_part_ends_with_its_own_status(results):
    found, _ = results
    assert {name: result.status for name, result in found.items()} == {
        "raises": "failed",
        "crashes": "failed",
        "exceeds": "failed",
        "skips": "skipped",
        "hangs": "out of time",
        "passes": "ok",
    }
    assert found["raises"].reason == "RuntimeError: the kernel is wrong"
    assert found["crashes"].reason.startswith("ended by SIGSEGV")
    assert found["exceeds"].reason == "error: 0.5 > 0.1 and 1 more"
    assert found["skips"].reason == "no SGLang here"
    assert found["hangs"].reason == "ended at its limit of 10 s"


def test_figures_from_before_a_failure_are_kept(results):
    found, _ = results
    for result in found.values():
        assert result.entries[0].value == 12345.6


def test_what_a_hanging_part_started_is_ended(results):
    found, _ = results
    child = Path(f"/proc/{int(found['hangs'].entries[1].value)}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_json_and_table_name_every_part(results):
    found, folder = results
    values = json.loads((folder / JSON_FILE).read_text())
    assert [part["name"] for part in values["parts"]] == list(found)
    table = (folder / MARKDOWN_FILE).read_text().splitlines()[2:]
    assert {line.count("|") for line in table} == {6}
    assert "| exceeds | error | **0.5** | 0.1 |  |" in table
    assert "| passes | speed | 12,346 GB/s |  |  |" in table
    assert any(re.match(r"\| \*\*hangs\*\* \| out of time \| \d+ s \|", line) for line in table)


def test_limits_of_all_parts_fit_two_passes_of_six_minutes():
    """A node is lent for fifteen minutes; one fix is made between the passes."""
    names = [part.name for part in PARTS]
    last = names.index("publish") + 1
    for half in (PARTS[:last], PARTS[last:]):
        assert sum(part.limit_seconds for part in half) <= 360


def suite_result(name: str, status: str, version: str = "1") -> PartResult:
    entries = (Entry("figure", "torch", version),) if name == "environment" else ()
    return PartResult(name, status, 1.0, "", entries, "2026-01-02 03:04")  # type: ignore[arg-type]


def test_a_failure_says_what_it_means_and_only_gates_forbid_training():
    assert {part.name for part in PARTS} == ADVICE.keys()
    passed = [suite_result(part.name, "ok") for part in PARTS]
    for part, result in zip(PARTS, passed, strict=True):
        failed = replace(result, status="out of time")
        lines = lines_of(failed)
        assert lines[0].split()[1] == ("gates" if part.gates else "informs")
        assert lines[1].startswith(f"  look at: {part.name}.log; ")
        assert lines[2] == f"  it means: {ADVICE[part.name].means}"
        others = [each for each in passed if each.name != part.name]
        text, is_good = verdict([*others, failed])
        assert is_good is not part.gates
        assert text.startswith("Do not train yet: " if part.gates else "Training may start: ")
        text, is_good = verdict([*others, replace(result, status="skipped")])
        assert is_good
        assert (f"not tested: {part.name}." in text) is part.gates
    assert len(lines_of(passed[0])) == 1


def test_a_second_call_runs_what_has_not_passed(tmp_path, monkeypatch, capsys):
    """Not with other versions, of another device, or when it is asked to run all."""
    ran: list[tuple[str, bool]] = []
    state = {"version": "1", "step": "failed"}

    def run(part: Part, *_: object, is_first: bool) -> PartResult:
        ran.append((part.name, is_first))
        status = state["step"] if part.name == "step" else "ok"
        return suite_result(part.name, status, state["version"])

    def call(*arguments: str) -> tuple[int, list[str]]:
        ran.clear()
        names = ("--parts", "layers", "step")
        monkeypatch.setattr(sys, "argv", ["gpu", f"--out={tmp_path}", *names, *arguments])
        return command_line.main(), [name for name, _ in ran]

    monkeypatch.setattr(command_line, "run_part", run)
    assert call() == (1, ["environment", "layers", "step"])
    assert all(is_first for _, is_first in ran)
    state["step"] = "ok"
    assert call() == (0, ["environment", "step"])
    assert ran == [("environment", False), ("step", False)]
    assert "layers       passed at 2026-01-02 03:04 and is not run again" in capsys.readouterr().out
    assert list(read_results(tmp_path, "cuda")) == ["environment", "layers", "step"]
    assert call() == (0, ["environment"])
    assert call("--again") == (0, ["environment", "layers", "step"])
    state["version"] = "2"
    assert call() == (0, ["environment", "layers", "step"])
    assert "versions differ" in capsys.readouterr().out
    assert call("--device=cpu") == (0, ["environment", "layers", "step"])


def import_parts_without_pytest() -> None:
    sys.modules["pytest"] = None  # type: ignore[assignment]
    for part in PARTS:
        assert callable(importlib.import_module(f"benchmarks.gpu.parts.{part.name}").run)


def test_parts_need_no_pytest():
    """A GPU machine may lack it."""
    process = start_process(import_parts_without_pytest)
    process.join()
    assert process.exitcode == 0


def test_products_of_golden_solutions_are_only_the_students(tmp_path):
    """Teacher and reference are as large as the student. One of three sequences is golden."""
    shape = replace(TINY, teacher=TINY.student, prompts=5, samples=2)
    flops = flops_of(shape, shape_config(shape, tmp_path))
    head = 2 * 64 * 128 * 1031  # one sequence's response tokens x hidden size x vocabulary
    assert flops.update - flops.student == 10 * head  # the reference's
    forward = (flops.score - 10 * head) / (2 * 10)  # the teacher's head, two forward passes
    assert flops.student == pytest.approx(3 * 15 * (forward + head))


def test_the_limit_of_fp32_is_that_of_tf32s_mantissa():
    """Errors of single products, of normal numbers whose operands keep ten bits of mantissa."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    y, rounded = x, x
    for _ in range(2 * layers.PRODUCTS_OF_A_LAYER * 4):  # forward and backward through four layers
        y, rounded = y @ w / 16, in_tf32(rounded) @ in_tf32(w) / 16
    error = float((rounded - y).norm() / y.norm())
    assert layers.tf32_limit(4) / 4 < error < layers.tf32_limit(4)


def in_tf32(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)  # mantissa in [.5, 1): the first of 11 bits is implied
    return torch.ldexp((mantissa * 2**11).round(), exponent - 11)


def test_a_step_with_another_gradient_or_metric_fails(tmp_path):
    metrics = dict.fromkeys(step.METRICS, 2.0)
    tensors = {"a": torch.ones(100), "b": torch.ones(2)}
    same = StepRecord(torch.ones(3, 5), tensors, tensors, metrics)
    wrong = {"a": torch.ones(100), "b": torch.tensor([1.0, 1.1])}
    found = StepRecord(same.logits_NV, wrong, tensors, metrics | {"loss/kl": 2.001})
    for number, other in enumerate((same, found)):
        path = tmp_path / f"{number}.jsonl"
        step.compare(Record(path), other, same)
        failed = [entry.name for entry in read_entries(path) if not entry.passes]
        wanted = ["gradients: relative error", "loss/kl: relative error"]
        assert failed == (wanted if number else [])


@pytest.mark.parametrize(
    ("registers", "warps", "blocks"),
    [(64, 8, 4), (109, 8, 2), (32, 8, 8), (255, 8, 1), (16, 1, 32)],
)
def test_resident_blocks_of_a_kernel(registers, warps, blocks):
    assert loss.resident_blocks(registers, warps) == blocks


def test_the_bundle_holds_the_clusters_megatron():
    cluster = tomllib.loads((bundle.ROOT / "requirements" / "cluster.toml").read_text())
    lines = (bundle.ROOT / bundle.REQUIREMENTS).read_text().splitlines()
    assert f"megatron-core=={cluster['packages']['megatron-core']}" in lines


def test_wheels_are_unpacked_as_pip_installs_them(tmp_path):
    files = ("pkg/__init__.py", "pkg/tests/test_a.py", "pkg-1.data/purelib/other/a.py")
    with zipfile.ZipFile(tmp_path / "pkg-1-py3-none-any.whl", "w") as wheel:
        for name in (*files, "pkg-1.data/data/share/page.js", "pkg-1.dist-info/METADATA"):
            wheel.writestr(name, "")
    bundle.unpack_wheel(tmp_path / "pkg-1-py3-none-any.whl", tmp_path / "site")
    found = [
        p.relative_to(tmp_path / "site") for p in (tmp_path / "site").rglob("*") if p.is_file()
    ]
    assert sorted(map(str, found)) == ["other/a.py", "pkg-1.dist-info/METADATA", "pkg/__init__.py"]


def test_the_bundle_has_every_dependency_that_the_machine_lacks():
    root = Path(bundle.__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    on_the_machine = {"torch", "numpy", "tensorboard", "jinja2"} | {  # transformers brings these
        *("transformers", "tokenizers", "safetensors", "pyyaml", "typer", "rich")
    }
    unused_there = {"datasets"}
    packed = {
        line.partition("==")[0]
        for line in (root / bundle.REQUIREMENTS).read_text().splitlines()
        if not line.startswith("#")
    }
    assert needed - on_the_machine - unused_there <= packed
