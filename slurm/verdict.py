"""Judge one attempt of a batch job from the files in its attempt directory, and record the verdict.

    verdict.py ATTEMPT_DIR --job=7 --attempt=0 ... preflight --nodes n1 n2 --trainers n1
    verdict.py ATTEMPT_DIR --job=7 --attempt=0 ... run --nodes n1 n2 --ranks=16
    verdict.py ATTEMPT_DIR --job=7 --attempt=0 ... record failed "the servers did not start"

Each call writes verdict.json and verdicts.jsonl beside ATTEMPT_DIR and prints what common.sh has to
do next: `end`, `requeue`, `exclude n1,n2`, `probe` (run a command on every node, then call again
with --probed), or `start`. Standard library only, Python 3.8 or later: it runs on the batch node,
outside a container.
Not here: Slurm commands (common.sh), the checks of a node (preflight.py), what a rank leaves behind
(rank.sh).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STACKS = "rank_?????.txt"
KILLED, SIGTERM_CODE = 128, 143  # exit codes above KILLED: ended by a signal


@dataclass(frozen=True)
class Attempt:
    """One start of a job, and the limits that hold for its next one."""

    directory: Path  # LOG_DIR/attempt_N
    job: int
    number: int  # 0 for the first start
    stop: str = ""  # signal that the batch script got: "", "USR1" (soon) or "TERM" (Slurm ends it)
    max_requeues: int = 50
    max_hangs: int = 3

    @property
    def history(self) -> Path:
        return self.directory.parent / "verdicts.jsonl"

    def log(self, text: str) -> None:
        """Print a line as common.sh does; the standard output is for what it does next."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        print(f"{now} [attempt {self.number}] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Verdict:
    """What came of an attempt, and what common.sh does next."""

    name: str  # done, stopped, hang, requeued, lost or failed
    reason: str
    action: str = "end"  # or requeue, exclude, probe, start
    nodes: tuple[str, ...] = ()  # to leave out of the next attempt
    rank: int | None = None
    node: str | None = None
    exit_code: int | None = None


