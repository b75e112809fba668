"""rank.sh without Slurm: what a rank leaves in the attempt directory."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def directories(tmp_path) -> tuple[Path, Path]:
    """The run's directory, with files of an earlier attempt, and the attempt's."""
    run, attempt = tmp_path / "run", tmp_path / "attempt_0"
    (run / "stacks").mkdir(parents=True)
    for name in ("REQUEUE", "DONE", "stacks/rank_00000.txt"):
        (run / name).write_text("of an earlier attempt")
    for name in ("ranks", "exits"):
        (attempt / name).mkdir(parents=True)
    return run, attempt


def run_rank(directories: tuple[Path, Path], command: str, rank: int = 0) -> int:
    run, attempt = directories
    variables = {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURMD_NODENAME": f"n{rank + 1}",
        "RUN_DIRECTORY": str(run),
        "ATTEMPT_DIR": str(attempt),
    }
    return subprocess.run(
        ["slurm/rank.sh", "bash", "-c", command],
        cwd=REPOSITORY,
        env=os.environ | variables,
        timeout=60,
    ).returncode


def copied(directories: tuple[Path, Path]) -> dict[str, str]:
    """Files that rank.sh copied, with their text."""
    copies = directories[1] / "run"
    return {
        str(path.relative_to(copies)): path.read_text()
        for path in copies.rglob("*")
        if path.is_file()
    }


def test_rank_0_copies_the_outcome_and_removes_an_earlier_one(directories):
    command = 'echo "$RANK/$WORLD_SIZE" >"$RUN_DIRECTORY/DONE"'
    assert run_rank(directories, command) == 0
    assert copied(directories) == {"DONE": "0/2\n"}
    exit_note = (directories[1] / "exits" / "rank_00000").read_text().split()
    assert (exit_note[0], exit_note[2]) == ("0", "n1")


def test_a_rank_that_ends_early_leaves_no_outcome_of_an_earlier_attempt(directories):
    assert run_rank(directories, "exit 0") == 0
    assert run_rank(directories, "exit 3", rank=1) == 3
    assert copied(directories) == {}


def test_a_hanging_rank_copies_its_stack(directories):
    command = "cd $RUN_DIRECTORY/stacks; echo frames >rank_00001.txt; exit 1"
    assert run_rank(directories, command, rank=1) == 1
    assert copied(directories) == {"stacks/rank_00001.txt": "frames\n"}
