"""The paper's six benchmarks: hub id, column names and the k of avg@k.

Read from a local directory (`<directory>/<name>.jsonl` or `.parquet`, with the hub's column names
or with problem and answer), or from the hub and its cache. Two published gold answers cannot be
graded as they are; they are replaced here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.data import ColumnsConfig, SourceConfig
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.sources import parse_row, read_records, source_name
from stable_opd_mcore.errors import DataError


@dataclass(frozen=True)
class Benchmark:
    hub_id: str
    split: str
    num_samples: int  # k of avg@k; 1 is pass@1
    problem: str = "problem"
    answer: str = "answer"
    context: str | None = None  # column that is prepended to the problem unless it is empty
    configuration: str | None = None


BENCHMARKS = {
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", 32),
    "aime25": Benchmark("math-ai/aime25", "test", 32),
    "amc": Benchmark("AI-MO/aimo-validation-amc", "train", 32),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", 1),
    "minerva": Benchmark("math-ai/minervamath", "test", 1, problem="question"),
    "olympiadbench": Benchmark(
        "Hothan/OlympiadBench",
        "train",
        1,
        problem="question",
        answer="final_answer",
        context="context",
        configuration="OE_TO_maths_en_COMP",
    ),
}


# Published gold answer -> the one to grade against: no plain response equals the first.
GOLD_CORRECTIONS = {
    "minerva": {
        r"x_{0} \cos (\omega t)+$ $\dot{x}_{0} \sin (\omega t) / \omega": (
            r"x_{0} \cos (\omega t)+\dot{x}_{0} \sin (\omega t) / \omega"
        )
    },
    "olympiadbench": {"$221,$8$": "(221, 8)"},
}


def load_benchmark(
    name: str, directory: str | Path | None = None, limit: int | None = None
) -> list[Row]:
    """The rows of a benchmark, without golden solutions and with corrected gold answers.

    They are read from its file in `directory`, or from the hub.

    Raises:
        DataError: unknown name, no file of that name in the directory, or bad rows.
    """
    if name not in BENCHMARKS:
        raise DataError(f"{name}: no such benchmark; give one of {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    source = SourceConfig(
        path=benchmark.hub_id if directory is None else str(_local_file(name, Path(directory))),
        split=benchmark.split,
        limit=limit,
        options={"configuration": benchmark.configuration}
        if directory is None and benchmark.configuration
        else {},
    )
    prefix = source_name(source)
    rows = []
    for number, record in _records(source, name, from_hub=directory is None):
        columns = ColumnsConfig(
            problem=benchmark.problem if benchmark.problem in record else "problem",
            answer=benchmark.answer if benchmark.answer in record else "answer",
            solution=None,
        )
        context = str(record.get(benchmark.context) or "").strip() if benchmark.context else ""
        if context and columns.problem in record:
            record = {**record, columns.problem: f"{context}\n{record[columns.problem]}"}
        row = parse_row(record, columns, f"{source.path}:{number}", f"{prefix}:{number}")
        corrected = GOLD_CORRECTIONS.get(name, {}).get(row.answer or "")
        rows.append(replace(row, answer=corrected) if corrected else row)
    if not rows:
        raise DataError(f"{source.path}: no rows in it; download it again")
    return rows


def _records(source: SourceConfig, name: str, from_hub: bool) -> Iterator[tuple[int, Any]]:
    try:
        yield from read_records(source)
    except DataError as error:
        if not from_hub:
            raise
        raise DataError(
            f"{error}: save it as {name}.parquet or {name}.jsonl in a folder, and name that in "
            "evaluation.benchmark_directory (for prepare, --benchmarks)"
        ) from error


def _local_file(name: str, directory: Path) -> Path:
    found = (directory / f"{name}{suffix}" for suffix in (".jsonl", ".parquet"))
    if file := next((path for path in found if path.is_file()), None):
        return file
    raise DataError(
        f"{directory}: neither {name}.jsonl nor {name}.parquet in it; `stable-opd prepare` writes "
        "them; or set evaluation.benchmark_directory=null (for prepare, leave out --benchmarks) to "
        "read the hub"
    )
