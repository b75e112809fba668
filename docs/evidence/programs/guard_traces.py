"""Replay the collapse guard over metrics that other runs have published, or over runs of ours.

    python docs/evidence/programs/guard_traces.py FILE.csv [--json FILE]
    python docs/evidence/programs/guard_traces.py RUN ... [--json FILE]

RUN is a run's directory. FILE.csv has a row per step: `wave,arm,seed,step` and any of the columns
in COLUMNS. An empty cell is a metric that the run did not publish; it is absent, not zero. A replay
shows when the guard would have warned, found damage, which starts its measures, and stopped the
run. The trace goes on as it was, so a measure that would have helped is followed by those that
would not have been needed.

Prints a line per run and, by how the runs ended, the share with damage. Not here: the guard.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stable_opd_mcore.config.guard_settings import GuardConfig
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.metric_sinks import read_run
from stable_opd_mcore.train.oversight.guard import GuardState, decide
from stable_opd_mcore.train.oversight.onset import CEILING, SMALL_BUDGET, starts_anew

COLUMNS = {
    "truncation_rate": "rollout/truncation_rate",
    "response_length_mean": "rollout/response_length_mean",
    "overlap_student_mass": "overlap/student_mass",
    "accuracy_finished": "rollout/accuracy_finished",
    "repetitive_share": "tokens/repetitive_share",
    "kl_teacher": "kl/teacher",
    "stop_student_mass": "stop/student_mass",
}
ANEW = "anew"  # 1 in the first step with other data
SAVED_EVERY = 10  # steps between the checkpoints that the guard may return to
HEALED = 0.3  # mean truncation of the last ten steps below which a run has healed
WINDOW, START, END = 5, 20, 10  # steps of the recent mean, of a run's start and of its end

Row = dict[str, float | None]
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Replay:
    """What the guard would have done in one run, in steps; None: never."""

    wave: str
    arm: str
    seed: str  # the file's text
    first_warning: int | None
    first_damage: int | None
    cut: float | None  # truncation rate then, mean of WINDOW steps
    stopped: int | None


def read_traces(file: Path) -> dict[Key, list[tuple[int, Row]]]:
    """(wave, arm, seed) -> its steps in the order of the file.

    Raises:
        DataError: a column is missing, or a cell is not a number; the message names the line.
    """
    runs: dict[Key, list[tuple[int, Row]]] = {}
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        missing = {"wave", "arm", "seed", "step", "truncation_rate"} - set(reader.fieldnames or ())
        if missing:
            raise DataError(f"{file}: no column {', '.join(sorted(missing))}")
        for row in reader:
            try:
                step = int(row["step"])
                values = {m: _number(row.get(column)) for column, m in COLUMNS.items()}
            except (TypeError, ValueError) as error:
                raise DataError(f"{file}:{reader.line_num}: {error}") from error
            runs.setdefault((row["wave"], row["arm"], row["seed"]), []).append((step, values))
    return runs


def _number(cell: str | None) -> float | None:
    """None where a run did not publish the value, or published none that is finite."""
    value = float(cell) if cell else None
    return value if value is not None and math.isfinite(value) else None


def read_runs(directories: Sequence[Path]) -> dict[Key, list[tuple[int, Row]]]:
    """As `read_traces`, of runs' directories, which are the arms. Says which runs have no rollouts
    and are left out.
    """
    runs: dict[Key, list[tuple[int, Row]]] = {}
    for directory in directories:
        rows, events = read_run(RunDirectory(directory).metrics)
        anew = {event["after_step"] + 1 for event in events if starts_anew(event)}
        steps = [
            (row["step"], {**row, ANEW: float(row["step"] in anew)})
            for row in rows
            if row.get("rollout/truncation_rate") is not None
        ]
        if steps:
            runs["", str(directory), ""] = steps
        else:
            print(f"{directory}: no rollouts, not replayed", file=sys.stderr)
    return runs


def replay(key: Key, rows: Sequence[tuple[int, Row]], config: GuardConfig) -> Replay:
    """The guard's decisions over one trace."""
    state, first = GuardState(), dict[str, int]()
    for step, values in rows:
        if values.get(ANEW):
            state = replace(state, watched={})
        state, actions = decide(config, state, step, values, saved=step % SAVED_EVERY == 0)
        for action in actions:
            first.setdefault(action.name, step)
    wave, arm, seed = key
    damage = first.get("damaged")
    cut = None if damage is None else dict(cut_means(rows)).get(damage)
    return Replay(wave, arm, seed, first.get("warned"), damage, cut, first.get("stopped"))


def ending(rates: Sequence[float]) -> str:
    """How a run ended, by its truncation rates: small budget, healed, capped or between."""
    start, end = rates[:START], rates[-END:]
    if sum(start) / len(start) > SMALL_BUDGET:
        return "small budget"
    mean = sum(end) / len(end)
    return "healed" if mean < HEALED else "capped" if mean >= CEILING else "between"


def cut_means(rows: Sequence[tuple[int, Row]]) -> list[tuple[int, float]]:
    """(step, mean truncation of the WINDOW steps up to it), from the first full window on."""
    cut = [(step, row["rollout/truncation_rate"]) for step, row in rows]
    cut = [(step, rate) for step, rate in cut if rate is not None]
    ends = range(WINDOW, len(cut) + 1)
    return [(cut[end - 1][0], sum(r for _, r in cut[end - WINDOW : end]) / WINDOW) for end in ends]


def first_capped(rows: Sequence[tuple[int, Row]]) -> int | None:
    """The first step whose mean truncation is above CEILING."""
    return next((step for step, mean in cut_means(rows) if mean > CEILING), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, nargs="+", help="one CSV file, or runs' directories")
    parser.add_argument("--json", type=Path, help="write the runs as a list of objects")
    options = parser.parse_args()
    config = GuardConfig(policy="act")
    file, *others = options.source
    if not file.is_dir() and others:
        parser.error("one CSV file, or directories of runs")
    runs = read_runs(options.source) if file.is_dir() else read_traces(file)
    replays = {key: replay(key, rows, config) for key, rows in runs.items()}
    ended: dict[str, list[Key]] = {}
    print(f"{'run':<36} warning  damage   cut   stop  capped  end")
    for key, found in replays.items():
        rates = [row["rollout/truncation_rate"] for _, row in runs[key]]
        how = ending([rate for rate in rates if rate is not None])
        ended.setdefault(how, []).append(key)
        numbers = (found.first_warning, found.first_damage, found.stopped, first_capped(runs[key]))
        warning, damage, stop, capped = ("-" if step is None else step for step in numbers)
        cut = "-" if found.cut is None else f"{found.cut:.2f}"
        name = " ".join(part for part in key if part)
        print(f"{name:<36} {warning:>7} {damage:>7} {cut:>5} {stop:>6} {capped:>7}  {how}")
    for how, keys in sorted(ended.items()):
        damaged = sum(replays[key].first_damage is not None for key in keys)
        stopped = sum(replays[key].stopped is not None for key in keys)
        print(f"{how}: damage in {damaged} of {len(keys)} runs, a stop in {stopped}")
    if options.json:
        text = json.dumps([asdict(found) for found in replays.values()], indent=1)
        write_atomically(options.json, text.encode())


if __name__ == "__main__":
    main()
