"""Findings as text for a terminal and as JSON.

Names and templates come from other people's files, so control characters are shown as escapes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stable_opd_mcore.commands.check.finding import SEVERITIES, Finding
from stable_opd_mcore.host.printable_text import printable

_WIDTH = 110
_PROMPT_CHARACTERS, _TRANSCRIPT_CHARACTERS = 1500, 6000


@dataclass(frozen=True)
class Report:
    """What was found, and what was read."""

    findings: tuple[Finding, ...]
    facts: tuple[str, ...] = ()  # lines: models, stop class, software
    prompts: tuple[tuple[str, str], ...] = ()  # (role, an example by its template), up to two
    transcripts: tuple[tuple[str, str], ...] = ()  # (role, an example of several turns), up to two

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def without_errors(self) -> str:
        """Facts and what does not end a run, whose errors are shown elsewhere."""
        found = by_severity(self.findings)
        shown = [each for each in found if each.severity != "error" or each.may_pass]
        return "\n".join([*map(printable, self.facts), *map(finding_text, shown)])

    @property
    def verdict(self) -> str:
        counts = [
            f"{number} {severity}{'' if number == 1 else 's'}"
            for severity in SEVERITIES
            if (number := sum(finding.severity == severity for finding in self.findings))
        ]
        return ", ".join(counts) or "no finding"

    def as_json(self) -> str:
        values: dict[str, Any] = {
            "findings": list(map(asdict, self.findings)),
            "errors": len(self.errors),
            "facts": self.facts,
            "prompts": dict(self.prompts),
            "transcripts": dict(self.transcripts),
        }
        return json.dumps(values, indent=1)

    def text(self) -> str:
        """Facts, examples of both models side by side, findings: errors first, the verdict last."""
        parts = ["\n".join(map(printable, self.facts))] if self.facts else []
        if self.prompts:
            title = "a problem's prompt, by each template"
            parts.append(_side_by_side(title, self.prompts, _PROMPT_CHARACTERS))
        if self.transcripts:
            title = "a conversation, as each model reads it"
            parts.append(_side_by_side(title, self.transcripts, _TRANSCRIPT_CHARACTERS))
        parts += map(finding_text, by_severity(self.findings))
        return "\n\n".join([*parts, self.verdict])


def by_severity(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def finding_text(finding: Finding) -> str:
    """One finding as lines."""
    lines = [f"{finding.severity.upper()}  {finding.subject}: {finding.title}"]
    lines += [f"    {label}: {value}" for label, value in finding.values]
    lines += [f"    effect: {finding.consequence}"] if finding.consequence else []
    lines += [f"    remedy: {finding.remedy}"] if finding.remedy else []
    return "\n".join(map(printable, lines))


def _side_by_side(title: str, texts: Sequence[tuple[str, str]], characters: int) -> str:
    table = Table(title=title, width=_WIDTH)
    for role, _ in texts:
        table.add_column(role, overflow="fold", ratio=1)
    shown = [printable(text) for _, text in texts]
    cut = [text if len(text) <= characters else f"{text[:characters]} ..." for text in shown]
    table.add_row(*(Text(text) for text in cut))
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
