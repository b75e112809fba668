"""The suite's results as one JSON file and one Markdown table for BENCHMARKS.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from benchmarks.gpu.record import Entry
from benchmarks.gpu.suite import PartResult

JSON_FILE, MARKDOWN_FILE = "results.json", "results.md"
_COLUMNS = ("part", "", "value", "limit", "note")


def write_results(results: Sequence[PartResult], folder: Path, device: str) -> None:
    """Replace both files. Called after every part, so that an interrupted suite leaves them too."""
    values = {"date": str(date.today()), "device": device, "parts": [asdict(r) for r in results]}
    (folder / JSON_FILE).write_text(json.dumps(values, indent=1) + "\n")
    (folder / MARKDOWN_FILE).write_text(markdown(results, device))


def read_results(folder: Path, device: str) -> dict[str, PartResult]:
    """What earlier calls left in the folder, by part; nothing of another device."""
    file = folder / JSON_FILE
    if not file.is_file():
        return {}
    values = json.loads(file.read_text())
    if values["device"] != device:
        return {}
    return {
        part["name"]: PartResult(
            **part | {"entries": tuple(Entry(**entry) for entry in part["entries"])}
        )
        for part in values["parts"]
    }


def versions_of(environment: PartResult) -> dict[str, str]:
    """The versions that the first part found, and the GPU."""
    named = (*VERSIONS, "GPU")
    return {e.name: str(e.value) for e in environment.entries if e.name in named}


def markdown(results: Sequence[PartResult], device: str) -> str:
    """A line with date and versions, then the table: a row for each part and each of its entries.

    The entries of the part "environment" are the line's versions.
    """
    found = {e.name: e.value for r in results if r.name == "environment" for e in r.entries}
    name = found.get("GPU") or device
    versions = ", ".join(f"{k} {found[k]}" for k in VERSIONS if found.get(k))
    lines = [f"{name}, {date.today()}. {versions}.", "", _row(*_COLUMNS)]
    lines.append("|---|---|--:|--:|---|")
    for result in results:
        lines.append(
            _row(f"**{result.name}**", result.status, f"{result.seconds:.0f} s", "", result.reason)
        )
        lines += _entry_rows(result)
    return "\n".join(lines) + "\n"


VERSIONS = (
    "driver",
    "CUDA",
    "Python",
    "torch",
    "NCCL",
    "triton",
    "transformer_engine",
    "apex",
    "megatron-core",
    "sglang",
    "liger-kernel",
    "transformers",
)


def _entry_rows(result: PartResult) -> Iterator[str]:
    for entry in result.entries:
        if result.name == "environment" and entry.name in (*VERSIONS, "GPU"):
            continue
        limit = "" if entry.limit is None else number(entry.limit)
        yield _row(result.name, entry.name, _value(entry), limit, entry.note)


def _value(entry: Entry) -> str:
    if entry.kind == "skipped":
        return "not measured"
    if entry.kind == "notice":
        return ""
    text = f"{number(entry.value)} {entry.unit}".rstrip()
    return text if entry.passes else f"**{text}**"


def number(value: float | str | None) -> str:
    """Four digits; a large number with separators."""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
