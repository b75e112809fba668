"""From shards to training sets: every row accounted for, and the same bytes after any kill."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import time
from collections import Counter

import psutil
import pytest

from stable_opd_mcore.config.data import SourceConfig
from stable_opd_mcore.data.decontamination import problem_key
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from stable_opd_mcore.host.run_lock import RunLock
from stable_opd_mcore.preparation.prepare import is_prepared, prepare_data
from tests.preparation.make_openr1 import benchmark_text
from tests.preparation.runs import NUM_ROWS, make_inputs, small_job


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return folder, make_inputs(folder)


@pytest.fixture(scope="module")
def prepared(inputs, tmp_path_factory):
    """The directory of an undisturbed preparation, and the lines that it told."""
    lines = []
    directory = tmp_path_factory.mktemp("prepared") / "data"
    prepare_data(small_job(inputs[0], directory), lines.append)
    return directory, lines


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_is_kept_or_dropped_for_its_reason(inputs, prepared):
    _, reasons = inputs
    directory, lines = prepared
    size = -(-NUM_ROWS // 3)
    names = [f"train-{i // size:05d}-of-00003.parquet:{i % size}" for i in range(NUM_ROWS)]
    dropped = {
        row["source"]: row["reason"] for row in json_lines(directory / "openr1_dropped.jsonl")
    }
    kept = [row["source"] for row in json_lines(directory / "openr1_sft_46k.jsonl")]
    assert len(kept) == len(set(kept))
    found = dropped | dict.fromkeys(kept, "")
    assert found == dict(zip(names, reasons, strict=True))
    assert set(kept).isdisjoint(dropped)
    manifest = json.loads((directory / "openr1.manifest.json").read_text())
    assert manifest["counts"]["dropped"] == {k: n for k, n in sorted(Counter(reasons).items()) if k}
    assert manifest["counts"]["read"] == NUM_ROWS
    assert manifest["counts"]["repeated_problems"] > 0
    assert manifest["counts"]["contaminated"] == sum("stands" in r for r in reasons) > 9
    assert any("malformed" in line for line in lines)


def test_the_parts_share_no_problem_and_load_as_training_data(prepared):
    directory, _ = prepared
    parts = [
        load_rows(SourceConfig(path=str(directory / f"openr1_{part}.jsonl")))
        for part in ("sft_33k", "opd_13k", "sft_46k")
    ]
    assert len(parts[0]) == 100
    assert len(parts[0]) + len(parts[1]) == len(parts[2])
    first, second, both = ({problem_key(row.problem) for row in part} for part in parts)
    assert not first & second
    assert first | second == both
    assert all(row.solution for part in parts for row in part)
    for name in BENCHMARKS:
        assert [row.answer for row in load_benchmark(name, directory)] == ["0", "1", "2"]


def test_the_manifest_describes_the_files(inputs, prepared):
    directory, _ = prepared
    manifest = json.loads((directory / "openr1.manifest.json").read_text())
    files = contents(directory)
    assert files.keys() - {"openr1.manifest.json"} == manifest["outputs"].keys()
    for name, entry in manifest["outputs"].items():
        assert entry["sha256"] == hashlib.sha256(files[name]).hexdigest()
        assert entry["bytes"] == len(files[name])
    shards = sorted((inputs[0] / "openr1").iterdir())
    hashes = [hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards]
    assert [entry["sha256"] for entry in manifest["filter"]["inputs"]] == hashes
    assert (
        sum(manifest["outputs"]["openr1_sft_33k.jsonl"]["solution_tokens"]["histogram"].values())
        == 100
    )
    assert "## openr1_opd_13k.jsonl" in files["openr1.datasheet.md"].decode()


def test_several_processes_write_the_same_bytes(inputs, prepared, tmp_path):
    prepare_data(small_job(inputs[0], tmp_path / "data", processes=2), print)
    assert contents(tmp_path / "data") == contents(prepared[0])


def in_a_child(job):
    """The id of a process that prepares, and what it told so far."""
    told = job.directory.parent / "told"
    told.write_text("")
    child = os.fork()
    if child == 0:
        os.setsid()  # its processes can be found by its session
        with told.open("a", buffering=1) as file:
            try:
                prepare_data(job, lambda line: print(line, file=file))
            except BaseException as error:
                print(error, file=file)
        os._exit(0)
    return child, told


def test_kills_do_not_change_a_byte_and_finished_files_stay(inputs, prepared, tmp_path):
    job = small_job(inputs[0], tmp_path / "data")
    for finished in range(1, 4):
        child, told = in_a_child(job)
        while len(told.read_text().splitlines()) < finished:
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    lines = []
    prepare_data(job, lines.append)
    assert sum("finished before" in line for line in lines) >= 2
    assert contents(tmp_path / "data") == contents(prepared[0])


def processes_of(session):
    """Those of a session that run; other users' processes and ended ones are left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_a_killed_process_ends_with_advice_and_a_killed_command_leaves_none(inputs, tmp_path):
    for victim, advice in (("process", "fewer --processes"), ("command", "")):
        (tmp_path / victim).mkdir()
        child, told = in_a_child(small_job(inputs[0], tmp_path / victim / "data", processes=2))
        workers = []
        while not workers:
            workers = [p for p in processes_of(child) if "spawn_main" in " ".join(p.cmdline())]
            time.sleep(0.01)
        os.kill(child if victim == "command" else workers[0].pid, signal.SIGKILL)
        os.waitpid(child, 0)
        deadline = time.monotonic() + 60
        while processes_of(child):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert advice in told.read_text()


