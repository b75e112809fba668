"""The demo's runs: the training of its teacher and student, and the arms.

All are settings of ordinary training runs, chained by the models that the runs write. The YAML
files in this directory hold what the runs of one kind share. The task is the arithmetic of
data/synthetic.py.

The student lacks some of the facts that the teacher knows, and golden solutions are few. Plain
distillation collapses here by construction: the teacher ends its responses with another stop token
and gives the student's almost no probability. The student learns the facts first, because it is
almost certain of its stop token. A response may be three times its normal length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from stable_opd_mcore.data.synthetic import SECOND_STOP, VOCABULARY
from stable_opd_mcore.host.run_directory import RunDirectory

MODELS: dict[str, dict[str, Any]] = {  # model -> its settings that differ from supervised.yaml
    "teacher": {"train": {"steps": 400}, "optimizer": {"lr": 3e-3}},
    "student": {
        "student": {
            "architecture": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "initializer_range": 0.12,
            }
        },
        # the share of facts of which the student has seen only random results
        "data": {"train": {"options": {"unknown": 0.3}}},
        "train": {"steps": 700},
        "optimizer": {"lr": 5e-3},
    },
}


# arm -> the settings in which it differs from plain OPD, in the order of tables and figures
ARMS: dict[str, dict[str, Any]] = {
    "opd": {},
    "opd_kl": {"kl": {"beta": 1.0}},
    "opd_mixture": {"mixture": {"lambda": 1.0}},
    "stable_opd": {"kl": {"beta": 1.0}, "mixture": {"lambda": 1.0}},
    "sft": {"objective": {"name": "sft"}},
    "opd_stop_class": {"objective": {"stop_class": True}},
    "stable_opd_stop_class": {
        "objective": {"stop_class": True},
        "kl": {"beta": 1.0},
        "mixture": {"lambda": 1.0},
    },
}
COLLAPSE = "collapse"  # the folder of the arms' runs in a seed's, and the file of their settings


class Texts(NamedTuple):
    """What the report and the table say about the arms."""

    title: str
    caption: str
    note: str  # below the table


TEXTS = Texts(
    "On-policy distillation, collapsed and cured",
    "The student lacks facts, and its stop token is not the teacher's. Plain OPD improves, then "
    "loses stopping. stable_opd has the KL to the initial student and the golden mixture, opd_kl "
    "and opd_mixture have one of them. sft trains only on the same few golden solutions. "
    "stop_class sums the probabilities of both stop tokens.",
    "Accuracy on 256 held-out problems, sampled at temperature 1; greedy at the end.\n"
    "trunc, rep: shares of truncated and repetitive rollouts, 5-step means.",
)
HEAD = ("lm_head.weight",)
EMBEDDING_AND_HEAD = ("model.embed_tokens.weight", *HEAD)


@dataclass(frozen=True)
class Job:
    """One training run; with `swap_from`, a copy of a model that uses the other stop token."""

    name: str
    directory: Path
    steps: int = 0
    config: dict[str, Any] | None = None
    after: tuple[str, ...] = ()
    arm: str | None = None
    seed: int = 0
    swap_from: Path | None = None
    swapped: tuple[str, ...] = EMBEDDING_AND_HEAD  # weights in which the stop tokens swap places

    @property
    def model(self) -> Path:
        return RunDirectory(self.directory).model

    def steps_done(self) -> int:
        """Steps that the run has finished, from the rows of its metrics.jsonl."""
        metrics = RunDirectory(self.directory).metrics
        if self.model.is_dir() or not metrics.is_file():
            return self.steps if self.model.is_dir() else 0
        return min(self.steps, metrics.read_bytes().count(b"\n"))


def demo_jobs(
    directory: Path, num_seeds: int = 1, arms: Mapping[str, dict[str, Any]] = ARMS
) -> list[Job]:
    """All runs below `directory` with seeds 0 .. num_seeds-1: each seed's models, then the arms."""
    models: list[Job] = []
    runs: list[Job] = []
    for seed in range(num_seeds):
        made = _models(directory / f"seed{seed}", seed)
        models += made.values()
        pair = made["student"], made["teacher_other_stop"]
        runs += [_arm(directory, arm, changes, *pair, seed) for arm, changes in arms.items()]
    return [*models, *runs]


def _models(directory: Path, seed: int) -> dict[str, Job]:
    teacher, student = (_supervised(directory, name, seed) for name in MODELS)
    other_stop = Job(
        name=f"seed{seed}/teacher_other_stop",
        directory=directory / "teacher_other_stop",
        after=(teacher.name,),
        seed=seed,
        swap_from=teacher.model,
    )
    return {job.directory.name: job for job in (teacher, student, other_stop)}


def _supervised(directory: Path, name: str, seed: int) -> Job:
    """Train a model of MODELS on fresh documents, each seen once, from random weights."""
    config = _settings("supervised", MODELS[name])
    steps, lr = config["train"]["steps"], config["optimizer"]["lr"]
    options = {"rows": steps * config["rollout"]["prompts_per_step"], "seed": 1000 + seed}
    changes = {
        "run": {"name": name, "directory": str(directory)},
        "student": {"architecture": {"vocab_size": len(VOCABULARY)}},
        "data": {"train": {"options": options}},
        "optimizer": {"min_lr": 0.05 * lr},
        "train": {"seed": seed},
    }
    return Job(
        name=f"{directory.name}/{name}",
        directory=directory / name,
        steps=steps,
        config=_settings("supervised", MODELS[name], changes),
        seed=seed,
    )


def _arm(
    directory: Path, arm: str, own: dict[str, Any], student: Job, teacher: Job, seed: int
) -> Job:
    home = directory / f"seed{seed}" / COLLAPSE
    changes = {
        "run": {"name": arm, "directory": str(home)},
        "student": {"path": str(student.model)},
        "teacher": {"path": str(teacher.model), "stop_token_ids": [VOCABULARY.index(SECOND_STOP)]},
        "data": {"train": {"options": {"seed": seed}}},
        "train": {"seed": seed},
    }
    config = _settings(COLLAPSE, changes, own)
    if arm == "sft":
        config["teacher"] = None
        del config["objective"]["stop_class"], config["aggregation"]
    return Job(
        name=f"seed{seed}/{COLLAPSE}/{arm}",
        directory=home / arm,
        steps=config["train"]["steps"],
        config=config,
        after=(student.name, teacher.name),
        arm=arm,
        seed=seed,
    )


def _settings(kind: str, *changes: dict[str, Any]) -> dict[str, Any]:
    """The settings of the runs of one kind, with the changes of one run."""
    shared = OmegaConf.load(Path(__file__).with_name(f"{kind}.yaml"))
    merged: Any = OmegaConf.to_container(OmegaConf.merge(shared, *changes))
    return merged