def main() -> int:
    arguments = parse_arguments()
    attempt = Attempt(
        arguments.directory,
        arguments.job,
        arguments.attempt,
        arguments.stop,
        arguments.max_requeues,
        arguments.max_hangs,
    )
    if arguments.what == "preflight":
        verdict = judge_preflight(attempt, arguments.nodes, arguments.trainers)
    elif arguments.what == "run":
        verdict = judge_run(attempt, arguments.nodes, arguments.ranks, arguments.probed)
    else:
        verdict = Verdict(arguments.name, arguments.reason, action=arguments.action)
    if verdict.action in ("requeue", "exclude"):
        verdict = limited(attempt, verdict)
    if verdict.action not in ("start", "probe"):
        record(attempt, verdict)
    print(" ".join([verdict.action, ",".join(verdict.nodes)]).strip())
    return int(verdict.action != "start" and verdict.name not in ("done", "stopped"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="LOG_DIR/attempt_N")
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--stop", choices=("", "USR1", "TERM"), default="")
    parser.add_argument("--max-requeues", type=int, required=True)
    parser.add_argument("--max-hangs", type=int, required=True)
    what = parser.add_subparsers(dest="what", required=True)
    preflight = what.add_parser("preflight")
    preflight.add_argument("--nodes", nargs="+", required=True)
    preflight.add_argument("--trainers", nargs="*", default=[], help="those of the all-reduce")
    run = what.add_parser("run")
    run.add_argument("--nodes", nargs="+", required=True)
    run.add_argument("--ranks", type=int, required=True)
    run.add_argument("--probed", action="store_true", help="alive_NODE files are complete")
    recorded = what.add_parser("record")
    recorded.add_argument("name")
    recorded.add_argument("reason")
    recorded.add_argument("--action", choices=("end", "requeue"), default="end")
    return parser.parse_args()


# ---- the checks before the start --------------------------------------------------------------


def judge_preflight(attempt: Attempt, nodes: list[str], trainers: list[str]) -> Verdict:
    """Verdict over the notes of preflight.py.

    Args:
        attempt: whose `preflight` directory holds the notes.
        nodes: all nodes, in the order of the tasks.
        trainers: nodes of the all-reduce; empty when it has not run.
    """
    notes = attempt.directory / "preflight"
    config_error = read(notes / "config_error")
    if config_error:
        return Verdict("failed", f"the config: {config_error}")
    faults = {}
    for task, node in enumerate(nodes):
        if not (notes / f"{node}.good").exists():
            words = last_line(notes / f"node_{task}.log")
            faults[node] = read(notes / f"{node}.bad") or words or "no answer"
        elif node in trainers and not (notes / f"{node}.network_good").exists():
            unfinished = f"the all-reduce did not finish; {notes}/network_*.log"
            faults[node] = read(notes / f"{node}.network_bad") or unfinished
    for node, fault in faults.items():
        attempt.log(f"preflight: {node}: {fault}")
    if not faults:
        return Verdict("", "", action="start")
    if attempt.stop:
        return Verdict("stopped", "asked to stop during the checks", action="requeue")
    return Verdict("requeued", "bad node(s)", action="exclude", nodes=tuple(faults))


# ---- the end of the trainer -------------------------------------------------------------------


def judge_run(attempt: Attempt, nodes: list[str], ranks: int, probed: bool) -> Verdict:
    """Verdict over outcome, exit codes, logs and stacks of a trainer that has ended.

    `done` needs the run's own DONE file and exit code 0 of every rank. Neither alone is enough: a
    run that stopped early also exits with 0, and a rank may fail after DONE was written.

    Args:
        attempt: whose directory holds `run` (outcome and stacks, copied by rank.sh), `exits`,
            `ranks`, the logs, and alive_NODE once probed.
        nodes: all nodes; the first runs the batch script.
        ranks: number of ranks that were started.
        probed: whether every node had its time to write alive_NODE.
    """
    outcome = attempt.directory / "run"
    marker = read(outcome / "REQUEUE")
    if marker:
        return Verdict("stopped", f"stopped after a step, checkpoint {marker}", action="requeue")
    exits = read_exits(attempt)
    if len(exits) == ranks and all(each.code == 0 for each in exits):
        done = read(outcome / "DONE")
        if done:
            return Verdict("done", f"all {ranks} ranks ended with code 0, DONE {done}")
        where = read(attempt.directory / "preflight" / "run_directory")
        reason = f"all {ranks} ranks ended with code 0, but {where} has neither DONE nor REQUEUE"
        return Verdict("failed", reason)
    hang = describe_hang(attempt, outcome / "stacks")
    if attempt.stop and not hang:
        reason = "ended before it could save; the newest checkpoint stands"
        return Verdict("stopped", reason, action="requeue")
    if not attempt.stop:
        if not probed:
            return Verdict("", "", action="probe")
        silent = [node for node in nodes[1:] if not (attempt.directory / f"alive_{node}").exists()]
        if silent:
            return Verdict("lost", "bad node(s)", action="exclude", nodes=tuple(silent))
    if hang:
        attempt.log("hang: stacks follow")
        for path in sorted((outcome / "stacks").glob(STACKS)):
            print(read(path), file=sys.stderr)
        return judge_hang(attempt, hang)
    return name_culprit(attempt, exits)


@dataclass(frozen=True)
class Exit:
    """How one rank ended, as its rank.sh noted it."""

    rank: str  # rank_00003
    code: int
    time: float  # seconds since the epoch, by the node's clock
    node: str

    @property
    def order(self) -> tuple[bool, float]:
        """Ranks that a signal killed come first, then by time."""
        return self.code <= KILLED, self.time


def read_exits(attempt: Attempt) -> list[Exit]:
    exits = []
    for path in sorted((attempt.directory / "exits").glob("rank_?????")):
        code, seconds, node = path.read_text().split()
        exits.append(Exit(path.name, int(code), float(seconds), node))
    return exits


def name_culprit(attempt: Attempt, exits: list[Exit]) -> Verdict:
    """The rank that failed first. The others ended because it was gone, often by SIGTERM."""
    failed = [each for each in exits if each.code not in (0, SIGTERM_CODE)]
    if not failed:
        reason = "the trainer ended without a word from its ranks"
        return Verdict("lost", reason, action="requeue")
    first = min(failed, key=lambda each: each.order)
    words = last_line(attempt.directory / f"{first.rank}.log")
    return Verdict(
        "failed",
        f"{first.rank} on {first.node} ended with code {first.code}: {words}",
        rank=int(first.rank[len("rank_") :]),
        node=first.node,
        exit_code=first.code,
    )


def describe_hang(attempt: Attempt, stacks: Path) -> str:
    """What a hang looks like from the stacks that the watchdog wrote; "" when it wrote none.

    Suspects are the ranks that stood still, as the others recorded them (train/watchdog.py). Where
    none did, they are the ranks whose innermost frame is not in a collective.
    """
    texts = {path.stem: text for path in sorted(stacks.glob(STACKS)) if (text := read(path))}
    if not texts:
        return ""
    why, suspects = "stood still", read(stacks / "silent").split()
    if not suspects:
        why = "not waiting for others"
        suspects = [rank for rank, text in texts.items() if not waits_in_collective(text)]
    places = [f"{rank} on {read(attempt.directory / 'ranks' / rank)}" for rank in suspects]
    return "no step within fault.watchdog_minutes" + (
        f"; {why}: {' '.join(places)}" if places else ""
    )


def waits_in_collective(stack: str) -> bool:
    """Whether the main thread, the last one of faulthandler's dump, is inside torch.distributed."""
    lines = stack.splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(r"(Current t|T)hread ", line)]
    innermost = lines[heads[-1] + 1] if heads and heads[-1] + 1 < len(lines) else ""
    return "torch/distributed" in innermost


