"""From the files of an attempt directory to a verdict, without Slurm."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import verdict
from slurm.verdict import Attempt, Verdict, judge_preflight, judge_run

REPOSITORY = Path(__file__).parents[2]
NODES = ["n1", "n2"]
IN_COLLECTIVE = """Thread 0x01 (most recent call first):
  File "/venv/watchdog.py", line 3 in _beat
Thread 0x02 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 4811 in barrier
  File "/venv/stable_opd_mcore/train/loop.py", line 7 in train
"""
IN_SLEEP = IN_COLLECTIVE.replace("torch/distributed/distributed_c10d.py", "data/grading.py")


class Files:
    """The files of an attempt that two ranks, each on a node of its own, leave behind."""

    def __init__(self, logs: Path):
        self.directory = logs / "attempt_0"
        self.outcome = self.directory / "run"
        for name in ("ranks", "exits", "preflight"):
            (self.directory / name).mkdir(parents=True)
        for rank, node in enumerate(NODES):
            self.write(f"ranks/rank_0000{rank}", f"{node}\n")

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def exit(self, rank: int, code: int, seconds: float, log: str = "") -> None:
        self.write(f"exits/rank_0000{rank}", f"{code} {seconds} {NODES[rank]}\n")
        self.write(f"rank_0000{rank}.log", log)

    def stacks(self, *texts: str, silent: str = "") -> None:
        (self.outcome / "stacks").mkdir(parents=True)
        for rank, text in enumerate(texts):
            (self.outcome / "stacks" / f"rank_0000{rank}.txt").write_text(text)
        (self.outcome / "stacks" / "silent").write_text(silent)

    def attempt(self, **limits) -> Attempt:
        return Attempt(self.directory, job=7, number=0, **limits)

    def judge(self, probed: bool = True, stop: str = "", **limits) -> Verdict:
        return judge_run(self.attempt(stop=stop, **limits), NODES, len(NODES), probed)


@pytest.fixture
def files(tmp_path) -> Files:
    made = Files(tmp_path)
    made.write("alive_n2", "")
    return made


@pytest.mark.parametrize(
    ("outcome", "code", "name"),
    [("DONE", 0, "done"), ("", 0, "failed"), ("DONE", 1, "failed")],
)
def test_done_needs_the_outcome_of_the_run_and_code_0_of_every_rank(files, outcome, code, name):
    files.exit(0, 0, 1)
    files.exit(1, code, 2, "OSError: disk full\n")
    if outcome:
        files.outcome.mkdir()
        (files.outcome / outcome).write_text('{"step": 300}')
    judged = files.judge()
    assert (judged.name, judged.action) == (name, "end")
    if not outcome:
        assert judged.reason.endswith("has neither DONE nor REQUEUE")


def test_a_marker_of_the_run_means_stopped(files):
    files.outcome.mkdir()
    (files.outcome / "REQUEUE").write_text('{"step": 6}')
    judged = files.judge(stop="USR1")
    assert (judged.name, judged.action) == ("stopped", "requeue")
    assert judged.reason == 'stopped after a step, checkpoint {"step": 6}'


def test_the_first_rank_that_failed_is_named_with_its_last_words(files):
    files.exit(0, 1, 20, "RuntimeError: connection closed by peer\n")
    files.exit(1, 1, 10, "MemoryError: out\n\n/shared/slurm/rank.sh: line 31: 5 Killed\n")
    judged = files.judge()
    assert judged == Verdict(
        "failed",
        "rank_00001 on n2 ended with code 1: MemoryError: out",
        rank=1,
        node="n2",
        exit_code=1,
    )


def test_a_rank_that_a_signal_killed_precedes_those_that_failed(files):
    files.exit(0, 1, 10, "RuntimeError: connection closed by peer\n")
    files.exit(1, 137, 20)
    assert (files.judge().rank, files.judge().exit_code) == (1, 137)


def test_ranks_that_leave_nothing_are_lost(files):
    files.exit(1, 143, 20)
    assert (files.judge().name, files.judge().action) == ("lost", "requeue")


def test_a_stop_before_the_first_checkpoint_is_stopped(files):
    files.exit(1, 143, 20)
    assert (files.judge(stop="USR1").name, files.judge(stop="USR1").action) == (
        "stopped",
        "requeue",
    )


@pytest.mark.parametrize("hangs", [False, True])
def test_a_node_that_runs_no_command_is_lost(files, hangs):
    (files.directory / "alive_n2").unlink()
    if hangs:
        files.stacks(IN_COLLECTIVE)
    files.exit(0, 1, 10)
    assert files.judge(probed=False).action == "probe"
    judged = files.judge()
    assert (judged.name, judged.action, judged.nodes) == ("lost", "exclude", ("n2",))


@pytest.mark.parametrize(
    ("stacks", "silent", "suspects"),
    [
        ((IN_COLLECTIVE, IN_SLEEP), "", "; not waiting for others: rank_00001 on n2"),
        ((IN_COLLECTIVE, IN_COLLECTIVE), "", ""),
        ((IN_COLLECTIVE,), "rank_00001\n", "; stood still: rank_00001 on n2"),
        ((IN_COLLECTIVE, "Thread 0x02"), "", "; not waiting for others: rank_00001 on n2"),
    ],
)
def test_a_hang_names_its_suspects(files, stacks, silent, suspects):
    files.stacks(*stacks, silent=silent)
    judged = files.judge()
    assert (judged.name, judged.action) == ("hang", "requeue")
    assert judged.reason == "no step within fault.watchdog_minutes" + suspects


HANG = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from stable_opd_mcore.train.watchdog import Watchdog

run, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{run}/store", rank=rank, world_size=2)
with Watchdog(minutes=(2 + 2 * rank) / 60, directory=run / "stacks", rank=rank):
    if rank == 0:
        dist.barrier()
    time.sleep(600)
"""