def test_prepared_again_nothing_is_done_and_a_lost_file_is_made_again(inputs, prepared, tmp_path):
    directory = tmp_path / "data"
    shutil.copytree(prepared[0], directory)
    before, job, lines = contents(directory), small_job(inputs[0], directory), []
    prepare_data(job, lines.append)
    assert "made by this command before" in lines[-1]
    assert is_prepared(job)
    for name in ("amc.jsonl", "openr1.datasheet.md", "openr1.manifest.json"):
        (directory / name).write_text("{}")
        assert not is_prepared(job)
        (directory / name).write_bytes(before[name])
    (directory / "openr1_opd_13k.jsonl").unlink()
    prepare_data(job, lines.append)
    assert contents(directory) == before
    assert not is_prepared(small_job(inputs[0], directory, seed=1))


def test_too_few_rows_end_with_advice_that_works(inputs, tmp_path):
    with pytest.raises(DataError, match=r"lower --sft-rows below (\d+), raise --max-tokens") as few:
        prepare_data(small_job(inputs[0], tmp_path / "data", sft_rows=250), print)
    below = int(str(few.value).split("below ")[1].split(",")[0])
    lines = []
    prepare_data(small_job(inputs[0], tmp_path / "data", sft_rows=below - 1), lines.append)
    assert sum("finished before" in line for line in lines) == 3


def test_a_file_that_breaks_off_and_a_line_that_is_no_row_end_the_command(inputs, tmp_path):
    def ends(source, message):
        options = {"recipe": "rows", "source": str(source), "sft_rows": 33_000}
        with pytest.raises(DataError, match=message):
            prepare_data(small_job(inputs[0], tmp_path / "data", **options), print)

    broken = tmp_path / "broken.parquet"
    data = bytearray(next((inputs[0] / "openr1").iterdir()).read_bytes())
    data[4:2000] = b"x" * 1996
    broken.write_bytes(data)
    ends(broken, r"broken\.parquet: not a readable parquet file: ")
    (tmp_path / "a.jsonl").write_text('{"problem": " ", "answer": "1"}\n')
    ends(tmp_path / "a.jsonl", r"none of 1 rows is kept; the first one, a\.jsonl:1 malformed")
    (tmp_path / "b.jsonl").write_text('{"problem": "1", "answer": "1"}\n{"problem')
    ends(tmp_path / "b.jsonl", r"b\.jsonl:2: not valid JSON")


def test_a_second_preparation_in_the_same_place_is_refused(inputs, tmp_path):
    with (
        RunLock(tmp_path / "data" / ".prepare-openr1"),
        pytest.raises(UserError, match="another run is at work here"),
    ):
        prepare_data(small_job(inputs[0], tmp_path / "data"), print)


def test_any_jsonl(inputs, tmp_path):
    rows = [{"q": f"Sum of {i} and {i}?", "a": 2 * i} for i in range(5)]
    rows += [{"q": benchmark_text("amc", 1), "a": "1"}, {"q": "", "a": "1"}]
    source = tmp_path / "mine.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    options = {"recipe": "rows", "source": str(source), "sft_rows": 33_000}
    options["columns"] = {"problem": "q", "answer": "a", "solution": ""}
    prepare_data(small_job(inputs[0], tmp_path / "data", **options), print)
    written = json_lines(tmp_path / "data" / "mine.jsonl")
    assert sorted(row["source"] for row in written) == [f"mine.jsonl:{i}" for i in range(1, 6)]
    dropped = json_lines(tmp_path / "data" / "mine_dropped.jsonl")
    assert [row["reason"] for row in dropped] == ["stands in amc (exact)", "malformed"]
    with pytest.raises(UserError, match=r"mine\.jsonl would replace its own source"):
        prepare_data(small_job(inputs[0], tmp_path, **options), print)
