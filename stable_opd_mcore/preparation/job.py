"""Checks what is asked of `prepare` before the first row is filtered.

A job holds everything that the outputs depend on, and nothing else decides them. Not here: the
filter (spool.py), the outputs (publish.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.data import ColumnsConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.decontamination import BenchmarkProblem
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from stable_opd_mcore.host.hub import TOKENIZER_FILES, download, is_hub_id
from stable_opd_mcore.preparation import openr1
from stable_opd_mcore.preparation.inputs import find_files, open_input
from stable_opd_mcore.preparation.recipes import BOTH, OPD, RECIPES, SFT, Recipe
from stable_opd_mcore.preparation.records import InputFile, Part
from stable_opd_mcore.preparation.rules import RuleSettings

SFT_ROWS = 33_000
MAX_TOKENS = 8192
_LAYOUT = 1  # of parts and outputs; a new number makes older parts unusable
_PACKAGES = ("stable-opd-mcore", "tokenizers", "pyarrow")


@dataclass(frozen=True)
class Request:
    """What is asked for: the options of `stable-opd prepare`."""

    tokenizer: Tokenizer
    directory: Path
    source: Path  # a folder or a file
    origin: str  # where the source is from, for the manifest: a path, or hub id and commit
    benchmarks: Mapping[str, Sequence[Row]]
    write_benchmarks: bool  # False: they are read from `directory`
    columns: ColumnsConfig  # unused for OpenR1
    recipe: str = "openr1"
    sft_rows: int = SFT_ROWS
    max_tokens: int = MAX_TOKENS
    seed: int = 0
    num_processes: int = 1


def request_of(
    *,
    student: str,
    student_revision: str | None,
    recipe: str,
    source: str | None,
    directory: Path,
    benchmarks: Path | None,
    revision: str | None,
    processes: int,
    columns: Mapping[str, str],
    **others: Any,
) -> Request:
    """The request of a command line; downloads a source that is on the hub.

    Args:
        columns: role to name; "" for a role that the data lack.
        others: fields of `Request`.

    Raises:
        UserError: an unknown recipe, an option that the recipe does not have, or a failed download.
    """
    if recipe not in RECIPES:
        raise UserError(f"--recipe {recipe}: no such recipe; there are {', '.join(RECIPES)}")
    if columns and recipe != "rows":
        raise UserError(
            f"--problem, --answer and --solution are for --recipe rows; {recipe} has its own"
        )
    if others["sft_rows"] != SFT_ROWS and not RECIPES[recipe].openr1:
        raise UserError(f"--sft-rows divides the rows of --recipe openr1, not of {recipe}")
    if is_hub_id(student):
        student = str(download(student, "model", TOKENIZER_FILES, student_revision)[0])
    elif student_revision is not None:
        raise UserError(f"--student-revision is of a model on the hub, and {student} is a path")
    tokenizer = Tokenizer.load(student)
    loaded = {name: load_benchmark(name, benchmarks) for name in BENCHMARKS}
    folder, origin = _source(RECIPES[recipe], source, revision)
    return Request(
        directory=directory,
        tokenizer=tokenizer,
        recipe=recipe,
        source=folder,
        origin=origin,
        benchmarks=loaded,
        write_benchmarks=benchmarks is None or benchmarks.resolve() != directory.resolve(),
        columns=_given_columns(columns) if columns else RECIPES[recipe].columns,
        num_processes=processes or len(os.sched_getaffinity(0)),
        **others,
    )


def _given_columns(columns: Mapping[str, str]) -> ColumnsConfig:
    if columns.get("problem") == "":
        raise UserError("--problem '': every row needs a problem; name its column")
    return ColumnsConfig.model_validate({role: name or None for role, name in columns.items()})


def _source(recipe: Recipe, source: str | None, revision: str | None) -> tuple[Path, str]:
    hub_id = source or recipe.hub_id
    if hub_id is None:
        raise UserError("--recipe rows needs --source: a folder, a file, or a hub id")
    if not is_hub_id(hub_id):
        if revision is not None:
            raise UserError(f"--revision is of a data set on the hub, and {source} is a path")
        return Path(hub_id), hub_id
    folder, commit = download(hub_id, "dataset", recipe.files[:1], revision)
    return folder, f"{hub_id}@{commit}"


@dataclass(frozen=True)
class Job:
    """A checked request: what is read, by which rules, and what is written."""

    request: Request
    name: str  # of the manifest
    outputs: tuple[str, ...]  # files of rows, without their ending
    recipe: Recipe
    files: tuple[InputFile, ...]
    parts: tuple[Part, ...]
    columns: tuple[str, ...]  # read from parquet files
    rules: RuleSettings

    @property
    def spool(self) -> Path:
        return self.request.directory / f".prepare-{self.name}"

    @property
    def manifest(self) -> Path:
        return self.request.directory / f"{self.name}.manifest.json"


def check(request: Request) -> Job:
    """Refuse what cannot be prepared, and find everything that is needed."""
    recipe = RECIPES[request.recipe]
    if not request.source.exists():
        raise DataError(f"{request.source}: no such file or folder; check --source")
    paths = find_files(request.source, recipe.files)
    name = request.recipe if request.recipe != "rows" else request.source.stem
    outputs = (SFT, OPD, BOTH) if recipe.openr1 else (recipe.output or name,)
    for output in outputs:
        if (request.directory / f"{output}.jsonl").resolve() in [p.resolve() for p in paths]:
            raise UserError(
                f"{request.directory / output}.jsonl would replace its own source; "
                "name another --directory"
            )
    required, read = _columns(recipe, request.columns)
    opened = [open_input(p, _name_in(request.source, p), required) for p in paths]
    parts = tuple(part for _, found in opened for part in found)
    num_rows = sum(part.num_rows for part in parts)
    if recipe.openr1 and num_rows <= request.sft_rows:
        raise DataError(
            f"{request.source}: {num_rows} rows, which is too few for "
            f"{request.sft_rows} supervised rows and the prompts of the distillation; lower "
            "--sft-rows, or give more data with --source"
        )
    return Job(
        request,
        name,
        outputs,
        recipe,
        tuple(file for file, _ in opened),
        parts,
        read,
        RuleSettings(
            openr1=recipe.openr1,
            columns=request.columns,
            max_tokens=request.max_tokens,
            tokenizer_json=request.tokenizer.json_text,
            control_tokens=request.tokenizer.control_tokens,
            benchmarks=tuple(
                BenchmarkProblem(name, row.row_id, row.problem)
                for name, rows in request.benchmarks.items()
                for row in rows
            ),
        ),
    )


def _columns(recipe: Recipe, columns: ColumnsConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that a file must have, and those that are read."""
    if recipe.openr1:
        return openr1.REQUIRED_COLUMNS, openr1.COLUMNS
    given = [columns.problem, columns.answer, columns.solution]
    named = tuple(name for name in given if name is not None)
    optional = ColumnsConfig().solution  # a source may lack the default column
    return tuple(name for name in named if name != optional), named


