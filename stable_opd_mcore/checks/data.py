"""Rows of the data: what `train` refuses, golden solutions that are too long, repeated rows.

Not here: benchmark contamination of a prepared set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stable_opd_mcore.checks.finding import Finding
from stable_opd_mcore.checks.known import Known
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.sources import read_records
from stable_opd_mcore.data.synthetic import SYNTHETIC

SUBJECT = "data"
ID_COLUMNS = ("id", "uuid", "unique_id", "problem_id", "question_id", "index")


def usable_rows(known: Known) -> Iterator[Finding]:
    """Rows that are dropped; everything that `train` refuses in rows raises as it does there."""
    held_out = known.held_out
    for name, prompts in (("data.train", known.prompts), ("data.eval", held_out)):
        if prompts is not None and prompts.num_dropped:
            rows = len(prompts) + prompts.num_dropped
            yield Finding(
                "warning",
                SUBJECT,
                f"{prompts.num_dropped} rows of {name} do not fit the student's window",
                (("rows", str(rows)), ("max_position_embeddings", str(prompts.window))),
                "they are dropped, which takes the longest problems or golden solutions away",
                "sampling.max_new_tokens, or data.overlong=error to see the first of them",
            )


def golden_lengths(known: Known) -> Iterator[Finding]:
    """Golden solutions that are longer than a response may be."""
    if not known.objective.needs_golden or not known.objective.needs_rollouts:
        return
    limit = known.config.sampling.max_new_tokens
    lengths = known.prompts.golden_lengths()
    longer = sum(length > limit for length in lengths)
    if longer:
        yield Finding(
            "warning",
            SUBJECT,
            f"{longer} of {len(lengths)} golden solutions are longer than a response may be",
            (
                ("longest golden solution", f"{max(lengths)} tokens"),
                ("sampling.max_new_tokens", str(limit)),
            ),
            "the mixture teaches responses that are cut when the student samples them: "
            "truncation rises",
            "sampling.max_new_tokens, or shorter golden solutions in data.train",
        )


def repeated_ids(known: Known) -> Iterator[Finding]:
    """Rows with the same id, in files that have a column of ids."""
    source = known.config.data.train
    if source.path.startswith(SYNTHETIC):
        return
    counts: Counter[tuple[str, str]] = Counter()
    for _, record in read_records(source):
        for column in ID_COLUMNS:
            if record.get(column) is not None:
                counts[column, str(record[column])] += 1
    repeated = {key: count for key, count in counts.items() if count > 1}
    for column in dict.fromkeys(column for column, _ in repeated):
        values = [value for name, value in repeated if name == column]
        yield Finding(
            "warning",
            SUBJECT,
            f"{len(values)} ids of data.train occur more than once",
            (
                (f"column {column!r}", f"{values[0]!r:.60} in {repeated[column, values[0]]} rows"),
                ("expected", "one row each"),
            ),
            "the file was probably joined twice; its rows count more than the others",
            f"remove the repeated rows from {source.path}",
        )


def repeated_problems(known: Known) -> Iterator[Finding]:
    """Problems that occur more than once in the training set, or also in the held-out one."""
    train = _problems(known.prompts)
    counts = Counter(train)
    repeated = [text for text, count in counts.items() if count > 1]
    if repeated and not known.config.data.train.path.startswith(SYNTHETIC):
        yield Finding(
            "warning",
            SUBJECT,
            f"{len(repeated)} problems of data.train occur more than once",
            (("first of them", f"{repeated[0]!r:.80}"), ("rows", str(counts[repeated[0]]))),
            "they are trained on more often than the others",
            f"remove the repeated rows from {known.config.data.train.path}",
        )
    if known.held_out is None:
        return
    shared = [text for text in dict.fromkeys(_problems(known.held_out)) if text in counts]
    if shared and not known.config.data.train.path.startswith(SYNTHETIC):
        yield Finding(
            "warning",
            SUBJECT,
            f"{len(shared)} problems of data.eval are also in data.train",
            (("first of them", f"{shared[0]!r:.80}"), ("data.eval", f"{len(known.held_out)} rows")),
            "accuracy on data.eval measures what was trained on",
            f"remove these rows from {known.config.data.train.path}",
        )


def _problems(prompts: PromptSet) -> Sequence[str]:
    return [" ".join(text.split()) for text in prompts.problems()]
