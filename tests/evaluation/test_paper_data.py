"""The paper's data as files: OpenR1's rows split without overlap, benchmarks that read back."""

import json

import pytest

from stable_opd_mcore.config.data import SourceConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from stable_opd_mcore.evaluation.paper_data import write_paper_data


def record(number, correct=True):
    return {
        "problem": f"{number}+1=",
        "answer": str(number + 1),
        "question_type": "math-word-problem",
        "generations": [f"{number}+1={number + 1}", f"{number + 1}"],
        "correctness_math_verify": [correct, correct],
        "is_reasoning_complete": [True, True],
    }


@pytest.fixture
def sources(tmp_path):
    def write(name, records):
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))

    write("openr1.jsonl", [record(number, correct=number != 3) for number in range(9)])
    for name, benchmark in BENCHMARKS.items():
        write(f"{name}.jsonl", [{benchmark.problem: "1+1=", benchmark.answer: "2"}])
    return tmp_path


def test_files_under_the_names_that_configs_use(sources, tmp_path):
    lines = []
    write_paper_data(
        Tokenizer.load("synthetic"),
        tmp_path / "data",
        lines.append,
        openr1=str(sources / "openr1.jsonl"),
        benchmark_directory=sources,
        sft_rows=5,
    )
    parts = [
        load_rows(SourceConfig(path=str(tmp_path / "data" / f"openr1_{part}.jsonl")))
        for part in ("sft_33k", "opd_13k")
    ]
    assert [len(part) for part in parts] == [5, 3]
    problems = {row.problem: row for part in parts for row in part}
    assert problems.keys() == {f"{number}+1=" for number in range(9) if number != 3}
    assert problems["7+1="].solution == "8"  # the shortest correct one
    assert any("1 rows dropped: no correct" in line for line in lines)
    for name in BENCHMARKS:
        written = load_benchmark(name, tmp_path / "data")
        assert [(row.problem, row.answer) for row in written] == [("1+1=", "2")]


def test_too_few_rows_leave_no_files(sources, tmp_path):
    with pytest.raises(DataError, match="8 rows cannot be split into 33000"):
        write_paper_data(
            Tokenizer.load("synthetic"),
            tmp_path / "data",
            print,
            openr1=str(sources / "openr1.jsonl"),
            benchmark_directory=sources,
        )
    assert not (tmp_path / "data").exists()
