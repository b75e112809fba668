"""Rows of the data: lengths, those that `train` refuses, long golden solutions, repeated ones."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stable_opd_mcore.commands.check.finding import Finding, finding
from stable_opd_mcore.data.decontamination import BenchmarkIndex
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.sources import read_records
from stable_opd_mcore.data.synthetic import SYNTHETIC
from stable_opd_mcore.evaluation.benchmarks import load_benchmark
from stable_opd_mcore.inputs.run_inputs import RunInputs


def facts(inputs: RunInputs) -> list[str]:
    """Rows and token lengths of both sets, and how many golden solutions are cut, as lines."""
    lines = []
    for name, prompts in (("data.train", inputs.prompts), ("data.eval", inputs.held_out)):
        if prompts is None:
            continue
        dropped = f", {prompts.num_dropped} dropped" if prompts.num_dropped else ""
        line = f"{name}  {len(prompts)} rows{dropped}; prompts {_lengths(prompts.prompt_lengths())}"
        if own := prompts.teacher_prompt_lengths():
            line += f"; the teacher's {_lengths(own)}"
        goldens = [length for length in prompts.golden_lengths() if length]
        if goldens:
            limit = inputs.config.longest_episode
            cut = sum(length > limit for length in goldens)
            line += (
                f"; {len(goldens)} golden solutions, {_lengths(goldens)}, {cut} longer than a "
                "response may be"
            )
        lines.append(line)
    return lines


def _lengths(tokens: Sequence[int]) -> str:
    median, most = np.percentile(tokens, (50, 95))
    return f"{median:.0f} tokens (median), {most:.0f} (95 %), {max(tokens)} (longest)"


def usable_rows(inputs: RunInputs) -> Iterator[Finding]:
    """Rows that are dropped; everything that `train` refuses in rows raises as it does there."""
    held_out = inputs.held_out
    for name, prompts in (("data.train", inputs.prompts), ("data.eval", held_out)):
        if prompts is not None and (dropped := prompts.num_dropped):
            rows = len(prompts) + dropped
            yield finding(
                "dropped-rows", dropped=dropped, name=name, rows=rows, window=prompts.window
            )


def golden_lengths(inputs: RunInputs) -> Iterator[Finding]:
    """Golden solutions that are longer than a response may be."""
    if not inputs.objective.needs_golden or not inputs.objective.needs_rollouts:
        return
    limit = inputs.config.longest_episode
    lengths = list(filter(None, inputs.prompts.golden_lengths()))
    if longer := sum(length > limit for length in lengths):
        yield finding(
            "long-golden-solutions",
            longer=longer,
            number=len(lengths),
            longest=max(lengths),
            limit=limit,
        )


def train_paths(inputs: RunInputs) -> str:
    """The sources of `data.train` that are files or data sets."""
    paths = [source.path for source in inputs.config.data.sources]
    return ", ".join(path for path in paths if not path.startswith(SYNTHETIC))


def repeated_problems(inputs: RunInputs) -> Iterator[Finding]:
    """Problems that occur more than once in the training set, or also in the held-out one."""
    path = train_paths(inputs)
    if not path:
        return
    counts, held_out = Counter(_problems(inputs.prompts)), inputs.held_out
    if repeated := [text for text, count in counts.items() if count > 1]:
        first = repeated[0]
        yield finding(
            "repeated-problems", number=len(repeated), first=first, rows=counts[first], path=path
        )
    shared = [text for text in dict.fromkeys(_problems(held_out)) if text in counts]
    if shared and held_out is not None:
        yield finding(
            "held-out-problems", number=len(shared), first=shared[0], rows=len(held_out), path=path
        )


def repeated_held_out(inputs: RunInputs) -> Iterator[Finding]:
    """Rows of the held-out set that repeat a problem."""
    source, held_out = inputs.config.data.eval, inputs.held_out
    if source is None or held_out is None or source.path.startswith(SYNTHETIC):
        return
    rows, distinct = sum(1 for _ in read_records(source)), len(held_out) + held_out.num_dropped
    if rows > distinct:
        yield finding("repeated-held-out", number=rows - distinct, rows=rows, distinct=distinct)


def _problems(prompts: PromptSet | None) -> Sequence[str]:
    return [] if prompts is None else [" ".join(text.split()) for text in prompts.problems()]


def benchmark_problems(inputs: RunInputs) -> Iterator[Finding]:
    """Training problems that equal a benchmark problem, or share 13 words in a row with one.

    Nothing is downloaded. `stable-opd prepare` removes such problems by the same search.
    """
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
