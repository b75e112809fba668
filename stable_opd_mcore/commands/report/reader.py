"""The rollouts that a reader sees: one record for the list, one for the chosen rollout.

The page holds rollouts of some steps (`embedded`).
Text from a run's files is untrusted; it becomes printable here, and the page shows it as text
(templates/reader.js).
"""

import base64
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.commands.report.chosen_runs import WrittenRun, whole_number
from stable_opd_mcore.commands.report.figures import Row
from stable_opd_mcore.data.repetition import ZLIB_LEVEL, min_loop_tokens, tail_loop
from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.data.thoughts import opens_thinking, split_thought
from stable_opd_mcore.data.token_files import TokenText, read_tokens
from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.host.run_directory import ANY_STEP, RunDirectory
from stable_opd_mcore.records import Rollout
from stable_opd_mcore.rollout.agent_account import account_text

LENGTH_BUDGET = "sampling.max_new_tokens"  # a run's setting
SNIPPET_CHARACTERS = 80
MAX_STEPS = 40  # most steps in the static page, over all of its runs
MIN_STEPS = 3  # each run has there: the last, the first and the worst
ROLLOUTS_PER_STEP = 8  # most in the static page
MIN_TURN_CHARACTERS = 100  # shown of a turn at least
TAIL_SHARE = 0.4  # share of a long text's end in what is kept: repetition is there


@dataclass(frozen=True)
class Limits:
    """How much of one rollout is shown; the middle of a longer one is left out."""

    tokens: int
    characters: int


PAGE = Limits(tokens=2_000, characters=8_000)


def stored_steps(directory: Path) -> list[int]:
    """The steps whose rollouts a run has stored, in order."""
    files = RunDirectory(directory).rollouts(0).parent.glob(f"{ANY_STEP}.jsonl")
    found = (re.fullmatch(r"step_(\d{6,12})\.jsonl", path.name) for path in files)
    return sorted(int(match[1]) for match in found if match)


def listed(rollout: Rollout, run: int, step: int, index: int, budget: int | None) -> dict[str, Any]:
    """What the list shows of the `index`-th rollout of a step's file. `budget`: the run's limit of
    a turn, for prompts that have none of their own.

    Repetition and compression are those of the last turn.
    """
    start = len(rollout.token_ids) - rollout.turns[-1].num_tokens
    least = min_loop_tokens(rollout.prompt.max_new_tokens or budget)
    loop = tail_loop(rollout.token_ids[start:], min_length=least)
    parts = [[part.num_tokens, part.weight_version] for part in rollout.segments]
    text = rollout.text.encode("utf-8", "surrogatepass")
    return {
        **({"segments": parts} if len(parts) > 1 else {}),
        **({"turns": len(rollout.turns)} if len(rollout.turns) > 1 else {}),
        "run": run,
        "step": step,
        "index": index,
        "prompt_id": printable(rollout.prompt.prompt_id),
        "sample": rollout.sample_index,
        "tokens": len(rollout.token_ids),
        "finish": rollout.finish_reason,
        "reward": rollout.reward,
        "version": rollout.weight_version,
        "repeats": loop.length,
        "compression": round(len(text) / len(zlib.compress(text, ZLIB_LEVEL)), 2),
        "snippet": printable(rollout.problem[:SNIPPET_CHARACTERS]).replace("\n", " "),
    }


