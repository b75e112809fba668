"""Benchmarks from local files, with the hub's column names or our own."""

import json

import pytest

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, GOLD_CORRECTIONS, load_benchmark
from stable_opd_mcore.evaluation.grading_worker import is_right
from tests.real_data import real_data

SIZES = {
    "aime24": 30,
    "aime25": 30,
    "amc": 83,
    "math500": 500,
    "minerva": 272,
    "olympiadbench": 675,
}


def write(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records))


def test_hub_columns_with_context_and_several_answers(tmp_path):
    write(
        tmp_path / "olympiadbench.jsonl",
        {"question": "Find x.", "context": "Let x > 0.", "final_answer": ["1", "2"]},
        {"question": "Find y.", "context": None, "final_answer": ["3"]},
        {"question": "Find z.", "context": 5, "final_answer": ["3"]},
    )
    rows = load_benchmark("olympiadbench", tmp_path)
    assert [row.problem for row in rows] == ["Let x > 0.\nFind x.", "Find y.", "5\nFind z."]
    assert [row.answer for row in rows] == ["1, 2", "3", "3"]
    assert rows[0].row_id == "olympiadbench.jsonl:1"
    assert rows[0].solution is None


def test_bad_names_files_and_rows(tmp_path):
    with pytest.raises(DataError, match=r"aime26: no such benchmark; give one of aime24"):
        load_benchmark("aime26", tmp_path)
    with pytest.raises(DataError, match=r"neither amc\.jsonl nor amc\.parquet"):
        load_benchmark("amc", tmp_path)
    write(tmp_path / "minerva.jsonl", {"text": "x", "answer": "1"})
    with pytest.raises(DataError, match=r"minerva\.jsonl:1: no column 'problem'"):
        load_benchmark("minerva", tmp_path)
    for name in ("amc", "minerva"):
        write(tmp_path / f"{name}.jsonl", {"problem": "x", "answer": "1"})
        assert load_benchmark(name, tmp_path)


@pytest.mark.parametrize("name", SIZES)
def test_real_benchmarks_are_whole(name):
    rows = load_benchmark(name, real_data("eval"))
    assert len(rows) == SIZES[name]
    assert all(row.answer and row.problem and row.answer_format == "boxed" for row in rows)
    assert set(SIZES) == set(BENCHMARKS)
    assert load_benchmark(name, real_data("eval"), limit=2) == rows[:2]


@pytest.mark.parametrize("name", GOLD_CORRECTIONS)
def test_corrected_golds_are_those_of_the_data_and_can_be_matched(name):
    with real_data(f"eval/{name}.jsonl").open() as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    published = [", ".join(a) if isinstance(a, list) else a for a in answers]
    golds = [row.answer for row in load_benchmark(name, real_data("eval"))]
    changed = {old: new for old, new in zip(published, golds, strict=True) if old != new}
    assert changed == GOLD_CORRECTIONS[name]
    for new in changed.values():
        response = f"So the answer is \\boxed{{{new.strip('$')}}}."
        assert is_right(response, new)
        assert not is_right("\\boxed{17}", new)
