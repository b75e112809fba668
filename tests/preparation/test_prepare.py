"""From shards to training sets: every row accounted for, and the same bytes after any kill."""

import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter

import pytest

from stable_opd_mcore.config.data import SourceConfig
from stable_opd_mcore.data.decontamination import problem_key
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from stable_opd_mcore.host.run_lock import RunLock
from stable_opd_mcore.preparation.prepare import prepare_data
from tests.preparation.make_openr1 import benchmark_text
from tests.preparation.runs import NUM_ROWS, make_inputs, request


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return folder, make_inputs(folder)


@pytest.fixture(scope="module")
def prepared(inputs, tmp_path_factory):
    """The directory of an undisturbed preparation, and the lines that it told."""
    lines = []
    directory = tmp_path_factory.mktemp("prepared") / "data"
    prepare_data(request(inputs[0], directory), lines.append)
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
    assert any("malformed" in line for line in lines)


def test_no_benchmark_problem_is_left(prepared):
    directory, _ = prepared
    planted = {
        word
        for name in BENCHMARKS
        for number in range(3)
        for word in [problem_key(benchmark_text(name, number))[6:40]]
    }
    for row in json_lines(directory / "openr1_sft_46k.jsonl"):
        assert not any(text in problem_key(row["problem"]) for text in planted)
    listed = [r for r in json_lines(directory / "openr1_dropped.jsonl") if "stands" in r["reason"]]
    manifest = json.loads((directory / "openr1.manifest.json").read_text())
    assert len(listed) == manifest["counts"]["contaminated"] > 9


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
    prepare_data(request(inputs[0], tmp_path / "data", processes=2), print)
    assert contents(tmp_path / "data") == contents(prepared[0])


def test_ten_kills_do_not_change_a_byte(inputs, prepared, tmp_path):
    asked = request(inputs[0], tmp_path / "data")
    rng = random.Random(0)
    num_killed = 0
    while num_killed < 10:
        child = os.fork()
        if child == 0:
            try:
                prepare_data(asked, lambda _: None)
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL:
            num_killed += 1
        else:
            shutil.rmtree(asked.directory)  # it was quicker: start from nothing
    prepare_data(asked, print)
    assert contents(tmp_path / "data") == contents(prepared[0])


def test_prepared_again_nothing_is_done_and_a_lost_file_is_made_again(inputs, prepared, tmp_path):
    directory = tmp_path / "data"
    lines = []
    prepare_data(request(inputs[0], directory), lines.append)
    before = contents(directory)
    del lines[:]
    prepare_data(request(inputs[0], directory), lines.append)
    assert "made by this command before" in lines[-1]
    (directory / "openr1_opd_13k.jsonl").write_text("{}")
    prepare_data(request(inputs[0], directory), lines.append)
    assert contents(directory) == before
    prepare_data(request(inputs[0], directory, seed=1), lines.append)
    assert contents(directory)["openr1_sft_33k.jsonl"] != before["openr1_sft_33k.jsonl"]


def test_too_few_rows_end_with_advice_that_works(inputs, tmp_path):
    with pytest.raises(DataError, match=r"260 rows, which is too few .*lower --sft-rows"):
        prepare_data(request(inputs[0], tmp_path / "data", sft_rows=260), print)
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match=r"lower --sft-rows below (\d+), raise --max-tokens") as few:
        prepare_data(request(inputs[0], tmp_path / "data", sft_rows=250), print)
    below = int(str(few.value).split("below ")[1].split(",")[0])
    lines = []
    prepare_data(request(inputs[0], tmp_path / "data", sft_rows=below - 1), lines.append)
    assert any("parts were finished before" in line for line in lines)


def test_a_second_preparation_in_the_same_place_is_refused(inputs, tmp_path):
    with (
        RunLock(tmp_path / "data" / ".prepare-openr1"),
        pytest.raises(UserError, match="another run is at work here"),
    ):
        prepare_data(request(inputs[0], tmp_path / "data"), print)


def test_any_jsonl(inputs, tmp_path):
    rows = [{"q": f"Sum of {i} and {i}?", "a": 2 * i} for i in range(5)]
    rows += [{"q": benchmark_text("amc", 1), "a": "1"}, {"q": "", "a": "1"}]
    source = tmp_path / "mine.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    options = {"recipe": "rows", "source": str(source), "sft_rows": 33_000}
    options["columns"] = {"problem": "q", "answer": "a", "solution": ""}
    prepare_data(request(inputs[0], tmp_path / "data", **options), print)
    written = json_lines(tmp_path / "data" / "mine.jsonl")
    assert sorted(row["source"] for row in written) == [f"mine.jsonl:{i}" for i in range(1, 6)]
    dropped = json_lines(tmp_path / "data" / "mine_dropped.jsonl")
    assert [row["reason"] for row in dropped] == ["stands in amc (exact)", "malformed"]
    with pytest.raises(UserError, match=r"mine\.jsonl would replace its own source"):
        prepare_data(request(inputs[0], tmp_path, **options), print)
