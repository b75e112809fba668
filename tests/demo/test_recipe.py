"""The demo's jobs: their dependencies, and the settings in which the arms of an act differ."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.data.synthetic import SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.demo.recipe import ACTS, COLLAPSE_ARMS, SHOWN, STOP_ARMS, Job, demo_jobs
from stable_opd_mcore.losses.objectives import build_objective

NAMING = {  # per arm, the settings in which it may differ from its act's plain OPD
    "opd_kl": {"kl.beta"},
    "opd_mixture": {"mixture.lambda"},
    "stable_opd": {"kl.beta", "mixture.lambda"},
    "sft": {"objective.name", "teacher", "aggregation"},
    "opd_stop_class": {"objective.stop_class"},
    "grpo": {
        "objective.name",
        "teacher",
        "rollout.prompts_per_step",
        "rollout.samples_per_prompt",
    },
    "lsm": {"objective.name", "objective.top_k"},
    "gkd": {"objective.name"},
    "student_topk": {"objective.name", "objective.top_k"},
    "vopd": {"objective.advantage.control_variate"},
}


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    return demo_jobs(tmp_path, SHOWN, 2)


@pytest.fixture
def ablation(tmp_path: Path) -> list[Job]:
    return demo_jobs(tmp_path, ["ablation"])


def resolved(job: Job) -> dict[str, object]:
    """Every setting by its dotted key, except the run's own name."""
    config = parse_config(job.config, origin=job.name)

    def flatten(value: object, prefix: str) -> dict[str, object]:
        if not isinstance(value, dict) or prefix == "teacher":
            return {prefix: value}
        flat: dict[str, object] = {}
        for key, item in value.items():
            flat |= flatten(item, f"{prefix}.{key}" if prefix else key)
        return flat

    flat = flatten(config.model_dump(by_alias=True), "")
    del flat["run.name"]
    return flat


def test_every_seed_has_every_arm_once(jobs):
    arms = [(job.seed, job.act, job.arm) for job in jobs if job.arm]
    expected = {("collapse", arm) for arm in COLLAPSE_ARMS}
    expected |= {("stop_mismatch", arm) for arm in STOP_ARMS}
    assert len(arms) == len(set(arms))
    assert len({job.name for job in jobs}) == len({job.directory for job in jobs}) == len(jobs)
    for seed in range(2):
        assert {(act, arm) for owner, act, arm in arms if owner == seed} == expected


def test_jobs_wait_for_the_models_they_read_and_for_nothing_else(jobs):
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


def test_the_runs_are_what_the_document_says(jobs, ablation):
    for job in (job for job in jobs if job.config):
        config = parse_config(job.config, origin=job.name)
        sources = [source for source in (config.data.train, config.data.eval) if source]
        lacks_facts = any(source.options.get("unknown", 0) for source in sources)
        assert lacks_facts == (job.directory.name == "student")
        assert all(load_rows(source.model_copy(update={"limit": 3})) for source in sources)
        if job.arm:
            assert config.evaluation.temperature == 1.0
            assert config.evaluation.also_greedy
            assert sources[1].options["rows"] >= 256
        if job.act == "stop_mismatch":
            assert config.teacher.stop_token_ids == (VOCABULARY.index(SECOND_STOP),)
            assert "teacher_other_stop" in config.teacher.path
    arms = {(job.seed, job.arm) for job in ablation if job.arm}
    assert arms == {(seed, arm) for seed in range(5) for arm in ACTS["ablation"].arms}
    responses = {
        job.arm: job.config["rollout"]["prompts_per_step"]
        * job.config["rollout"]["samples_per_prompt"]
        for job in ablation
        if job.arm
    }
    assert set(responses.values()) == {16}


def test_the_ablation_repeats_no_run_of_the_demo(jobs, ablation):
    made = {job.name: job for job in jobs}
    shared = [job for job in ablation if job.name in made]
    assert {job.arm for job in shared if job.arm} == set(COLLAPSE_ARMS)
    for job in shared:
        assert job.directory == made[job.name].directory
        assert job.config == made[job.name].config


@pytest.mark.parametrize("act", [*SHOWN, "ablation"])
def test_arms_of_an_act_differ_only_in_their_named_settings(tmp_path, act):
    arms = [job for job in demo_jobs(tmp_path, [act], 2) if job.arm]
    plain = {(job.seed, job.act): resolved(job) for job in arms if job.arm == "opd"}
    for job in arms:
        base, mine = plain[job.seed, job.act], resolved(job)
        assert job.arm is not None
        assert base.keys() == mine.keys()
        assert {key for key in base if base[key] != mine[key]} == NAMING.get(job.arm, set())


def test_seeds_differ_in_nothing_but_seeds_and_places(jobs):
    by_seed = [{job.directory.parts[-2:]: job for job in jobs if job.seed == s} for s in (0, 1)]
    for first, second in zip(*(sorted(jobs_of.items()) for jobs_of in by_seed), strict=False):
        if first[1].config is None:
            continue
        one, other = resolved(first[1]), resolved(second[1])
        for flat in (one, other):
            for key in ("run.directory", "student.path", "teacher", "train.seed"):
                flat.pop(key)
            flat.pop("data.train.options.seed")
        assert one == other


def test_every_arm_s_objective_accepts_its_settings(ablation):
    for job in ablation:
        if job.arm and job.seed == 0:
            config = parse_config(job.config, origin=job.name)
            stops = None if config.teacher is None else [VOCABULARY.index(STOP)]
            objective = build_objective(config, [VOCABULARY.index(STOP)], stops)
            if config.objective.name in ("lsm", "student_topk"):
                assert objective.top_k < len(VOCABULARY)
