"""The report's tables: outcomes of the runs, benchmark results, settings that differ.

Text from a run's files is untrusted: a table makes it short and printable, and the template escapes
it. outcomes.py computes the numbers of a run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stable_opd_mcore.commands.report.chosen_runs import WrittenRun, whole_number
from stable_opd_mcore.commands.report.figures import WINDOW, Row
from stable_opd_mcore.commands.report.outcomes import Outcome, defined, first_damage, outcome
from stable_opd_mcore.evaluation.estimates import bootstrap_interval
from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.train.oversight.onset import BASELINE, DETECTORS

MISSING = "\N{EN DASH}"
MAX_CELL = 200  # characters of a cell; a longer one is cut
OF_SEEDS = (  # column, field of Outcome
    ("accuracy at start", "initial_accuracy"),
    ("accuracy at peak", "peak_accuracy"),
    ("accuracy at end", "final_accuracy"),
    ("greedy at end", "greedy_final_accuracy"),
    ("truncated at worst", "max_truncation_rate"),
    ("truncated at end", "final_truncation_rate"),
    ("repetitive at end", "final_repetition_rate"),
)


@dataclass
class Table:
    """A table of short printable texts."""

    columns: list[str]
    texts: int = 1  # number of leading columns that hold words
    rows: list[list[str]] = field(default_factory=list)

    def add(self, cells: Sequence[Any]) -> None:
        self.rows.append([_cell(cell) for cell in cells])


def outcome_table(runs: Sequence[WrittenRun]) -> Table:
    """One row per run: its outcome, and the first damage."""
    return _table([_outcome_cells(run) for run in runs], texts=2)


def seed_table(runs: Sequence[WrittenRun]) -> Table | None:
    """One row per label of several runs, with means over them; None if there is no such label."""
    arms: dict[str, list[Outcome]] = {}
    for written in runs:
        arms.setdefault(written.run.label, []).append(outcome(written.rows))
    records = [
        {"arm": label, "seeds": str(len(found))}
        | {title: _over_seeds([getattr(one, name) for one in found]) for title, name in OF_SEEDS}
        for label, found in arms.items()
        if len(found) > 1
    ]
    return _table(records, texts=1) if records else None


def _over_seeds(values: Sequence[float]) -> str:
    """Their mean and its interval; MISSING where a run has none."""
    if any(map(math.isnan, values)):
        return MISSING
    low, high = bootstrap_interval([values])
    return f"{sum(values) / len(values):.3f} [{low:.3f}, {high:.3f}]"


def _table(records: Sequence[Mapping[str, Any]], texts: int) -> Table:
    table = Table(list(records[0]), texts)
    for record in records:
        table.add(list(record.values()))
    return table


def _outcome_cells(written: WrittenRun) -> dict[str, Any]:
    rows, total = written.rows, whole_number(written.settings, "train.steps")
    found = outcome(rows)
    return {
        "run": written.run.name,
        "first damage": verdict(rows, written.events),
        "steps": f"{rows[-1]['step']:,}" + ("" if total is None else f" of {total:,}"),
        "accuracy at start": found.initial_accuracy,
        "accuracy at peak": found.peak_accuracy,
        "accuracy at end": found.final_accuracy,
        "greedy at end": found.greedy_final_accuracy,
        "truncated at worst": found.max_truncation_rate,
        "truncated at end": found.final_truncation_rate,
        "repetitive at worst": found.max_repetition_rate,
        "repetitive at end": found.final_repetition_rate,
        "length at end": _mean(defined(rows, "rollout/response_length_mean")[-WINDOW:]),
        "tokens per second": _mean(defined(rows, "throughput/tokens_per_second")),
    }


def verdict(rows: Sequence[Row], events: Sequence[Mapping[str, Any]] = ()) -> str:
    """The first damage by a collapse in words; MISSING where there are too few rollouts."""
    found = first_damage(rows, events)
    if found is None:
        watched = defined(rows, "rollout/truncation_rate")
        return "none" if len(watched) > BASELINE else MISSING
    step, symptoms = found
    return f"step {step:,}: " + ", ".join(DETECTORS[symptom.name].metric for symptom in symptoms)


def config_differences(runs: Sequence[WrittenRun]) -> Table | None:
    """Settings that differ between labels; None if none differs.

    Runs with one label (seeds of one arm) share a column, which lists all their values.
    """
    settings: dict[str, list[dict[str, str]]] = {}
    for written in runs:
        settings.setdefault(written.run.label, []).append(written.settings)
    table = Table(["setting", *(printable(label, MAX_CELL) for label in settings)])
    for key in sorted({key for group in settings.values() for flat in group for key in flat}):
        cells = [
            ", ".join(dict.fromkeys(flat.get(key, MISSING) for flat in group))
            for group in settings.values()
        ]
        if len(set(cells)) > 1:
            table.add([key, *cells])
    return table if table.rows else None


def benchmark_table(runs: Sequence[WrittenRun]) -> Table | None:
    """What `stable-opd evaluate` wrote: a row per benchmark and run; None if no run has results.

    Below them are the means over the runs of one label, with an interval over these runs.
    """
    results = [
        (f"{written.run.name}, {model}", written.results[model])
        for written in runs
        for model in sorted(written.results)
    ]
    results += _benchmark_means(runs)
    records = [
        {
            "benchmark": benchmark,
            "run": name,
            "problems": _count(result.get("num_problems")),
            "k": _count(result.get("num_samples")),
            "accuracy": result.get("accuracy"),
            "95 % interval": _interval(result),
            "truncated": result.get("truncation_rate"),
            "repetitive": result.get("repetition_rate"),
            "tokens": _count(result.get("response_length_mean")),
        }
        for benchmark in dict.fromkeys(name for _, found in results for name in found)
        for name, found in results
        if (result := found.get(benchmark)) is not None
    ]
    return _table(records, texts=2) if records else None


def _benchmark_means(runs: Sequence[WrittenRun]) -> list[tuple[str, dict[str, dict[str, float]]]]:
    """Means by benchmark of each model's name that several runs of one label have evaluated."""
    arms: dict[tuple[str, str], list[dict[str, dict[str, float]]]] = {}
    for written in runs:
        for model, found in written.results.items():
            arms.setdefault((written.run.label, model), []).append(found)
    return [
        (
            f"{label}, {model}, mean of {len(found)} seeds",
            {
                benchmark: _mean_result([one[benchmark] for one in found])
                for benchmark in found[0]
                if all(benchmark in one for one in found)
            },
        )
        for (label, model), found in arms.items()
        if len(found) > 1
    ]


