"""Runs from directories and folders of runs: which, in which order, under which names; files."""

from pathlib import Path

import pytest

from stable_opd_mcore.commands.report.chosen_runs import (
    ReportRun,
    WrittenRun,
    evaluated_runs,
    named_runs,
    read_written,
    seeds_together,
)
from stable_opd_mcore.errors import UserError
from tests.commands.report.make_run import make_run


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


def test_what_a_run_has_written(tmp_path):
    run = ReportRun(make_run(tmp_path / "run", 1, beta=0.5), "run")
    results = tmp_path / "run" / "evaluation" / "step_000001" / "results.json"
    results.parent.mkdir(parents=True)
    results.write_text('{"benchmarks": {"amc": {"accuracy": 0.5, "large": 1e999, "is": true}}}')
    found = read_written(run)
    assert [row["step"] for row in found.rows] == [0, 1]
    assert (found.settings["kl.beta"], "run.name" in found.settings) == ("0.5", False)
    assert found.results == {"step_000001": {"amc": {"accuracy": 0.5}}}
    for text, message in (("[1]", "a JSON list, not"), ('{"benchmarks": [1]}', "no mapping")):
        results.write_text(text)
        with pytest.raises(
            UserError, match=rf"evaluation/.*/results\.json: {message}.*; delete it"
        ):
            read_written(run)
        results.unlink()
        assert read_written(run).results == {}
    settings = run.directory / "config.resolved.yaml"
    kept = settings.read_text()
    for text, message in (
        ("- a\n", "a list, not a mapping of settings"),
        ("a: &a 1\nb: *a\n", "not readable as YAML: it holds aliases"),
        ("a: [", "not readable as YAML"),
    ):
        settings.write_text(text)
        with pytest.raises(
            UserError, match=rf"resolved\.yaml: {message}.*; restore the run's file"
        ):
            read_written(run)
        settings.write_text(kept)
        assert read_written(run).settings == found.settings
    settings.unlink()  # a run that died early has none
    assert read_written(run).settings == {}


def test_evaluated_models_of_no_run_have_results_and_no_settings(tmp_path):
    places = [tmp_path / name for name in ("models/evaluation/b", "models/evaluation/a", "run/e/a")]
    for number, place in enumerate(places):
        place.mkdir(parents=True)
        (place / "results.json").write_text(
            f'{{"benchmarks": {{"amc": {{"accuracy": {number}}}}}}}'
        )
    settings = tmp_path / "run" / "config.resolved.yaml"
    settings.write_text("train: {seed: 1}")
    models, run = seeds_together(evaluated_runs(places))
    assert (models.run.label, models.settings, models.rows) == ("models", {}, [])
    assert models.results == {"b": {"amc": {"accuracy": 0.0}}, "a": {"amc": {"accuracy": 1.0}}}
    assert (run.run.name, run.settings) == ("run", {"train.seed": "1"})
    assert run.results == {"a": {"amc": {"accuracy": 2.0}}}


def test_runs_that_differ_in_the_seed_alone_share_a_label():
    def run(name: str, seed: int, label: str = "", **settings: str) -> WrittenRun:
        at = ReportRun(Path(name), label or name, name)
        return WrittenRun(at, [], [], {"train.seed": str(seed), **settings}, {})

    opd = [run(f"sweep_beta0_seed{seed}", seed, beta="0") for seed in (1, 12)]
    below = [run(f"seed{seed}/grpo", seed, beta="1") for seed in (1, 2)]
    alone, given = run("sft", 1, beta="2"), run("x", 3, "mine", beta="0")
    unknown = [WrittenRun(ReportRun(Path(n), n, n), [], [], {}, {}) for n in ("y0", "y1")]
    found = seeds_together([opd[0], *below, opd[1], alone, given, *unknown])
    labels = [one.run.label for one in found]
    assert labels == ["sweep_beta0", "grpo", "grpo", "sweep_beta0", "sft", "mine", "y0", "y1"]

    arms = [run(f"run{n}", n % 2, beta="0" if n < 3 else "1") for n in (1, 2, 3, 4)]
    labels = [one.run.label for one in seeds_together(arms)]
    assert labels == ["run1 + run2", "run1 + run2", "run3 + run4", "run3 + run4"]
    for other in (run("opd", 1, beta="1"), run("x", 1, "opd", beta="1")):
        seeds = [run(f"opd_seed{seed}", seed, beta="0") for seed in (1, 2)]
        labels = [one.run.label for one in seeds_together([*seeds, other])]
        assert labels == ["opd_seed1 + opd_seed2", "opd_seed1 + opd_seed2", "opd"]
