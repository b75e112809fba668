"""The demo's jobs: their dependencies, and the settings in which arms differ."""

from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from stable_opd_mcore.commands.demo.recipe import ARMS, Job, demo_jobs
from stable_opd_mcore.config.changes import by_dotted_key
from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.data.synthetic import SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.losses.objectives import build_objective


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    return demo_jobs(tmp_path, 2)


def resolved(job: Job) -> dict[str, Any]:
    """Every setting by its dotted key, except the run's own name; the teacher is one setting."""
    values = parse_config(job.config, origin=job.name).model_dump(by_alias=True)
    del values["run"]["name"]
    return {"teacher": values.pop("teacher")} | by_dotted_key(values)


def test_every_seed_has_every_arm_once_after_the_models_that_it_reads(jobs):
    arms = [(job.seed, job.arm) for job in jobs if job.arm]
    assert arms == [(seed, arm) for seed in range(2) for arm in ARMS]
    assert len({job.name for job in jobs}) == len({job.directory for job in jobs}) == len(jobs)
    made = {job.model: job.name for job in jobs}
    for job in jobs:
        read = {job.swap_from} if job.swap_from else set()
        if job.config:
            config = parse_config(job.config, origin=job.name)
            sections = [config.student, config.teacher]
            read = {Path(model.path) for model in sections if model and model.path}
        assert {made[path] for path in read} <= set(job.after)
        assert all(name.startswith(f"seed{job.seed}/") for name in job.after)
    TopologicalSorter({job.name: job.after for job in jobs}).prepare()  # raises for a cycle


def test_the_runs_are_what_the_document_says(jobs):
    for job in (job for job in jobs if job.config):
        config = parse_config(job.config, origin=job.name)
        sources = [source for source in (config.data.train, config.data.eval) if source]
        lacks_facts = any(source.options.get("unknown", 0) for source in sources)
        assert lacks_facts == (job.directory.name == "student")
        assert all(load_rows(source.model_copy(update={"limit": 3})) for source in sources)
        if job.arm:
            assert (config.evaluation.temperature, config.evaluation.also_greedy) == (1.0, True)
            assert sources[1].options["rows"] >= 256
        if config.teacher:
            assert config.teacher.stop_token_ids == (VOCABULARY.index(SECOND_STOP),)
            assert "teacher_other_stop" in config.teacher.path


def test_arms_differ_only_in_their_named_settings(jobs):
    arms = [job for job in jobs if job.arm]
    plain = {job.seed: resolved(job) for job in arms if job.arm == "opd"}
    for job in arms:
        base, mine = plain[job.seed], resolved(job)
        named = set(by_dotted_key(ARMS[job.arm]))
        named |= {"teacher", "objective.stop_class", "aggregation"} if job.arm == "sft" else set()
        differing = {key for key in base.keys() | mine.keys() if base.get(key) != mine.get(key)}
        assert differing <= named
        assert differing or job.arm == "opd"


def test_seeds_differ_in_nothing_but_seeds_and_places(jobs):
    places = ("run.directory", "student.path", "teacher", "train.seed", "data.train.options.seed")
    by_seed = [{job.directory.parts[-2:]: job for job in jobs if job.seed == s} for s in (0, 1)]
    for pair in zip(*(sorted(jobs_of.items()) for jobs_of in by_seed), strict=True):
        if pair[0][1].config is not None:
            one, other = (resolved(job) for _, job in pair)
            assert one | dict.fromkeys(places) == other | dict.fromkeys(places)


def test_every_arm_s_objective_accepts_its_settings(jobs):
    for job in (job for job in jobs if job.arm and job.seed == 0):
        config = parse_config(job.config, origin=job.name)
        stops = None if config.teacher is None else [VOCABULARY.index(STOP)]
        build_objective(config, [VOCABULARY.index(STOP)], stops)