def _mean_result(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """The means of the numbers that all have, and the accuracy's interval over them."""
    keys = set(results[0]).intersection(*results)
    means = {key: sum(one[key] for one in results) / len(results) for key in keys}
    if "accuracy" in keys:
        low, high = bootstrap_interval([[one["accuracy"] for one in results]])
        means |= {"accuracy_low": low, "accuracy_high": high}
    return means


def described(settings: Mapping[str, str]) -> str:
    """One line about a run: its objective, its student and teacher, its data."""
    if not settings:
        return "on-policy distillation"
    terms = [settings.get("objective.name", MISSING)]
    for key, name in (("kl.beta", "\u03b2"), ("mixture.lambda", "\u03bb")):
        if settings.get(key, "0.0") not in ("0", "0.0"):
            terms.append(f"{name} = {settings[key]}")
    parts = [", ".join(terms)]
    for key in ("student.path", "teacher.path", "data.train.path"):
        if settings.get(key, "None") != "None":
            parts.append(f"{key.partition('.')[0]} {settings[key]}")
    return " \N{MIDDLE DOT} ".join(parts)


def _interval(result: Mapping[str, float]) -> str | None:
    if not {"accuracy_low", "accuracy_high"} <= result.keys():
        return None
    return f"{result['accuracy_low']:.3f} to {result['accuracy_high']:.3f}"


def _mean(numbers: Sequence[float]) -> str:
    return _count(sum(numbers) / len(numbers) if numbers else None)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return MISSING
    return f"{value:.3f}" if isinstance(value, float) else printable(str(value), MAX_CELL)


def _count(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"
