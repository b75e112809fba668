"""From the files of an attempt directory to a verdict, without Slurm."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from attempt import Attempt, Verdict, last_line, read_history, record
from nodes import judge_network, judge_preflight
from verdict import judge_run

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

    def stacks(self, *texts: str) -> None:
        (self.outcome / "stacks").mkdir(parents=True)
        for rank, text in enumerate(texts):
            (self.outcome / "stacks" / f"rank_0000{rank}.txt").write_text(text)

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
    files.exit(0, 143, 1)  # what a run that Slurm itself ends leaves
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


@pytest.mark.parametrize(("stop", "name"), [("", "lost"), ("USR1", "stopped")])
def test_ranks_that_slurm_ended_before_a_checkpoint_start_again(files, stop, name):
    files.exit(1, 143, 20)
    judged = files.judge(stop=stop)
    assert (judged.name, judged.action) == (name, "requeue")


@pytest.mark.parametrize("hangs", [False, True])
def test_a_node_that_runs_no_command_is_lost(files, hangs, capsys):
    (files.directory / "alive_n2").unlink()
    if hangs:
        files.stacks(IN_COLLECTIVE)
    files.exit(0, 1, 10)
    assert files.judge(probed=False).action == "probe"
    judged = files.judge()
    assert (judged.name, judged.action, judged.nodes) == ("lost", "exclude", ("n2",))
    assert ("torch/distributed" in capsys.readouterr().err) == hangs


@pytest.mark.parametrize(
    ("stacks", "suspects"),
    [
        ((IN_COLLECTIVE, IN_SLEEP), "; not waiting for others: rank_00001 on n2"),
        ((IN_COLLECTIVE, IN_COLLECTIVE), ""),
        ((IN_COLLECTIVE, "Thread 0x02"), "; not waiting for others: rank_00001 on n2"),
    ],
)
def test_a_hang_names_its_suspects(files, stacks, suspects):
    files.stacks(*stacks)
    judged = files.judge()
    assert (judged.name, judged.action) == ("hang", "requeue")
    assert judged.reason == "no step within fault.watchdog_minutes" + suspects


def test_a_job_that_hung_too_often_fails(files):
    files.stacks(IN_COLLECTIVE)
    for _ in range(2):
        record(files.attempt(), Verdict("hang", "no step"))
    assert files.judge(max_hangs=3).name == "hang"
    assert files.judge(max_hangs=2).name == "failed"


def check_nodes(files: Files, **faults: dict[str, str] | str | None) -> Verdict:
    """Judge the nodes: those with a dict of faults, a line of output, or no answer (None)."""
    for task, (node, fault) in enumerate(faults.items()):
        if isinstance(fault, dict):
            name = f"{node}.bad" if fault else f"{node}.good"
            files.write(f"preflight/{name}", json.dumps(fault))
        elif fault:
            files.write(f"preflight/node_{task}.log", f"{fault}\n")
    return judge_preflight(files.attempt(), list(faults))


ECC = {"gpu ecc": "GPU 0: ecc is 3"}
SPACE = {"disk space": "12.3 GiB free at /runs, MIN_FREE_GIB=200"}
NO_PYTHON = "slurmstepd: error: execve(): /wrong/bin/python: No such file or directory"
NOT_SHARED = "{}: /tmp/preflight is not the batch script's: the file system is not shared"


@pytest.mark.parametrize(
    ("faults", "excluded"),
    [
        ({"n1": {}, "n2": {}}, None),
        ({"n1": {}, "n2": ECC}, "n2"),
        ({"n1": ECC}, "n1"),
        ({"n1": {}, "n2": SPACE}, "n2"),
        ({"n1": {}, "n2": None}, "n2"),
        ({"n1": {}, "n2": None, "n3": None}, "n2,n3"),
        ({"n1": {}, "n2": NO_PYTHON}, "n2"),
        ({"n1": {}, "n2": NOT_SHARED.format("n2")}, "n2"),
    ],
)
def test_a_bad_node_is_excluded_with_its_fault(files, faults, excluded):
    judged = check_nodes(files, **faults)
    if excluded is None:
        assert judged.action == "start"
    else:
        assert (judged.name, judged.action) == ("requeued", "exclude")
        assert ",".join(judged.nodes) == excluded
        assert judged.reason.startswith(f"{judged.nodes[0]}: ")


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"n1": SPACE, "n2": SPACE}, "n1: 12.3 GiB free at /runs, MIN_FREE_GIB=200; the same"),
        ({"n1": SPACE | ECC, "n2": SPACE}, "n1: 12.3 GiB free"),
        ({"n1": SPACE, "n2": SPACE, "n3": None}, "on 2 of 3 nodes"),
        ({"n1": SPACE}, "n1: 12.3 GiB free at /runs, MIN_FREE_GIB=200"),
        ({"n1": ECC, "n2": ECC}, "the same fault on 2 of 2 nodes, so none is excluded"),
        ({"n1": NO_PYTHON, "n2": NO_PYTHON}, "/wrong/bin/python: No such file"),
        ({"n1": NO_PYTHON}, "/wrong/bin/python: No such file"),
        ({"n1": None, "n2": None}, "no answer within PREFLIGHT_TIMEOUT"),
        (
            {"n1": {}, "n2": NOT_SHARED.format("n2"), "n3": NOT_SHARED.format("n3")},
            "the file system is not shared; the same fault on 2 of 3 nodes",
        ),
    ],
)
def test_a_fault_of_every_node_fails_and_excludes_none(files, faults, reason):
    judged = check_nodes(files, **faults)
    assert (judged.name, judged.action, judged.nodes) == ("failed", "end", ())
    assert reason in judged.reason


def test_the_same_fault_on_the_node_of_an_earlier_attempt_fails(files):
    record(files.attempt(), check_nodes(files, n1=ECC))
    judged = check_nodes(files, n2=ECC)
    assert (judged.name, judged.action) == ("failed", "end")
    assert check_nodes(files, n2={"gpu clock": "GPU 0: clock is Active"}).action == "exclude"


def test_an_all_reduce_below_the_floor_fails(files):
    files.write("preflight/network_bad", "all-reduce over 2 ranks: 9 GB/s")
    judged = judge_network(files.attempt())
    assert (judged.name, judged.nodes, judged.reason[:10]) == ("failed", (), "all-reduce")
    files.write("preflight/network_good", "300 GB/s")
    assert judge_network(files.attempt()).action == "start"


def test_an_all_reduce_that_does_not_finish_fails_with_its_last_words(files):
    files.write("preflight/network_00000.log", "NCCL error: unhandled system error\n")
    judged = judge_network(files.attempt())
    assert (judged.name, judged.nodes) == ("failed", ())
    assert "did not finish: NCCL error: unhandled system error" in judged.reason


def test_a_refused_config_fails(files):
    files.write("preflight/config_error", "train.stepz: no such setting")
    judged = judge_preflight(files.attempt(), NODES)
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
    assert read_history(files.attempt()) == [newest]


def test_excluded_nodes_add_up_until_the_job_has_started_too_often(files):
    files.write("preflight/n2.good", "{}")
    files.write("preflight/n1.bad", json.dumps(ECC))
    arguments = ("preflight", "--nodes", *NODES)
    assert run_verdict(files, *arguments, attempt=1) == ("exclude n1", 1)
    files.write("preflight/n1.good", "{}")
    (files.directory / "preflight" / "n2.good").unlink()
    assert run_verdict(files, *arguments, attempt=2) == ("end", 1)
    newest = json.loads((files.directory.parent / "verdict.json").read_text())
    assert newest["reason"].endswith("submit again with --exclude=n1,n2")


def test_a_refused_requeue_corrects_the_newest_verdict(files):
    record(files.attempt(), Verdict("requeued", "n3: no answer"))
    assert run_verdict(files, "record", "requeued", "no tasks", "--action=requeue")[0] == "requeue"
    message = "Requested operation is presently disabled for job 7"
    assert run_verdict(files, "refused", message) == ("", 1)
    first, newest = read_history(files.attempt())
    assert first["reason"] == "n3: no answer"
    assert f"no tasks; not queued again ({message}); the same sbatch" in newest["reason"]
    assert not newest["queued_again"]


def test_a_reason_that_repeats_is_not_queued_again(files):
    arguments = ("record", "requeued", "Slurm refused the step", "--action=requeue")
    assert run_verdict(files, *arguments)[0] == "requeue"
    assert run_verdict(files, *arguments, attempt=1)[0] == "end"
    assert read_history(files.attempt())[-1]["verdict"] == "failed"


def test_a_job_that_is_asked_to_stop_at_every_start_is_queued_again(files):
    arguments = ("record", "stopped", "the servers started", "--action=requeue")
    for attempt in range(2):
        assert run_verdict(files, *arguments, stop="USR1", attempt=attempt) == ("requeue", 0)
    assert run_verdict(files, *arguments, stop="USR1", attempt=2) == ("end", 1)
    newest = read_history(files.attempt())[-1]
    assert newest["reason"] == "the servers started; started 3 times, MAX_REQUEUES=2"


LOG = """Traceback (most recent call last):
  File "/shared/train.py", line 3, in train