def detail(
    rollout: Rollout, stored: Iterable[TokenText], repeats: int, limits: Limits
) -> dict[str, Any]:
    """Texts of a rollout that ends in a loop of `repeats` tokens; its tokens if they are stored."""
    key = (rollout.prompt.prompt_id, rollout.sample_index)
    found = (one for one in stored if (one.prompt_id, one.sample_index) == key)
    tokens = next((one for one in found if len(one.pieces) == len(rollout.token_ids)), None)
    shown: dict[str, Any] = {
        "prompt": _cut(rollout.problem, limits.characters),
        "answer": rollout.prompt.answer and _cut(rollout.prompt.answer, limits.characters),
        "text": _cut(rollout.text, limits.characters) if tokens is None else "",
        "golden": None,
        "pieces": None,
        "gap": None,
        "values": {},
    }
    if rollout.account:
        shown["account"] = account_text(rollout.account)
    continued = _continued(rollout)
    if len(contexts := _contexts(rollout, continued)) > 1:
        shown["contexts"] = contexts
    turns = [] if rollout.has_one_turn else _turns(rollout, continued, limits, tokens is None)
    if turns:
        shown["turns"] = turns
    if tokens is None:
        return shown
    count = len(tokens.pieces)
    left_out, tail = max(0, count - limits.tokens), int(limits.tokens * TAIL_SHARE)
    head = limits.tokens - tail
    kept = [*range(head), *range(count - tail, count)] if left_out else range(count)
    values = {key: [numbers[at] for at in kept] for key, numbers in tokens.values.items()}
    values["rollout_logprob"] = [float(f"{rollout.rollout_logprobs[at]:.4g}") for at in kept]
    if turns:
        shown["turns"] = _outside_gap(turns, head, left_out)
    thought = _thought(rollout, tokens.pieces)
    if any(thought):
        values["thought"] = [thought[at] for at in kept]
    if repeats:
        values["repetition"] = [float(at >= count - repeats) for at in kept]
    return shown | {
        "pieces": [_cut(tokens.pieces[at], limits.characters) for at in kept],
        "gap": {"at": head, "tokens": left_out} if left_out else None,
        "values": values,
        "golden": tokens.golden and _cut(tokens.golden, limits.characters),
    }


def _thought(rollout: Rollout, pieces: Sequence[str]) -> list[float]:
    """For each token whether it is before the answer of its turn."""
    found: list[float] = []
    for turn in rollout.turns:
        opened = opens_thinking(turn.observed) if turn.before else rollout.prompt.opens_thinking
        start = len(found)
        text = "".join(pieces[start : start + turn.num_tokens])
        before = split_thought(text, opened).start
        ends = accumulate(map(len, pieces[start : start + turn.num_tokens]))
        found += [float(end <= before) for end in ends]
    return found


def _turns(
    rollout: Rollout, continued: Sequence[int], limits: Limits, has_text: bool
) -> list[dict[str, Any]]:
    """For each turn its number, from 1, the place of its first token, what was observed before it,
    see `_continued`, and its text if tokens do not show it."""
    limit = max(MIN_TURN_CHARACTERS, limits.characters // len(rollout.turns))
    starts = accumulate((turn.num_tokens for turn in rollout.turns[:-1]), initial=0)
    return [
        {
            "number": number,
            "at": start,
            "observed": _cut(turn.observed, limit),
            "restarts": turn.restarts,
            "continues": continues,
            "text": _cut(turn.text, limit) if has_text else "",
        }
        for number, (turn, start, continues) in enumerate(
            zip(rollout.turns, starts, continued, strict=True), start=1
        )
    ]


def _contexts(rollout: Rollout, continued: Sequence[int]) -> list[dict[str, int]]:
    """For each context its first and last turn, its tokens, and the turn that it continues."""
    found: list[dict[str, int]] = []
    for number, (turn, continues) in enumerate(zip(rollout.turns, continued, strict=True), start=1):
        if turn.restarts or not found:
            num_tokens = 0 if turn.restarts else len(rollout.prompt.token_ids)
            found.append({"first": number, "continues": continues, "tokens": num_tokens})
        found[-1]["last"] = number
        found[-1]["tokens"] += len(turn.before) + turn.num_tokens
    return found


def _continued(rollout: Rollout) -> list[int]:
    """For each turn that begins a context the number of the turn, from 1, with whose whole context
    it begins; 0 for others. So the contexts of an episode are a tree."""
    found: list[int] = []
    ended: list[NDArray[np.int32]] = []  # the whole context of each turn up to its end
    start, context = 0, np.array(rollout.prompt.token_ids, np.int32)
    for turn in rollout.turns:
        read = np.array(turn.before, np.int32)
        shared = [
            (len(ids), number)
            for number, ids in enumerate(ended, start=1)
            if turn.restarts and np.array_equal(ids, read[: len(ids)])
        ]
        found.append(max(shared, default=(0, 0))[1])
        before = read if turn.restarts else np.concatenate([context, read])
        sampled = rollout.token_ids[start : start + turn.num_tokens]
        start, context = start + turn.num_tokens, np.concatenate([before, sampled])
        ended.append(context)
    return found


def _outside_gap(turns: Sequence[dict[str, Any]], head: int, left_out: int) -> list[dict[str, Any]]:
    """The turns with their places among the kept tokens, without those that begin inside the gap of
    `left_out` tokens after the first `head`."""
    return [
        {**turn, "at": turn["at"] - (left_out if turn["at"] > head else 0)}
        for turn in turns
        if not head < turn["at"] < head + left_out
    ]


def embedded(runs: Sequence[WrittenRun]) -> str:
    """The rollouts of the static page: gzipped JSON in base64, "" where none are stored.

    It has the last step of each run, the first and the worst, then steps between them, until the
    runs have MAX_STEPS together.

    Raises:
        DataError: a malformed file of rollouts or tokens; the message names file and line.
    """
    shown: list[dict[str, Any]] = []
    rollouts: list[dict[str, Any]] = []
    for run, one in enumerate(runs):
        stored = stored_steps(one.run.directory)
        steps = _chosen_steps(stored, one.rows, max(MIN_STEPS, MAX_STEPS // len(runs)))
        rollouts += [record for step in steps for record in _records(one, run, step)]
        shown.append(
            {
                "label": one.run.name,
                "steps": steps,
                "stored": len(stored),
                "per_step": ROLLOUTS_PER_STEP,
            }
        )
    if not rollouts:
        return ""
    found = {"runs": shown, "rollouts": rollouts}
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), mtime=0)).decode()


