"""Publishing: complete or not at all, and recognised when it is there."""

import json

import pytest

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.preparation.job import check, facts_of
from stable_opd_mcore.preparation.publish import is_published, publish
from stable_opd_mcore.preparation.spool import run_parts
from tests.preparation.runs import make_inputs, request


def published(inputs, tmp_path, **changes):
    job = check(request(inputs, tmp_path / "data", **changes))
    parts = tmp_path / "parts"
    parts.mkdir()
    job.request.directory.mkdir()
    run_parts(job.parts, job.columns, job.rules, parts, 1, print)
    publish(job, facts_of(job), parts, print)
    return job


def test_published_files_are_recognised_until_one_changes(tmp_path):
    make_inputs(tmp_path)
    job = published(tmp_path, tmp_path)
    facts = facts_of(job)
    assert is_published(job, facts)
    assert not is_published(job, facts | {"origin": "elsewhere"})
    for name in ("openr1_sft_33k.jsonl", "amc.jsonl", "openr1.datasheet.md"):
        path = job.request.directory / name
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        assert not is_published(job, facts)
        path.write_bytes(text)
    assert is_published(job, facts)
    job.manifest.write_text('{"outputs": 3}')
    assert not is_published(job, facts)


def test_a_source_without_usable_rows_names_the_first_reason(tmp_path):
    make_inputs(tmp_path)
    source = tmp_path / "bad.jsonl"
    source.write_text(json.dumps({"problem": " ", "answer": "1"}) + "\n")
    with pytest.raises(
        DataError, match=r"none of 1 rows is kept; the first one, bad\.jsonl:1: malf"
    ):
        published(tmp_path, tmp_path, recipe="rows", source=str(source), sft_rows=33_000)


def test_benchmarks_read_from_the_directory_are_not_written_there(tmp_path):
    make_inputs(tmp_path)
    (tmp_path / "data").symlink_to(tmp_path / "benchmarks")
    job = check(request(tmp_path, tmp_path / "data"))
    assert not job.request.write_benchmarks
