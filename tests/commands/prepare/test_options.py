"""What is refused before the first row is read, and what a preparation reads and writes."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stable_opd_mcore.commands.prepare.options import (
    _require_one_split,
    find_files,
    require_columns,
)
from stable_opd_mcore.errors import DataError, UserError
from tests.commands.prepare.make_inputs import make_inputs, small_preparation, write_benchmarks
from tests.hub_server import COMMIT, hub_server, use_hub


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    (folder / "gsm8k").mkdir()
    (folder / "gsm8k" / "train.jsonl").write_text('{"question": "x", "answer": "#### 1"}\n')
    (folder / "empty").mkdir()
    return folder


GSM8K = {"source": "gsm8k", "sft_rows": 33_000}
ROWS = {"recipe": "rows", "columns": {"problem": "question", "solution": ""}}


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"recipe": "math"}, "--recipe math: no such recipe; give one of openr1, ", {}),
        ({"student": "gone"}, "gone: no such tokenizer directory", {}),
        ({"student": "synthetic"}, "synthetic: .*; give a model with a tokenizer of ordinary", {}),
        ({"columns": {"problem": "q"}}, "--problem: --recipe openr1 has columns of its own", {}),
        (
            {"recipe": "gsm8k"},
            "--sft-rows 100: only --recipe openr1 splits its rows; leave it out",
            {"recipe": "gsm8k"} | GSM8K,
        ),
        (
            {"recipe": "rows", "sft_rows": 33_000, "source": None},
            "--recipe rows: no --source",
            ROWS | GSM8K,
        ),
        ({"revision": "abc"}, "--revision abc: .* is a path", {}),
        ({"student_revision": "abc"}, "--student-revision abc: .* leave it out", {}),
        ({"source": "/gone"}, "/gone: no such file or folder; check --source", {}),
        (
            ROWS | GSM8K | {"columns": {"problem": ""}},
            "--problem '': .*; give the name of its column",
            ROWS | GSM8K,
        ),
    ],
)
def test_options_that_do_not_fit(inputs, monkeypatch, changes, message, remedy):
    """The remedy has the options that then fit."""
    monkeypatch.chdir(inputs)
    with pytest.raises(UserError, match=message):
        small_preparation(inputs, inputs / "data", **changes)
    small_preparation(inputs, inputs / "data", **remedy)


def test_data_and_student_come_from_the_hub_at_a_commit(inputs, tmp_path, monkeypatch):
    shards = {f"data/{p.name}": p.read_bytes() for p in (inputs / "openr1").iterdir()}
    student = {p.name: p.read_bytes() for p in (inputs / "student").iterdir()}
    repositories = {
        "datasets/open-r1/OpenR1-Math-220k": shards | {"all/train-0.parquet": b"not these"},
        "models/me/student": student | {"model.safetensors": b"weights"},
    }
    with hub_server(repositories) as (url, asked):
        use_hub(monkeypatch, url, tmp_path / "cache")
        options = {"source": None, "revision": COMMIT, "student": "me/student"}
        preparation = small_preparation(inputs, tmp_path, **options)
        rows = {"recipe": "rows", "sft_rows": 33_000, "columns": {"answer": ""}}
        options |= {"source": "open-r1/OpenR1-Math-220k"}
        named = small_preparation(inputs, tmp_path, **options | rows)
    assert (named.name, named.outputs) == ("OpenR1-Math-220k", ("OpenR1-Math-220k",))
    assert preparation.origin == f"open-r1/OpenR1-Math-220k@{COMMIT}"
    local = small_preparation(inputs, tmp_path)
    read, expected = (
        [path.read_bytes() for path in each.files.values()] for each in (preparation, local)
    )
    assert read == expected
    assert preparation.rules == local.rules
    assert not any("safetensors" in path or "all/" in path for path in asked)


def test_benchmarks_and_columns_are_checked_first(inputs, tmp_path):
    with pytest.raises(UserError, match=r"neither aime24\.jsonl nor aime24\.parquet in it"):
        small_preparation(inputs, tmp_path, benchmarks=inputs / "empty", source="/gone")
    options = {"recipe": "openr1-46k-8192", "sft_rows": 33_000}
    with pytest.raises(UserError, match=r"00000.*: no column 'prompt\.1\.content'; it has problem"):
        small_preparation(inputs, tmp_path, **options)
    options = {"recipe": "rows", "sft_rows": 33_000, "columns": {"problem": ""}}
    with pytest.raises(UserError, match="--problem '': every row needs a problem"):
        small_preparation(inputs, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_names_of_files_follow_from_the_recipe(inputs, tmp_path, monkeypatch):
    outputs = small_preparation(inputs, tmp_path).outputs
    assert outputs == ("openr1_sft_33k", "openr1_opd_13k", "openr1_sft_46k")
    source = {"source": str(inputs / "gsm8k"), "sft_rows": 33_000}
    preparation = small_preparation(inputs, tmp_path, recipe="gsm8k", **source)
    assert (preparation.name, preparation.outputs) == ("gsm8k", ("gsm8k_train",))
    columns = {"problem": "question", "answer": "answer", "solution": "answer"}
    preparation = small_preparation(inputs, tmp_path, recipe="rows", columns=columns, **source)
    assert (preparation.name, preparation.outputs) == ("gsm8k", ("gsm8k",))
    monkeypatch.chdir(inputs / "gsm8k")
    preparation = small_preparation(
        inputs, tmp_path, recipe="rows", columns=columns, **source | {"source": "."}
    )
    assert (preparation.name, preparation.outputs) == ("gsm8k", ("gsm8k",))
    assert not small_preparation(inputs, inputs / "benchmarks").writes_benchmarks


def test_no_file_of_a_preparation_replaces_another(inputs, tmp_path):
    columns = {"problem": "problem", "answer": "answer", "solution": ""}
    options = {"recipe": "rows", "sft_rows": 33_000, "columns": columns}
    for name, whose in (("amc", "a benchmark"), ("mine_dropped", "another source's dropped rows")):
        source = tmp_path / f"{name}.jsonl"
        source.write_text('{"problem": "x", "answer": "1"}\n')
        message = rf"{name}\.jsonl, which is the file of {whose}; give --source a copy with another"
        with pytest.raises(UserError, match=message):
            small_preparation(inputs, tmp_path / "out", source=str(source), **options)
    with pytest.raises(UserError, match=r"amc\.jsonl would replace its own source; name another"):
        small_preparation(inputs, tmp_path, source=str(tmp_path), **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "recipe", "refused"),
    [
        (["a.parquet", "b.jsonl"], "rows", r"b\.jsonl would not be read with a\.parquet"),
        (["a.jsonl", "more/b.jsonl", "c.csv"], "rows", r"c\.csv, more/b\.jsonl would not"),
        (["a.jsonl", "b.jsonl.part"], "rows", r"b\.jsonl\.part would not be read"),
        (["train.jsonl", "train-1.json"], "gsm8k", r"train-1\.json would not be read"),
        (["train.jsonl", "test.jsonl", "socratic/train.jsonl"], "gsm8k", None),
        (["data/train-0.parquet", "data/test-0.parquet", ".hidden.jsonl"], "rows", None),
        (["a-00000-of-00003.jsonl", "a-00002-of-00003.jsonl"], "rows", "number 1 is missing"),
        (["a.jsonl", "out/mine.jsonl", "benchmarks/amc.jsonl"], "rows", None),
    ],
)
def test_no_file_of_a_source_is_passed_over(inputs, tmp_path, names, recipe, refused):
    source = tmp_path / "mine"
    record = {"problem": "x", "question": "x", "answer": "1", "solution": "It is 1."}
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("parquet"):
            pq.write_table(pa.Table.from_pylist([record]), source / name)
        else:
            (source / name).write_text(json.dumps(record) + "\n")
    write_benchmarks(source / "benchmarks")
    options = {
        "recipe": recipe,
        "source": str(source),
        "sft_rows": 33_000,
        "benchmarks": source / "benchmarks",
    }
    if refused is None:
        small_preparation(inputs, source / "out", **options)
        return
    with pytest.raises(DataError, match=refused):
        small_preparation(inputs, source / "out", **options)
    if "missing" not in refused:  # which is downloaded
        options["source"] = str(source / names[0])
        small_preparation(inputs, source / "out", **options)


def test_bad_files_are_named(tmp_path):
    def refuses(name, content, message):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            require_columns(tmp_path / name, ["a"])
        (tmp_path / name).write_text('{"a": 1}\n')
        require_columns(tmp_path / name, ["a"])

    refuses("b.jsonl", b"", r"b\.jsonl: no rows in it")
    refuses("c.jsonl", b'{"b": 1}\n', r"c\.jsonl: no column 'a'; it has b\. .*--problem")


def test_the_first_matching_glob_names_the_files(tmp_path):
    for name in ("data/train-1.parquet", "data/train-0.parquet", "all/x.parquet", "y.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = find_files(tmp_path, ("data/train-*.parquet", "*.jsonl"))
    assert [path.name for path in found] == ["train-0.parquet", "train-1.parquet"]
    assert find_files(tmp_path, ("*.parquet", "*.jsonl")) == [tmp_path / "y.jsonl"]
    assert find_files(tmp_path / "y.jsonl", ()) == [tmp_path / "y.jsonl"]
    with pytest.raises(DataError, match=r"no file that matches \*\.csv.*--source"):
        find_files(tmp_path, ("*.csv",))


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train.jsonl", "test.jsonl"), "test, train"),
        (("rows-0.jsonl", "rows-1.jsonl", "rows-val-0.jsonl"), "train, val"),
        (("test.jsonl", "validation.jsonl"), "test, validation"),
        (("rows-0.jsonl", "rows-1.jsonl"), None),
        (("test-0.jsonl", "test-1.jsonl"), None),
    ],
)
def test_files_of_several_splits_are_no_training_set(tmp_path, names, splits):
    paths = [tmp_path / name for name in names]
    if splits is None:
        return _require_one_split(tmp_path, paths)
    with pytest.raises(DataError, match=f"files of the splits {splits},.*--source one of them"):
        _require_one_split(tmp_path, paths)
    return _require_one_split(paths[0], paths[:1])
