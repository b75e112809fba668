"""Runs from directories and folders of runs: which, in which order, under which names."""

from pathlib import Path

from stable_opd_mcore.monitoring.chosen_runs import ReportRun, named_runs


def started(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").touch()
    return directory


def test_names_are_the_shortest_ends_that_differ(tmp_path):
    names = ("seed0/collapse/opd", "seed1/collapse/opd", "seed1/sft")
    runs = named_runs([started(tmp_path / name) for name in names])
    assert [run.label for run in runs] == ["seed0/collapse/opd", "seed1/collapse/opd", "sft"]
    seeds = named_runs([ReportRun(tmp_path / name, "opd") for name in names[:2]])
    assert [run.label for run in seeds] == ["opd", "opd"]
    assert [run.name for run in seeds] == ["seed0/collapse/opd", "seed1/collapse/opd"]


def test_a_folder_stands_for_the_runs_below_it(tmp_path):
    for name in ("b/opd", "a/opd", "a/sft"):
        started(tmp_path / name)
    runs = named_runs([tmp_path, tmp_path / "a" / "sft"])  # the second is among the first
    assert [run.name for run in runs] == ["a/opd", "sft", "b/opd"]
    (tmp_path / "empty").mkdir()
    waiting = [tmp_path / "empty", tmp_path / "not-yet"]
    assert [run.directory for run in named_runs(waiting)] == waiting