def complete_rollouts(path: Path, limit: int | None = None) -> list[Rollout]:
    """The first `limit` rollouts of a step's file; an incomplete last line is left out."""
    lines = path.read_bytes().count(b"\n") if path.is_file() else 0
    return read_rollouts(path, limit=lines if limit is None else min(limit, lines), strict=False)


def _records(written: WrittenRun, run: int, step: int) -> list[dict[str, Any]]:
    """The first rollouts of a step with their details."""
    directory, budget = written.run.directory, whole_number(written.settings, LENGTH_BUDGET)
    stored = read_tokens(RunDirectory(directory).tokens(step))
    rollouts = complete_rollouts(RunDirectory(directory).rollouts(step), ROLLOUTS_PER_STEP)
    records = [listed(one, run, step, index, budget) for index, one in enumerate(rollouts)]
    return [
        record | {"detail": detail(rollout, stored, record["repeats"], PAGE)}
        for rollout, record in zip(rollouts, records, strict=True)
    ]


def _chosen_steps(steps: Sequence[int], rows: Sequence[Row], limit: int) -> list[int]:
    """At most `limit` of the steps: the last, the first, the worst, then ever finer ones."""
    if len(steps) <= limit:
        return list(steps)
    rates = ("rollout/repetition_rate", "rollout/truncation_rate")
    bad = {row["step"]: tuple(row.get(rate) or 0.0 for rate in rates) for row in rows}
    order = [steps[-1], steps[0], max(steps, key=lambda step: bad.get(step, (0.0, 0.0)))]
    parts = 2
    while len(set(order)) < limit:
        order += [steps[len(steps) * part // parts] for part in range(1, parts)]
        parts *= 2
    return sorted(list(dict.fromkeys(order))[:limit])


def _cut(text: str, limit: int) -> str:
    """The printable text: the beginning and the end of a long one."""
    if len(text) <= limit:
        return printable(text)
    tail = int(limit * TAIL_SHARE)
    dots = "\N{HORIZONTAL ELLIPSIS}"
    gap = f"\n{dots} {len(text) - limit:,} characters are left out {dots}\n"
    return printable(text[: limit - tail]) + gap + printable(text[-tail:])
