"""Benchmark problems among the training problems.

Compared are the problems of `evaluation.benchmarks` where `evaluation.benchmark_directory` holds
them; nothing is downloaded. `stable-opd prepare` removes them by the same search.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stable_opd_mcore.checks.data_rows import train_paths
from stable_opd_mcore.checks.finding import Finding, finding
from stable_opd_mcore.checks.lazy_inputs import RunInputs
from stable_opd_mcore.data.decontamination import BenchmarkIndex
from stable_opd_mcore.evaluation.benchmarks import load_benchmark


def benchmark_problems(inputs: RunInputs) -> Iterator[Finding]:
    """Training problems that equal a benchmark problem, or share 13 words in a row with one."""
    evaluation = inputs.config.evaluation
    directory, paths = evaluation.benchmark_directory, train_paths(inputs)
    if directory is None or not evaluation.benchmarks or not paths:
        return
    if not Path(directory).is_dir():
        yield finding("absent-benchmarks", directory=directory)
        return
    index = BenchmarkIndex({n: load_benchmark(n, directory) for n in evaluation.benchmarks})
    problems = inputs.prompts.problems()
    matches = [match for match in map(index.find, problems) if match is not None]
    if matches:
        of, first = Counter(match.benchmark for match in matches), matches[0]
        yield finding(
            "benchmark-problems",
            matches=len(matches),
            number=len(problems),
            benchmarks=", ".join(f"{name} {count}" for name, count in of.items()),
            row_id=first.row_id,
            kind=first.kind,
            words=first.words,
            path=paths,
        )
