"""The summary of a file of verdicts: numbers of all rows and of each group, as JSON and as a table.

Not here: the verdicts themselves (score.py) and the numbers of responses (data/responses.py).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from stable_opd_mcore.data.repetition import TailLoop
from stable_opd_mcore.data.responses import MeasuredResponse, ResponseTotals
from stable_opd_mcore.host.printable_text import printable_line

NUM_LISTED = 20  # refused rows, and rows that differ from their label
_AREA = "all"
_TABLE = {  # heading -> name of the number, decimals
    "accuracy": ("accuracy", 3),
    "truncated": ("truncation_rate", 3),
    "loops": ("loop_rate", 3),
    "in loops": ("loop_token_share", 3),
    "zlib": ("repetition_rate", 3),
    "length": ("response_length_mean", 0),
    "p95": ("response_length_p95", 0),
    "time-outs": ("grading_timeouts", 0),
    "crashes": ("grading_crashes", 0),
}


@dataclass(frozen=True)
class SetNumbers:
    """Numbers of all responses or of one group."""

    num_responses: int
    numbers: dict[str, float | None]  # name as in monitoring/names.py, without its area -> value


@dataclass(frozen=True)
class ScoreSummary:
    """What `summary.json` holds."""

    num_rows: int
    unit: str  # of lengths: "tokens" or "characters"
    all: SetNumbers
    groups: dict[str, SetNumbers]
    num_refused: int
    refused: dict[int, str]  # the first of them: row -> why
    num_labelled: int  # graded rows with a label
    num_differing: int
    differing: dict[int, str | None]  # the first rows whose verdict is not their label -> id

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def table(self) -> str:
        """One line for all responses and one for each group, then what needs attention."""
        sets = [self.all, *self.groups.values()]
        names = ["all", *(printable_line(name, 40) for name in self.groups)]
        width = max(map(len, names))
        lines = [f"{'':{width}}  responses  " + "  ".join(f"{head:>9}" for head in _TABLE)]
        for name, numbers in zip(names, sets, strict=True):
            cells = [_cell(numbers.numbers.get(key), digits) for key, digits in _TABLE.values()]
            lines.append(f"{name:{width}}  {numbers.num_responses:9}  " + "  ".join(cells))
        lines.append(f"lengths in {self.unit}")
        if self.num_labelled:
            lines.append(f"{self.num_differing} of {self.num_labelled} verdicts differ from labels")
            lines += [
                f"  row {row}: {printable_line(str(name), 60)}"
                for row, name in self.differing.items()
            ]
            lines += _more(self.num_differing)
        if self.num_refused:
            lines.append(f"{self.num_refused} of {self.num_rows} rows refused")
            lines += [f"  row {row}: {reason}" for row, reason in self.refused.items()]
            lines += _more(self.num_refused)
        return "\n".join(lines)


def summarise(records: Iterable[dict[str, Any]], unit: str, max_length: int | None) -> ScoreSummary:
    """The summary of the records of a file of verdicts, in one pass.

    Raises:
        KeyError, TypeError: a record that score.py did not write.
    """
    totals = ResponseTotals(max_length)
    by_group: defaultdict[str, ResponseTotals] = defaultdict(lambda: ResponseTotals(max_length))
    refused: dict[int, str] = {}
    differing: dict[int, str | None] = {}
    num_rows = num_refused = num_labelled = num_differing = 0
    for record in records:
        num_rows += 1
        if "refused" in record:
            num_refused += 1
            if len(refused) < NUM_LISTED:
                refused[record["row"]] = record["refused"]
            continue
        response = _measured(record)
        totals.add(response)
        if record["group"] is not None:
            by_group[record["group"]].add(response)
        if record["label"] is not None and response.reward is not None:
            num_labelled += 1
            if bool(response.reward) != record["label"]:
                num_differing += 1
                if len(differing) < NUM_LISTED:
                    differing[record["row"]] = record["id"]
    return ScoreSummary(
        num_rows=num_rows,
        unit=unit,
        all=_numbers(totals),
        groups={name: _numbers(by_group[name]) for name in sorted(by_group)},
        num_refused=num_refused,
        refused=refused,
        num_labelled=num_labelled,
        num_differing=num_differing,
        differing=differing,
    )


def _measured(record: dict[str, Any]) -> MeasuredResponse:
    return MeasuredResponse(
        length=record["length"],
        finish_reason=record["finish_reason"],
        reward=record["reward"],
        grading_failure=record["grading_failure"],
        loop=TailLoop(record["loop"]["length"], record["loop"]["period"]),
        repetitive=record["repetitive"],
        repetitive_10k=record["repetitive_10k"],
    )


def _numbers(totals: ResponseTotals) -> SetNumbers:
    values = totals.metrics(_AREA).values_by_key()
    numbers = {key.removeprefix(f"{_AREA}/"): value for key, value in values.items()}
    return SetNumbers(totals.num_responses, numbers)


def _cell(value: float | None, digits: int) -> str:
    return f"{'-':>9}" if value is None else f"{value:9.{digits}f}"


def _more(count: int) -> list[str]:
    return [f"  … and {count - NUM_LISTED} more in verdicts.jsonl"] if count > NUM_LISTED else []