def test_real_stacks_name_the_rank_that_is_not_in_a_collective(files):
    run = files.outcome
    run.mkdir()
    ranks = [
        subprocess.Popen([sys.executable, "-c", HANG, str(run), str(rank)]) for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [1, 1]
    assert files.judge().reason.endswith("; not waiting for others: rank_00001 on n2")


def test_a_job_that_hung_too_often_fails(files):
    files.stacks(IN_COLLECTIVE)
    for _ in range(2):
        verdict.record(files.attempt(), Verdict("hang", "no step"))
    assert files.judge(max_hangs=3).name == "hang"
    assert files.judge(max_hangs=2).name == "failed"


def good_nodes(files: Files, *nodes: str) -> None:
    for node in nodes:
        files.write(f"preflight/{node}.good", "")


def test_the_trainer_starts_when_every_node_is_good(files):
    good_nodes(files, *NODES)
    assert judge_preflight(files.attempt(), NODES, []).action == "start"
    files.write("preflight/n1.network_good", "300 GB/s")
    judged = judge_preflight(files.attempt(), NODES, NODES)
    assert (judged.action, judged.nodes) == ("exclude", ("n2",))


def test_a_bad_node_is_excluded(files):
    good_nodes(files, "n1")
    files.write("preflight/n2.bad", "GPU 0: remapped_rows.failure is Yes")
    judged = judge_preflight(files.attempt(), NODES, [])
    assert (judged.name, judged.action, judged.nodes) == ("requeued", "exclude", ("n2",))


def test_a_refused_config_fails(files):
    files.write("preflight/config_error", "train.stepz: no such setting")
    judged = judge_preflight(files.attempt(), NODES, [])
    assert (judged.name, judged.action) == ("failed", "end")
    assert "train.stepz" in judged.reason


def run_verdict(files: Files, *arguments: str, stop: str = "", attempt: int = 0) -> tuple[str, int]:
    """Run verdict.py as common.sh does; its output and exit code."""
    limits = ["--max-requeues=2", "--max-hangs=3", f"--stop={stop}", f"--attempt={attempt}"]
    answer = subprocess.run(
        [sys.executable, "slurm/verdict.py", files.directory, "--job=7", *limits, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    return answer.stdout.strip(), answer.returncode


@pytest.mark.parametrize(
    ("attempt", "stop", "action", "code", "name", "reason"),
    [
        (1, "", "requeue", 1, "requeued", 'no "tasks"; queued again'),
        (2, "", "end", 1, "failed", 'no "tasks"; started 3 times, MAX_REQUEUES=2'),
        (1, "TERM", "end", 1, "requeued", 'no "tasks"'),
    ],
)
def test_the_record_says_whether_the_job_is_queued_again(
    files, attempt, stop, action, code, name, reason
):
    arguments = ("record", "requeued", 'no "tasks"', "--action=requeue")
    assert run_verdict(files, *arguments, stop=stop, attempt=attempt) == (action, code)
    newest = json.loads((files.directory.parent / "verdict.json").read_text())
    assert (newest["verdict"], newest["reason"]) == (name, reason)
    assert (newest["job"], newest["attempt"]) == (7, attempt)
    assert verdict.read_history(files.attempt()) == [newest]


def test_excluded_nodes_add_up_until_the_job_has_started_too_often(files):
    files.write("preflight/n2.good", "")
    files.write("preflight/n1.bad", "GPU 0: remapped_rows.failure is Yes")
    arguments = ("preflight", "--nodes", *NODES)
    assert run_verdict(files, *arguments, attempt=1) == ("exclude n1", 1)
    files.write("preflight/n1.good", "")
    (files.directory / "preflight" / "n2.good").unlink()
    assert run_verdict(files, *arguments, attempt=2) == ("end", 1)
    newest = json.loads((files.directory.parent / "verdict.json").read_text())
    assert newest["reason"].endswith("submit again with --exclude=n1,n2")


def test_verdict_needs_no_newer_python_than_it_says():
    ast.parse((REPOSITORY / "slurm" / "verdict.py").read_text(), feature_version=(3, 8))
