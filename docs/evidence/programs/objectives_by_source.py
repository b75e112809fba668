"""Arithmetic with a verifier and the demo's ring with a teacher: one objective, or one a source.

    python docs/evidence/programs/objectives_by_source.py OUT [SEEDS]

The models are those of `stable-opd demo --agents` and are trained first. Finished runs are kept.
Prints a line per run and the means over seeds of ../ring_teachers.md.
"""

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stable_opd_mcore.commands.demo import agents, runner
from stable_opd_mcore.commands.demo.recipe import Job
from stable_opd_mcore.commands.demo.summary import RING, summarise

SHARED = {
    "objective": {"stop_class": True},
    "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4},
    "normaliser": "per_source",
    "aggregation": "sequence_mean",
    "train": {"steps": 40},
    "evaluation": {"every": 20, "also_greedy": False},
}
ARMS: dict[str, dict[str, Any]] = {  # arm -> the objective of arithmetic and of the ring
    "opd": {},
    "grpo and opd": {"arithmetic": {"name": "grpo"}},
    "grpo": {name: {"name": "grpo"} for name in ("arithmetic", RING)},
}


def jobs_of(home: Path, seeds: int) -> list[Job]:
    """The models of each seed, then its runs."""
    every = agents.agent_jobs(home, seeds)
    models = [job for job in every if job.arm is None]
    plain = [job for job in every if job.arm == "opd"]
    return [*models, *(run_of(job, arm, own) for job in plain for arm, own in ARMS.items())]


def run_of(job: Job, arm: str, objectives: dict[str, Any]) -> Job:
    config: Any = OmegaConf.to_container(OmegaConf.merge(job.config, SHARED))
    name = arm.replace(" ", "_")
    config["run"]["name"] = name
    for source in config["data"]["train"]:
        if source["name"] in objectives:
            source["objective"] = objectives[source["name"]]
    if len(objectives) == len(config["data"]["train"]):  # then no source asks a teacher
        config |= {"objective": objectives[RING], "teacher": None}
        for source in config["data"]["train"]:
            del source["objective"]
    place = job.directory.with_name(name)
    steps = config["train"]["steps"]
    return replace(
        job, name=f"seed{job.seed}/{name}", directory=place, steps=steps, config=config, arm=arm
    )


def main(home: Path, seeds: int) -> None:
    jobs = jobs_of(home.resolve(), seeds)
    agents.write_transcripts(job for job in jobs if job.config and not job.directory.is_dir())
    runner.run_jobs(jobs)
    found: dict[str, list[tuple[float, ...]]] = {}
    for job in jobs:
        if job.arm is not None:
            record = summarise(job).record()
            keys = ("initial_accuracy", "final_accuracy", "ring_initial_success")
            numbers = tuple(record[key] for key in (*keys, "ring_final_success"))
            print(f"{job.arm:14} {job.seed}  " + "  ".join(f"{each:.2f}" for each in numbers))
            found.setdefault(job.arm, []).append(numbers)
    for arm, rows in found.items():
        for place, task in ((1, "arithmetic"), (3, "ring")):
            gains = [
                row[place] - other[place] for row, other in zip(rows, found["opd"], strict=True)
            ]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
            print(f"{arm:14} {task}: end minus opd {statistics.mean(gains):.3f} +- {error:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
