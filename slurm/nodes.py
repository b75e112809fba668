"""Verdict over the checks before the start: start the trainer, exclude nodes, or end the job
because the fault is the site's or the user's.

Standard library only, Python 3.8 or later. Not here: the checks (preflight.py), and the number of
requeues (verdict.py).
"""

from __future__ import annotations

import json
import re

from attempt import Attempt, Verdict, last_line, read, read_history

NO_ANSWER = "no answer"
STOPPED = "asked to stop during the checks"


def judge_preflight(attempt: Attempt, nodes: list[str]) -> Verdict:
    """Verdict over the notes of `preflight.py node`; `nodes` in the order of the tasks."""
    notes = attempt.directory / "preflight"
    config_error = read(notes / "config_error")
    if config_error:
        return Verdict("failed", f"the config: {config_error}")
    faults: dict[str, dict[str, str]] = {}  # node -> kind -> what failed
    for task, node in enumerate(nodes):
        words = last_line(notes / f"node_{task}.log")
        if (notes / f"{node}.good").exists():
            faults[node] = {}
        elif (notes / f"{node}.bad").exists():
            faults[node] = json.loads(read(notes / f"{node}.bad"))
        elif words:
            faults[node] = {re.sub(r"\d+", "#", words.replace(node, "NODE")): words}
        else:
            faults[node] = {NO_ANSWER: "no answer within PREFLIGHT_TIMEOUT (a slow image import?)"}
    return judge_faults(attempt, faults)


def judge_network(attempt: Attempt) -> Verdict:
    """Verdict over the notes of `preflight.py network`."""
    notes = attempt.directory / "preflight"
    if (notes / "network_good").exists():
        return Verdict("", "", action="start")
    if attempt.stop:
        return Verdict("stopped", STOPPED, action="requeue")
    message = read(notes / "network_bad")
    if not message:
        words = [last_line(path) for path in sorted(notes.glob("network_*.log"))]
        message = f"the all-reduce did not finish: {next(filter(None, words), 'no output')}"
    attempt.log(f"preflight: {message}")
    return Verdict("failed", message)


def judge_faults(attempt: Attempt, faults: dict[str, dict[str, str]]) -> Verdict:
    """Exclude the bad nodes, unless the fault is the site's or the user's (shared_fault)."""
    bad = {node: "; ".join(each.values()) for node, each in faults.items() if each}
    for node, message in bad.items():
        attempt.log(f"preflight: {node}: {message}")
    if not bad:
        return Verdict("", "", action="start")
    if attempt.stop:
        return Verdict("stopped", STOPPED, action="requeue")
    kinds = tuple({kind: None for each in faults.values() for kind in each})
    shared = shared_fault(attempt, faults)
    if shared:
        count = sum(shared in each for each in faults.values())
        node = next(node for node, each in faults.items() if shared in each)
        reason = f"{node}: {faults[node][shared]}"
        if len(faults) > 1:
            reason += f"; the same fault on {count} of {len(faults)} nodes, so none is excluded"
        return Verdict("failed", reason, faults=kinds)
    reason = "; ".join(f"{node}: {message}" for node, message in bad.items())
    return Verdict("requeued", reason, action="exclude", nodes=tuple(bad), faults=kinds)


def shared_fault(attempt: Attempt, faults: dict[str, dict[str, str]]) -> str:
    """The kind of a fault that is not one node's own, "" when there is none.

    A fault is shared when every node that answered has it; of a lone node, when it is no GPU's
    fault or a node of an earlier attempt had it too. It is also shared when every node but the
    first has it, because the others are compared with the first (versions, file system); these must
    be at least two, counting those of earlier attempts.
    """
    answered = [each for each in faults.values() if NO_ANSWER not in each] or [*faults.values()]
    earlier = {kind for each in read_history(attempt) for kind in each.get("faults", ())}
    for kind in set.intersection(*map(set, answered)):
        if len(answered) > 1 or not kind.startswith("gpu ") or kind in earlier:
            return kind
    others = answered[1:]
    for kind in set.intersection(*map(set, others)) if others else ():
        if not kind.startswith("gpu ") and (len(others) > 1 or kind in earlier):
            return kind
    return ""
