"""The summary of a file of verdicts: numbers of all rows and of each group, and their table."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from stable_opd_mcore.data.responses import MeasuredResponse, ResponseTotals
from stable_opd_mcore.host.printable_text import printable_line, shortest_end

NUM_LISTED = 20  # rows of each kind in _LISTED
_LISTED = {
    "right_in_loop": "{} right responses hold the gold answer, but loop until their budget ends",
    "refused": "{} of {num_rows} rows refused",
    "ungraded": "{} of {num_rows} rows have no gold answer and are not in the accuracy",
}
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
_NAME_CHARACTERS = 40  # a longer name of a group is shortened in the table
_NO_NUMBER = "\N{EN DASH}"
_RESPONSE = TypeAdapter(MeasuredResponse)


class _Totals(ResponseTotals):
    """Numbers of one set of responses; None for a detector that could judge none of them."""

    def __init__(self, max_length: int | None):
        super().__init__(max_length)
        self._judging = dict.fromkeys(("repetition_rate", "repetition_rate_10k"), False)

    def add(self, response: MeasuredResponse) -> None:
        super().add(response)
        self._judging["repetition_rate"] |= response.repetitive is not None
        self._judging["repetition_rate_10k"] |= response.repetitive_10k is not None

    def plain(self) -> dict[str, Any]:
        """Values by the names of metrics, without their area; None where undefined."""
        values = self.metrics(_AREA).values_by_key()
        numbers = {key.removeprefix(f"{_AREA}/"): value for key, value in values.items()}
        numbers |= {name: None for name, has_judged in self._judging.items() if not has_judged}
        return {"num_responses": self.num_responses, "numbers": numbers}


def summarise(
    records: Iterable[dict[str, Any]], unit: str, max_length: int | None
) -> dict[str, Any]:
    """What `summary.json` says about the records of a file of verdicts, in one pass.

    `num_rows`, `num_episodes` among them, `unit` of lengths, `all` and `groups`; then for three
    kinds of rows, `refused`, `ungraded` and `right_in_loop`, their number (`num_refused`) and the
    first ones: the row's number, after its file's name if there are several, and the reason or its
    id.
    """
    totals = _Totals(max_length)
    by_group: defaultdict[str, _Totals] = defaultdict(lambda: _Totals(max_length))
    listed: dict[str, dict[str, str | None]] = {kind: {} for kind in _LISTED}
    counts = dict.fromkeys(("num_rows", "num_episodes", *(f"num_{kind}" for kind in _LISTED)), 0)

    def add(kind: str, record: dict[str, Any], text: str | None) -> None:
        counts[f"num_{kind}"] += 1
        if len(listed[kind]) < NUM_LISTED:
            file = f"{record['file']}:" if "file" in record else ""
            listed[kind][f"{file}{record['row']}"] = text

    for record in records:
        counts["num_rows"] += 1
        if "refused" in record:
            add("refused", record, record["refused"])
            continue
        counts["num_episodes"] += record["is_episode"]
        response = _RESPONSE.validate_python(record)
        totals.add(response)
        if record["group"] is not None:
            by_group[record["group"]].add(response)
        if record["reward"] is None:
            add("ungraded", record, record["id"])
        if record["right_in_loop"]:
            add("right_in_loop", record, record["id"])
    groups = {name: by_group[name].plain() for name in sorted(by_group)}
    return {"unit": unit, "all": totals.plain(), "groups": groups, **counts, **listed}


def table(summary: dict[str, Any]) -> str:
    """One line for all responses and one for each group, then what needs attention."""
    names = _short_names(list(summary["groups"]))
    sets = [("all", summary["all"]), *zip(names, summary["groups"].values(), strict=True)]
    width = max(len(name) for name, _ in sets)
    lines = [f"{'':{width}}  responses  " + "  ".join(f"{head:>9}" for head in _TABLE)]
    for name, numbers in sets:
        cells = (_cell(numbers["numbers"].get(key), digits) for key, digits in _TABLE.values())
        lines.append(f"{name:{width}}  {numbers['num_responses']:9}  " + "  ".join(cells))
    lines.append(f"lengths in {summary['unit']}")
    columns = {
        name.removeprefix("column_"): column
        for name, column in summary.get("settings", {}).items()
        if name.startswith("column_") and isinstance(column, str)
    }
    if columns:
        shown = ", ".join(f"{role} from {column}" for role, column in columns.items())
        lines.append(printable_line(f"columns: {shown}", 300))
    if episodes := summary["num_episodes"]:
        text = "{} of {} rows are episodes: accuracy is the reward that they got, lengths are the "
        lines.append(f"{text.format(episodes, summary['num_rows'])}last turn's")
    for kind, heading in _LISTED.items():
        count, rows = summary[f"num_{kind}"], summary[kind]
        if kind == "ungraded" and count == summary["num_rows"] - summary["num_refused"]:
            lines += ["no row has a gold answer; name its column with --gold"] if count else []
            continue
        if count:
            lines.append(heading.format(count, **summary))
        lines += [
            f"  row {printable_line(place, 100)}: {printable_line(str(text), 300)}"
            for place, text in rows.items()
        ]
        if count > len(rows):
            lines.append(f"  … and {count - len(rows)} more in verdicts.jsonl")
    return "\n".join(lines)


def _short_names(names: list[str]) -> list[str]:
    """Printable names of groups; a long one is cut to the end that no other has, as for files."""
    paths = [Path(name) for name in names]
    short = [
        name if len(name) <= _NAME_CHARACTERS else shortest_end(path, paths)
        for name, path in zip(names, paths, strict=True)
    ]
    return [printable_line(name, 2 * _NAME_CHARACTERS) for name in short]


def _cell(value: float | None, digits: int) -> str:
    return f"{_NO_NUMBER if value is None else format(value, f'.{digits}f'):>9}"
