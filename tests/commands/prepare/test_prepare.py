"""From shards to training sets: every row accounted for, the same bytes, order and division."""

import hashlib
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stable_opd_mcore.commands.prepare import prepare
from stable_opd_mcore.commands.prepare.prepare import prepare_data, shuffled, split_rows
from stable_opd_mcore.config.data import SourceConfig
from stable_opd_mcore.data.decontamination import problem_key
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from tests.commands.prepare.make_inputs import (
    NUM_ROWS,
    benchmark_text,
    make_inputs,
    small_preparation,
)

HASHES = {
    "openr1_dropped.jsonl": "dea434a0a41c5d49",
    "openr1_opd_13k.jsonl": "efea731505da51f8",
    "openr1_sft_33k.jsonl": "c04dc3de4092ae6d",
    "openr1_sft_46k.jsonl": "8c9a8f3c114e9917",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return folder, make_inputs(folder)


@pytest.fixture(scope="module")
def prepared(inputs, tmp_path_factory):
    """The directory of an undisturbed preparation, and the lines that it printed."""
    lines = []
    directory = tmp_path_factory.mktemp("prepared") / "data"
    prepare_data(small_preparation(inputs[0], directory), lines.append)
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
    assert [entry["sha256"] for entry in manifest["inputs"]] == hashes
    supervised = manifest["outputs"]["openr1_sft_33k.jsonl"]
    lengths = supervised["solution_tokens"]
    assert supervised["rows"] == 100
    assert lengths["p50"] <= lengths["p95"] <= lengths["max"] <= 60


def test_the_same_inputs_give_the_same_bytes(prepared):
    """Whoever prepares a data set again with a later release gets the same files."""
    hashes = {
        name: hashlib.sha256(content).hexdigest()[:16]
        for name, content in contents(prepared[0]).items()
        if name.startswith("openr1") and name.endswith(".jsonl")
    }
    assert hashes == HASHES


def test_an_interrupted_preparation_changes_no_file_and_leaves_none(
    inputs, prepared, tmp_path, monkeypatch
):
    preparation = small_preparation(inputs[0], tmp_path / "data")
    (tmp_path / "data/.prepare-openr1").mkdir(parents=True)
    (tmp_path / "data/.prepare-openr1/00000.arrow").write_text("of a killed command")
    (tmp_path / "data/openr1_sft_33k.jsonl").write_text("earlier\n")

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "_facts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(preparation, print)
    assert contents(tmp_path / "data") == {"openr1_sft_33k.jsonl": b"earlier\n"}
    monkeypatch.undo()
    prepare_data(preparation, print)
    assert contents(tmp_path / "data") == contents(prepared[0])


def test_too_few_rows_end_with_advice_that_works(inputs, tmp_path):
    with pytest.raises(DataError, match=r"lower --sft-rows below (\d+), raise --max-tokens") as few:
        prepare_data(small_preparation(inputs[0], tmp_path / "data", sft_rows=250), print)
    below = int(str(few.value).split("below ")[1].split(",")[0])
    prepare_data(small_preparation(inputs[0], tmp_path / "data", sft_rows=below - 1), print)


def test_a_file_that_breaks_off_and_a_line_that_is_no_row_end_the_command(inputs, tmp_path):
    def ends(source, message):
        options = {"recipe": "rows", "source": str(source), "sft_rows": 33_000}
        with pytest.raises(DataError, match=message):
            prepare_data(small_preparation(inputs[0], tmp_path / "data", **options), print)

    broken = tmp_path / "broken.parquet"
    data = bytearray(next((inputs[0] / "openr1").iterdir()).read_bytes())
    data[4:2000] = b"x" * 1996
    broken.write_bytes(data)
    ends(broken, r"broken\.parquet: not readable as parquet; ")
    (tmp_path / "a.jsonl").write_text('{"problem": " ", "answer": "1"}\n')
    ends(tmp_path / "a.jsonl", r"none of 1 rows is kept; the first one: a\.jsonl:1 malformed")
    (tmp_path / "b.jsonl").write_text('{"problem": "1", "answer": "1"}\n{"problem')
    ends(tmp_path / "b.jsonl", r"b\.jsonl:2: not valid JSON")


def test_any_jsonl(inputs, tmp_path):
    rows = [{"q": f"Sum of {i} and {i}?", "a": 2 * i} for i in range(5)]
    rows += [{"q": benchmark_text("amc", 1), "a": "1"}, {"q": "", "a": "1"}]
    source = tmp_path / "mine.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    options = {"recipe": "rows", "source": str(source), "sft_rows": 33_000}
    options["columns"] = {"problem": "q", "answer": "a", "solution": ""}
    prepare_data(small_preparation(inputs[0], tmp_path / "data", **options), print)
    written = json_lines(tmp_path / "data" / "mine.jsonl")
    assert sorted(row["source"] for row in written) == [f"mine.jsonl:{i}" for i in range(1, 6)]
    dropped = json_lines(tmp_path / "data" / "mine_dropped.jsonl")
    assert [row["reason"] for row in dropped] == ["stands in amc (exact)", "malformed"]


def test_the_split_is_seeded_exact_and_disjoint_by_problem():
    keys = [str(i // 2 if i < 20 else i) for i in range(100)]
    order = shuffled(keys, range(100), seed=0)
    assert sorted(order) == list(range(100))
    assert order != sorted(order)
    assert order != shuffled(keys, range(100), seed=1)
    sft, opd = split_rows(keys, order, 70)
    assert len(sft) == 70
    assert sorted(sft + opd) == list(range(100))
    assert not {keys[row] for row in sft} & {keys[row] for row in opd}
    # A group that does not fit goes to the second part.
    assert split_rows(["1", "1", "1", "2"], [0, 1, 2, 3], 2) == ([3], [0, 1, 2])


def test_the_order_of_a_problem_does_not_depend_on_other_rows():
    few, many = ["5", "6", "7", "8"], ["5", "1", "6", "2", "7", "3", "8"]
    order = [many[row] for row in shuffled(many, range(7), seed=3)]
    assert [key for key in order if key >= "5"] == [few[row] for row in shuffled(few, range(4), 3)]


def test_rows_of_parquet_with_an_unread_part_of_the_prompt_are_dropped(inputs, tmp_path):
    rows = [
        {"problem": f"{word}?", "answer": "1", "solution": "It is 1.", "system": s, "images": i}
        for word, s, i in (("a", None, []), ("b", "Think.", None), ("c", None, ["x.png"]))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    options = {"recipe": "rows", "source": str(tmp_path / "mine.parquet"), "sft_rows": 33_000}
    prepare_data(small_preparation(inputs[0], tmp_path / "data", **options), print)
    assert [row["problem"] for row in json_lines(tmp_path / "data" / "mine.jsonl")] == ["a?"]
    dropped = [row["detail"] for row in json_lines(tmp_path / "data" / "mine_dropped.jsonl")]
    assert ["'system' has a text" in dropped[0], "'images' holds list" in dropped[1]] == [True] * 2
