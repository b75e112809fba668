"""Parts in processes: results on disk, killed processes, processes without a parent."""

import os
import threading
import time

import psutil
import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.preparation.job import check
from stable_opd_mcore.preparation.spool import read_result, rows_path, run_parts, summary_path
from tests.preparation.runs import NUM_ROWS, make_inputs, request


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return check(request(folder, folder / "data"))


def run(job, folder, num_processes=1):
    lines = []
    folder.mkdir(exist_ok=True)
    run_parts(job.parts, job.columns, job.rules, folder, num_processes, lines.append)
    return lines


def test_results_point_into_the_rows(job, tmp_path):
    lines = run(job, tmp_path)
    assert lines[-1].startswith(f"{NUM_ROWS} of {NUM_ROWS} rows")
    results = [read_result(tmp_path, index) for index in range(len(job.parts))]
    assert sum(result.num_rows for result in results) == NUM_ROWS
    for index, result in enumerate(results):
        texts = rows_path(tmp_path, index).read_bytes()
        assert sum(row.length for row in result.kept) == len(texts)
        for row in result.kept:
            assert texts[row.offset : row.offset + row.length].startswith(b'{"problem"')


def test_only_parts_without_a_summary_are_done_again(job, tmp_path):
    run(job, tmp_path)
    before = rows_path(tmp_path, 2).read_bytes()
    summary_path(tmp_path, 2).unlink()
    rows_path(tmp_path, 2).write_bytes(b"half a li")
    rows_path(tmp_path, 3).write_bytes(b"untouched")
    last = len(job.parts)
    assert run(job, tmp_path)[0] == f"{last - 1} of {last} parts were finished before"
    assert rows_path(tmp_path, 2).read_bytes() == before
    assert rows_path(tmp_path, 3).read_bytes() == b"untouched"


def is_worker(process):
    """Whether the process is one that a preparation started; other tests may have left a zombie."""
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def children_of(pid, others=()):
    """The two processes that a preparation starts, as soon as they run; `others` are not its."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [c for c in psutil.Process(pid).children() if c not in others and is_worker(c)]
        if len(found) == 2:
            return found
        time.sleep(0.01)
    raise AssertionError("no processes started")


def test_a_killed_process_ends_with_advice(job, tmp_path):
    others = psutil.Process().children()
    killer = threading.Thread(target=lambda: children_of(os.getpid(), others)[0].kill())
    killer.start()
    with pytest.raises(UserError, match=r"a process of the preparation was killed.*--processes"):
        run(job, tmp_path, num_processes=2)
    killer.join()
