"""Judge one attempt of a batch job from the files in its attempt directory, and record the verdict.

    verdict.py ATTEMPT_DIR --job=7 --attempt=0 ... preflight --nodes n1 n2
    verdict.py ATTEMPT_DIR --job=7 --attempt=0 ... network
    verdict.py ATTEMPT_DIR --job=7 --attempt=0 ... run --nodes n1 n2 --ranks=16
    verdict.py ATTEMPT_DIR --job=7 --attempt=0 ... record failed "the servers did not start"
    verdict.py ATTEMPT_DIR --job=7 --attempt=0 ... refused "what Slurm printed"

Each call writes verdict.json and verdicts.jsonl next to ATTEMPT_DIR and prints what common.sh has
to do next: `end`, `requeue`, `exclude n1,n2`, `probe` (run a command on every node, then call again
with --probed), or `start`. `refused` corrects the newest verdict when Slurm did not queue the job
again. Standard library only, Python 3.8 or later: it runs on the batch node, outside a container.
Not here: the verdict over the checks of the nodes (nodes.py), the files of an attempt (attempt.py,
preflight.py, rank.sh), and Slurm's commands (common.sh).
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from attempt import Attempt, Verdict, last_line, read, read_history, record, write_history
from nodes import judge_network, judge_preflight

STACKS = "rank_?????.txt"
KILLED, SIGTERM_CODE = 128, 143  # exit codes above KILLED: ended by a signal


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
        verdict = judge_preflight(attempt, arguments.nodes)
    elif arguments.what == "network":
        verdict = judge_network(attempt)
    elif arguments.what == "refused":
        refuse(attempt, arguments.message)
        return 1
    elif arguments.what == "run":
        verdict = judge_run(attempt, arguments.nodes, arguments.ranks, arguments.probed)
    else:
        verdict = Verdict(arguments.name, arguments.reason, action=arguments.action)
        repeats = any(e["reason"].startswith(arguments.reason) for e in read_history(attempt))
        if repeats and verdict.name != "stopped":  # preemption may come at every start
            reason = f"{arguments.reason}; the same at an earlier attempt"
            verdict = Verdict("failed", reason)
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
    what.add_parser("preflight").add_argument("--nodes", nargs="+", required=True)
    what.add_parser("network")
    refused = what.add_parser("refused")
    refused.add_argument("message", help="of scontrol")
    run = what.add_parser("run")
    run.add_argument("--nodes", nargs="+", required=True)
    run.add_argument("--ranks", type=int, required=True)
    run.add_argument("--probed", action="store_true", help="alive_NODE files are complete")
    recorded = what.add_parser("record")
    recorded.add_argument("name")
    recorded.add_argument("reason")
    recorded.add_argument("--action", choices=("end", "requeue"), default="end")
    return parser.parse_args()


# ---- the end of the trainer -------------------------------------------------------------------


def judge_run(attempt: Attempt, nodes: list[str], ranks: int, probed: bool) -> Verdict:
    """Verdict over outcome, exit codes, logs and stacks of a trainer that has ended.

    `done` needs the run's own DONE file and exit code 0 of every rank. One of them is not enough: a
    run that stopped early also exits with 0, and a rank may fail after DONE was written.

    Args:
        attempt: whose directory holds `run` (outcome and stacks, copied by rank.sh), `exits`,
            `ranks`, the logs, and alive_NODE once probed.
        nodes: all nodes; the first runs the batch script.
        ranks: number of ranks that were started.
        probed: whether every node had its time to write alive_NODE.
    """
    exits = read_exits(attempt)
    ended_well = len(exits) == ranks and all(each.code == 0 for each in exits)
    verdict = judge_outcome(attempt, ended_well)
    if verdict is not None:
        return verdict
    hang = describe_hang(attempt)
    if attempt.stop and not hang:
        reason = (
            "the job had to end before a step and its checkpoint were complete; it resumes from"
        )
        reason += " the newest checkpoint; a longer --signal=B:USR1@SECONDS keeps such steps"
        return Verdict("stopped", reason, action="requeue")
    if not attempt.stop and not probed:
        return Verdict("", "", action="probe")
    if hang:
        attempt.log("hang: stacks follow")
        for path in sorted((attempt.directory / "run" / "stacks").glob(STACKS)):
            print(read(path), file=sys.stderr)
    if not attempt.stop:
        silent = [node for node in nodes[1:] if not (attempt.directory / f"alive_{node}").exists()]
        if silent:
            reason = f"{' '.join(silent)}: runs no command"
            return Verdict("lost", reason, action="exclude", nodes=tuple(silent))
    if hang:
        return judge_hang(attempt, hang)
    return name_culprit(attempt, exits)


def judge_outcome(attempt: Attempt, ended_well: bool) -> Verdict | None:
    """Verdict over the files that the run and the servers left; None when these do not decide.

    Args:
        attempt: as for judge_run.
        ended_well: whether every rank ended with code 0.
    """
    outcome = attempt.directory / "run"
    marker, done = read(outcome / "REQUEUE"), read(outcome / "DONE")
    given_up = [read(path) for path in sorted(attempt.directory.glob("server_*.given_up"))]
    if given_up and not done:
        resume = f"; the run stopped after a step, checkpoint {marker}" if marker else ""
        return Verdict("failed", f"{'; '.join(given_up)}{resume}")
    if marker:
        return Verdict("stopped", f"stopped after a step, checkpoint {marker}", action="requeue")
    if not ended_well:
        return None
    if done:
        return Verdict("done", f"all ranks ended with code 0, DONE {done}")
    where = read(attempt.directory / "preflight" / "run_directory")
    reason = f"all ranks ended with code 0, but {where} has neither DONE nor REQUEUE"
    return Verdict("failed", reason)


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
        reason = "the trainer ended, but no rank recorded an error"
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


def describe_hang(attempt: Attempt) -> str:
    """What a hang looks like from the stacks that the watchdog wrote; "" when it wrote none.

    Suspects are the ranks whose innermost frame is not in a collective.
    """
    stacks = attempt.directory / "run" / "stacks"
    texts = {path.stem: text for path in sorted(stacks.glob(STACKS)) if (text := read(path))}
    if not texts:
        return ""
    suspects = [rank for rank, text in texts.items() if not waits_in_collective(text)]
    places = [f"{rank} on {read(attempt.directory / 'ranks' / rank)}" for rank in suspects]
    return "no step within fault.watchdog_minutes" + (
        f"; not waiting for others: {' '.join(places)}" if places else ""
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
    """The verdict with its remedy in words, or `failed` when the job has started too often."""
    remedy = "queued again"
    spent = f"started {attempt.number + 1} times, MAX_REQUEUES={attempt.max_requeues}"
    if verdict.action == "exclude":
        remedy = f"excluded {' '.join(verdict.nodes)}; {remedy}"
        earlier = [node for each in read_history(attempt) for node in each.get("excluded", ())]
        spent += f"; submit again with --exclude={','.join([*earlier, *verdict.nodes])}"
    elif attempt.stop == "TERM":  # preemption requeues the job by itself, scancel must not
        return replace(verdict, action="end")
    if attempt.number >= attempt.max_requeues:
        reason = f"{verdict.reason}; {spent}"
        return replace(verdict, name="failed", reason=reason, action="end", nodes=())
    return replace(verdict, reason=f"{verdict.reason}; {remedy}")


def refuse(attempt: Attempt, message: str) -> None:
    """Correct the newest verdict: Slurm has not queued the job again."""
    *earlier, newest = read_history(attempt)
    reason = newest["reason"].replace("queued again", f"not queued again ({message})")
    newest.update({"reason": f"{reason}; the same sbatch command resumes the run"})
    newest.update({"queued_again": False, "excluded": []})
    write_history(attempt, [*earlier, newest])
    attempt.log(f"verdict: {newest['verdict']}: {newest['reason']}")


if __name__ == "__main__":
    sys.exit(main())
