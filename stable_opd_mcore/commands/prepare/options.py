"""Checks the options of `prepare` and the files of its source before a row is filtered."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stable_opd_mcore.commands.prepare import openr1
from stable_opd_mcore.commands.prepare.recipes import BOTH, OPD, RECIPES, SFT, Recipe
from stable_opd_mcore.commands.prepare.rules import Rules
from stable_opd_mcore.config.data import ColumnsConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.dataset_folders import refuse_missing_shards, unread_files
from stable_opd_mcore.data.sources import PARTS_OF_PROMPT, read_file
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from stable_opd_mcore.host.hub import TOKENIZER_FILES, download, is_hub_id

SFT_ROWS = 33_000
_OTHER_SPLIT = re.compile(r"(?:\A|[-_./])(?:test|validation|valid|val|dev|eval)(?:[-_./\d]|\Z)")
DROPPED = "_dropped"  # ends the name of the file of the dropped rows


@dataclass(frozen=True)
class Preparation:
    """A checked request: all that the outputs depend on."""

    recipe: str
    name: str  # begins the names of the manifest and the dropped rows
    origin: str  # where the source is from, for the manifest: a path, or hub id and commit
    files: Mapping[str, Path]  # parquet or JSON Lines, by their paths inside the source
    columns: tuple[str, ...]  # read from parquet files
    rules: Rules
    directory: Path
    outputs: tuple[str, ...]  # files of rows, without their ending
    writes_benchmarks: bool  # False: they are read from `directory`
    sft_rows: int | None  # None: the rows are not divided
    seed: int


def preparation_of(
    *,
    student: str,
    student_revision: str | None,
    recipe: str,
    source: str | None,
    directory: Path,
    benchmarks: Path | None,
    revision: str | None,
    sft_rows: int,
    max_tokens: int,
    seed: int,
    columns: Mapping[str, str],
) -> Preparation:
    """The preparation that a command line asks for; downloads a source that is on the hub.

    `columns` maps roles to names; "" stands for a role that the data lack.

    Raises:
        UserError: an unknown recipe, an option that does not fit it, a failed download, a source,
            student or benchmark that cannot be read, an output that would replace another file.
    """
    chosen = _recipe(recipe, columns, sft_rows)
    tokenizer = _tokenizer(student, student_revision)
    loaded = {name: load_benchmark(name, benchmarks) for name in BENCHMARKS}
    place, origin, source_name = _source(chosen, source, revision)
    paths = find_files(place, chosen.files)
    _require_one_split(place, paths)
    name = recipe if recipe != "rows" else source_name
    outputs = (SFT, OPD, BOTH) if chosen.openr1 else (chosen.output or name,)
    writes_benchmarks = benchmarks is None or benchmarks.resolve() != directory.resolve()
    written = (*outputs, f"{name}{DROPPED}", *(BENCHMARKS if writes_benchmarks else ()))
    _require_new_files(name, origin, paths, [directory / f"{each}.jsonl" for each in written])
    if place.is_dir():
        refuse_missing_shards(place, map(str, paths))
    if place.is_dir() and not is_hub_id(source or ""):
        own = [directory / f"{each}.jsonl" for each in written]
        others = [directory, benchmarks or directory, directory / f"{name}.manifest.json", *own]
        _require_all_read(chosen, place, paths, others)
    given, read, required = _columns(chosen, columns)
    for path in paths:
        require_columns(path, required)
    names = [path.name if path == place else path.relative_to(place).as_posix() for path in paths]
    return Preparation(
        recipe=recipe,
        name=name,
        origin=origin,
        files=dict(zip(names, paths, strict=True)),
        columns=read,
        rules=Rules(
            openr1=chosen.openr1,
            columns=given,
            max_tokens=max_tokens,
            tokenizer_json=tokenizer.json_text,
            control_tokens=tokenizer.control_tokens,
            benchmarks=loaded,
        ),
        directory=directory,
        outputs=outputs,
        writes_benchmarks=writes_benchmarks,
        sft_rows=sft_rows if chosen.openr1 else None,
        seed=seed,
    )


def _columns(
    recipe: Recipe, named: Mapping[str, str]
) -> tuple[ColumnsConfig, tuple[str, ...], tuple[str, ...]]:
    """The columns by role, those that are read, and those that a file must have."""
    given = recipe.columns
    if named:
        given = ColumnsConfig.model_validate({role: name or None for role, name in named.items()})
    if recipe.openr1:
        return given, openr1.COLUMNS, openr1.REQUIRED_COLUMNS
    names = given.model_dump(exclude={"golden"}).values()
    read = tuple(column for column in names if column is not None)
    # A source may lack the default column of solutions.
    names = (*read, *PARTS_OF_PROMPT)
    return given, names, tuple(column for column in read if column != ColumnsConfig().solution)


def _recipe(name: str, columns: Mapping[str, str], sft_rows: int) -> Recipe:
    if name not in RECIPES:
        raise UserError(f"--recipe {name}: no such recipe; give one of {', '.join(RECIPES)}")
    if columns and name != "rows":
        raise UserError(
            f"--{next(iter(columns))}: --recipe {name} has columns of its own; leave it out, or "
            "use --recipe rows"
        )
    if columns.get("problem") == "":
        raise UserError("--problem '': every row needs a problem; give the name of its column")
    if sft_rows != SFT_ROWS and not RECIPES[name].openr1:
        raise UserError(
            f"--sft-rows {sft_rows}: only --recipe openr1 splits its rows; leave it out for {name}"
        )
    return RECIPES[name]


def _require_new_files(
    name: str, origin: str, sources: Sequence[Path], written: Sequence[Path]
) -> None:
    """Refuse files that would replace a source, a benchmark or those of another preparation."""
    if name in BENCHMARKS or name.endswith(DROPPED):
        whose = "a benchmark" if name in BENCHMARKS else "another source's dropped rows"
        raise UserError(
            f"{origin}: its rows would be written to {name}.jsonl, which is the file of {whose}; "
            "give --source a copy with another name"
        )
    read = {path.resolve() for path in sources}
    for path in written:
        if path.resolve() in read:
            raise UserError(f"{path} would replace its own source; name another --directory")


def _require_one_split(folder: Path, paths: Sequence[Path]) -> None:
    """Refuse files of several splits, such as train.jsonl and test.jsonl."""
    names = [path.relative_to(folder).as_posix() for path in paths if path != folder]
    found = map(_OTHER_SPLIT.search, names)
    splits = {split[0].strip("-_./0123456789") if split else "train" for split in found}
    if len(splits) > 1:
        more = f" and {len(names) - 4} more" if names[4:] else ""
        raise DataError(
            f"{folder}: {', '.join(names[:4])}{more}: files of the splits "
            f"{', '.join(sorted(splits))}, which would become one training set; give --source one "
            f"of them, for example {folder / names[-1]}"
        )


def _require_all_read(
    recipe: Recipe, folder: Path, read: Sequence[Path], others: Sequence[Path]
) -> None:
    """Refuse a folder with data files that would be passed over.

    Not other splits, nor other configurations of a data set on the hub, nor the command's own files
    in `others`.
    """
    apart = [path.resolve() for path in others if path.resolve() != folder.resolve()]
    unread = [folder / name for name in unread_files(folder, map(str, read))]
    unread = [
        str(path.relative_to(folder))
        for path in unread
        if not _OTHER_SPLIT.search(path.relative_to(folder).as_posix())
        and not any(path.resolve().is_relative_to(each) for each in apart)
        and (recipe.hub_id is None or path.parent == read[0].parent)
    ]
    if unread:
        more = f" and {len(unread) - 3} more" if unread[3:] else ""
        raise DataError(
            f"{folder}: {', '.join(unread[:3])}{more} would not be read with "
            f"{read[0].relative_to(folder)}: one kind of file in one folder is read; give --source "
            "one file, convert these, or move them away"
        )


def _tokenizer(student: str, revision: str | None) -> Tokenizer:
    if is_hub_id(student):
        student = str(download(student, "model", TOKENIZER_FILES, revision)[0])
    elif revision is not None:
        raise UserError(
            f"--student-revision {revision}: {student} is a path, and only a hub id has revisions; "
            "leave it out"
        )
    tokenizer = Tokenizer.load(student)
    if tokenizer.is_synthetic:
        raise UserError(
            f"{student}: its tokens are the characters of the arithmetic task, whose rows are "
            "generated and need no preparation; give a model with a tokenizer of ordinary text"
        )
    return tokenizer


def _source(recipe: Recipe, source: str | None, revision: str | None) -> tuple[Path, str, str]:
    """The folder or file that is read, its origin as text, and the source's name."""
    hub_id = source or recipe.hub_id
    if hub_id is None:
        raise UserError("--recipe rows: no --source; give a folder, a file or a hub id")
    if not is_hub_id(hub_id):
        if revision is not None:
            raise UserError(
                f"--revision {revision}: {source} is a path, and only a hub id has revisions; "
                "leave it out"
            )
        return Path(hub_id), hub_id, Path(os.path.abspath(hub_id)).stem  # also of "."
    folder, commit = download(hub_id, "dataset", recipe.files[:1], revision)
    return folder, f"{hub_id}@{commit}", hub_id.partition("/")[2]


def find_files(source: Path, globs: Sequence[str]) -> list[Path]:
    """The source itself if it is a file, else the files of the first glob that matches, sorted.

    Raises:
        DataError: nothing matches.
    """
    if not source.exists():
        raise DataError(f"{source}: no such file or folder; check --source")
    if source.is_file():
        return [source]
    for glob in globs:
        found = sorted(path for path in source.glob(glob) if path.is_file())
        if found:
            return found
    raise DataError(
        f"{source}: no file that matches {' or '.join(globs)}; give --source a folder or a file "
        "that holds the rows"
    )


def require_columns(path: Path, columns: Sequence[str]) -> None:
    """Check that a file has the columns; a dotted name ("prompt.1.content") reaches into one.

    Raises:
        DataError: an unreadable file, one of another kind or without rows, or a missing column.
    """
    _, names = next(read_file(path), (0, None))
    if names is None:
        raise DataError(f"{path}: no rows in it; check --source")
    missing = [n for n in columns if n not in names and n.split(".")[0] not in names]
    if missing:
        raise DataError(
            f"{path}: no column {missing[0]!r}; it has {', '.join(names)}. Choose the recipe of "
            "this data set, or name the columns with --problem, --answer and --solution"
        )