def _name_in(source: Path, path: Path) -> str:
    return path.name if path == source else path.relative_to(source).as_posix()


def facts_of(job: Job) -> dict[str, Any]:
    """What the outputs depend on: the first part of the manifest."""
    rules = job.rules
    pattern = rules.control_tokens
    return {
        "name": job.name,
        "origin": job.request.origin,
        "settings": {
            "recipe": job.request.recipe,
            "max_tokens": rules.max_tokens,
            "sft_rows": job.request.sft_rows if job.recipe.openr1 else None,
            "seed": job.request.seed,
        },
        "filter": {
            "layout": _LAYOUT,
            "openr1": rules.openr1,
            "columns": rules.columns.model_dump(),
            "max_tokens": rules.max_tokens,
            "tokenizer_sha256": hashlib.sha256(rules.tokenizer_json.encode()).hexdigest(),
            "control_tokens": None if pattern is None else pattern.pattern,
            "benchmarks": {
                name: {"rows": len(rows), "sha256": digest([(r.row_id, r.problem) for r in rows])}
                for name, rows in job.request.benchmarks.items()
            },
            "inputs": [
                {"name": f.name, "bytes": f.num_bytes, "sha256": f.sha256} for f in job.files
            ],
            "versions": {
                "python": platform.python_version(),
                "unicode": unicodedata.unidata_version,
                **{package: version(package) for package in _PACKAGES},
            },
        },
    }


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