def judge_hang(attempt: Attempt, hang: str) -> Verdict:
    hangs = sum(each["verdict"] == "hang" for each in read_history(attempt))
    if hangs >= attempt.max_hangs:
        return Verdict("failed", f"hung {attempt.max_hangs} times before; {hang}")
    return Verdict("hang", hang, action="requeue")


# ---- the record -------------------------------------------------------------------------------


def limited(attempt: Attempt, verdict: Verdict) -> Verdict:
    """The verdict with its remedy spelled out, or `failed` when the job has started too often."""
    nodes = " ".join(verdict.nodes)
    spent = attempt.number >= attempt.max_requeues
    if verdict.action == "exclude":
        if spent:
            earlier = [node for each in read_history(attempt) for node in each["excluded"]]
            exclude = ",".join([*earlier, *verdict.nodes])
            return Verdict("failed", f"bad node(s) {nodes}; submit again with --exclude={exclude}")
        reason = f"bad node(s) {nodes} excluded; queued again"
        return Verdict(verdict.name, reason, action="exclude", nodes=verdict.nodes)
    if attempt.stop == "TERM":  # preemption requeues the job by itself, scancel must not
        return Verdict(verdict.name, verdict.reason)
    if spent:
        limit = f"started {attempt.number + 1} times, MAX_REQUEUES={attempt.max_requeues}"
        return Verdict("failed", f"{verdict.reason}; {limit}")
    return Verdict(verdict.name, f"{verdict.reason}; queued again", action="requeue")


def record(attempt: Attempt, verdict: Verdict) -> None:
    """Write verdict.json, the newest verdict, and append it to verdicts.jsonl."""
    line = json.dumps(
        {
            "verdict": verdict.name,
            "reason": verdict.reason,
            "job": attempt.job,
            "attempt": attempt.number,
            "rank": verdict.rank,
            "node": verdict.node,
            "exit_code": verdict.exit_code,
            "excluded": verdict.nodes,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
    )
    with attempt.history.open("a") as history:
        history.write(line + "\n")
    newest = attempt.history.with_name("verdict.json")
    newest.with_suffix(".partial").write_text(line + "\n")
    newest.with_suffix(".partial").replace(newest)
    attempt.log(f"verdict: {verdict.name}: {verdict.reason}")


def read_history(attempt: Attempt) -> list[dict]:
    return [json.loads(line) for line in read(attempt.history).splitlines()]


def read(path: Path) -> str:
    """Text of a file without the white space around it; "" when the file is absent."""
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def last_line(path: Path) -> str:
    """The last line that the process itself wrote."""
    lines = [line.strip() for line in read(path).splitlines()]
    lines = [line for line in lines if line and "/rank.sh: line " not in line]
    return lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