OSError: [Errno 28] No space left on device
[rank1]:[W1121 17:00:00.1 ProcessGroupGloo.cpp:70] Warning: destroy_process_group was not called
frame #0: c10::Error::Error() from /venv/libc10.so
/shared/slurm/rank.sh: line 48: 77 Aborted "$@"
slurmstepd: error: *** STEP 7.2 ON n1 CANCELLED AT 2026-11-21T17:00:01 ***
srun: error: n2: task 1: Exited with exit code 1
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (LOG, "OSError: [Errno 28] No space left on device"),
        (NO_PYTHON, NO_PYTHON),
        ("", ""),
    ],
)
def test_the_last_words_are_the_own_ones(tmp_path, log, words):
    (tmp_path / "log").write_text(log)
    assert last_line(tmp_path / "log") == words


@pytest.mark.parametrize(
    ("outcome", "name", "reason"),
    [
        ("REQUEUE", "failed", "server 0 on n3 ended 6 times; the run stopped after a step"),
        ("", "failed", "server 0 on n3 ended 6 times"),
        ("DONE", "done", "DONE"),
    ],
)
def test_a_server_that_was_given_up_fails_the_job(files, outcome, name, reason):
    files.write("server_0.given_up", "server 0 on n3 ended 6 times\n")
    files.exit(0, 0, 1)
    files.exit(1, 0, 1)
    files.outcome.mkdir()
    if outcome:
        (files.outcome / outcome).write_text('{"step": 6}')
    judged = files.judge(stop="USR1")
    assert (judged.name, judged.action) == (name, "end")
    assert reason in judged.reason


@pytest.mark.parametrize("name", ["attempt", "health", "nodes", "verdict"])
def test_the_batch_node_needs_python_3_8(name):
    ast.parse((REPOSITORY / "slurm" / f"{name}.py").read_text(), feature_version=(3, 8))
