"""The runs of `stable-opd demo --agents`: one half is arithmetic, the other an environment's.

Models and settings are those of the demo, with the changes listed here. The environment is ring.py.
A scripted player writes its golden transcripts, with the facts that the run's arithmetic has: all
of them, or random ones in place of those that the student lacks.

Only the teacher's output head has its stop tokens exchanged. So the teacher ends its turns with
another token, but still reads the chat template's own token at the end of the student's turns.
"""

import json
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stable_opd_mcore.commands.demo.recipe import HEAD, Job, Texts, demo_jobs
from stable_opd_mcore.commands.demo.ring import FLOORS, episode
from stable_opd_mcore.commands.demo.summary import RING
from stable_opd_mcore.commands.report.figures import WINDOW
from stable_opd_mcore.data.synthetic import ArithmeticOptions, is_unknown
from stable_opd_mcore.host.atomic_files import write_atomically

MAX_TURNS = 6
NUM_DOCUMENTS = 2000  # transcripts to train a model on
STARTS = [(floor, goal) for floor in range(FLOORS) for goal in range(FLOORS) if floor != goal]

SHARED = {  # what differs from collapse.yaml
    "environment": {
        "function": f"{Path(__file__).with_name('ring.py')}:episode",
        "max_turns": MAX_TURNS,
        "workers": 1,
    },
    "sampling": {"max_new_tokens": 48},  # of a turn
    "train": {"steps": 120},
    "evaluation": {"every": 40},
}
LSM = {"name": "lsm", "top_k": 4}
ARMS: dict[str, dict[str, Any]] = {  # arm -> what differs from sampled OPD
    "opd": {},
    "lsm": {"objective": LSM},
    "opd_horizon": {"environment": {"horizon_start": 1, "horizon_steps": 60}},
    "stable_opd": {"kl": {"beta": 1.0}, "mixture": {"lambda": 1.0}},
    "opd_stop_class": {"objective": {"stop_class": True}},
    "lsm_stop_class": {"objective": LSM | {"stop_class": True}},
}
AGENT_TEXTS = Texts(
    "Agents and arithmetic",
    "Half of the prompts are arithmetic, half are episodes of up to six turns. The student lacks "
    "facts of both, and its stop token is not the teacher's. stop_class sums the probabilities of "
    "both stop tokens; the episodes of opd_horizon grow from one turn to six in half of the steps.",
    "math: accuracy on 256 held-out problems of arithmetic, sampled at temperature 1.\n"
    "ring: success of the rollouts in the environment; turns: the mean number in an episode;\n"
    "cut: share of turns that reach the length budget; KL: nats/token to the teacher in\n"
    f"the second turn and later ones. All numbers of the ring are {WINDOW}-step means.",
)


def agent_jobs(directory: Path, num_seeds: int = 1) -> list[Job]:
    """All runs below `directory`, as `demo_jobs` has them; each reads a file of transcripts."""
    arms: dict[str, Any] = {
        arm: OmegaConf.to_container(OmegaConf.merge(SHARED, changes))
        for arm, changes in ARMS.items()
    }
    return [_with_ring(job, directory) for job in demo_jobs(directory, num_seeds, arms)]


def _with_ring(job: Job, directory: Path) -> Job:
    if job.config is None:
        return replace(job, swapped=HEAD)
    config = {**job.config, "data": {**job.config["data"]}}
    name = "arms" if job.arm else job.directory.name
    ring = {
        "name": RING,
        "path": str(directory / f"seed{job.seed}" / f"{RING}_{name}.jsonl"),
        "columns": {"messages": "messages", "golden": "all", "answer": None},
    }
    if job.arm:
        ring["environment"] = config.pop("environment")
    config["data"]["train"] = [{"name": "arithmetic", **config["data"]["train"]}, ring]
    return replace(job, config=config)


def write_transcripts(jobs: Iterable[Job]) -> None:
    """The files of transcripts that the jobs read."""
    for job in jobs:
        if job.config is None:
            continue
        arithmetic, ring = job.config["data"]["train"]
        options = ArithmeticOptions.model_validate(arithmetic["options"])
        count = len(STARTS) if job.arm else NUM_DOCUMENTS
        lines = [json.dumps(transcript(options, index)) + "\n" for index in range(count)]
        write_atomically(Path(ring["path"]), "".join(lines).encode())


def transcript(options: ArithmeticOptions, index: int) -> dict[str, Any]:
    """A row of the ring: its start, and a game of a player who has the facts of `options`."""
    rng = random.Random(f"{options.seed}/{RING}/{index}")
    floor, goal = STARTS[index % len(STARTS)]
    row: dict[str, Any] = {"floor": floor, "goal": goal}
    game, observed, messages = episode(row, rng.random()), f"_{floor}{goal}", []
    next(game)
    with suppress(StopIteration):
        for _ in range(MAX_TURNS):
            floor = int(observed[1])
            distance = (goal - floor) % FLOORS
            if is_unknown(options, goal, "-", floor):
                distance = rng.randrange(FLOORS)
            said = f"{goal}-{floor}={distance};[{distance}]"
            messages += [
                {"role": "user", "content": observed},
                {"role": "assistant", "content": said},
            ]
            observed = str(game.send(said))
    return row | {"messages": messages}
