"""Benchmark problems among the training problems.

Compared are the problems of `evaluation.benchmarks` where `evaluation.benchmark_directory` holds
them; nothing is downloaded. `stable-opd prepare` removes them by the same search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stable_opd_mcore.checks.finding import Finding
from stable_opd_mcore.checks.known import Known
from stable_opd_mcore.data.decontamination import BenchmarkIndex, BenchmarkProblem
from stable_opd_mcore.data.synthetic import SYNTHETIC
from stable_opd_mcore.evaluation.benchmarks import load_benchmark


def benchmark_problems(known: Known) -> Iterator[Finding]:
    """Training problems that equal a benchmark problem, or share 13 words in a row with one.

    Raises:
        DataError: the directory lacks one of the benchmarks, or a row is broken.
    """
    evaluation, source = known.config.evaluation, known.config.data.train
    directory = evaluation.benchmark_directory
    if directory is None or not evaluation.benchmarks or source.path.startswith(SYNTHETIC):
        return
    if not Path(directory).is_dir():
        yield Finding(
            "note",
            "contamination",
            "the benchmarks are not on this machine, so none is looked for in data.train",
            (("evaluation.benchmark_directory", directory), ("found", "no such directory")),
            "problems of the benchmarks may be trained on",
            "`stable-opd prepare` writes the benchmarks, and training data without their problems",
        )
        return
    index = BenchmarkIndex(
        BenchmarkProblem(name, row.row_id, row.problem)
        for name in evaluation.benchmarks
        for row in load_benchmark(name, directory)
    )
    problems = known.prompts.problems()
    matches = [match for match in map(index.find, problems) if match is not None]
    if matches:
        of = Counter(match.benchmark for match in matches)
        first = matches[0]
        yield Finding(
            "warning",
            "contamination",
            f"{len(matches)} of {len(problems)} training problems are problems of a benchmark",
            (
                ("benchmarks", ", ".join(f"{name} {count}" for name, count in of.items())),
                (f"first of them ({first.row_id}, {first.kind})", f"{first.words:.100}"),
            ),
            "accuracy on these benchmarks measures what was trained on",
            f"`stable-opd prepare`, or remove the rows from {source.path}",
        )
