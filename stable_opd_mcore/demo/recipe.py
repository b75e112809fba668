"""The demo's runs: the training of its teacher and student, and the arms.

All are settings of ordinary training runs, chained by the models that the runs write. The YAML
files in this directory hold what the runs of one kind share. The task is the arithmetic of
data/synthetic.py.

The student lacks some of the facts that the teacher knows, and golden solutions are few. Plain
distillation collapses here by construction: the teacher ends its responses with another stop token
and gives the student's almost no probability. The student learns the facts first, because it is
almost certain of its stop token. A response may be three times its normal length.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stable_opd_mcore.data.synthetic import SECOND_STOP, VOCABULARY
from stable_opd_mcore.host.run_directory import RunDirectory

UNKNOWN = 0.3  # share of facts of which the student has seen random results only


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
COLLAPSE = "collapse"  # the arms' directory in that of their seed, and their YAML file
CAPTION = (
    "The student lacks facts, and its stop token is not the teacher's. Plain OPD improves, then "
    "loses stopping. stable_opd has the KL to the initial student and the golden mixture, opd_kl "
    "and opd_mixture have one of them. sft trains only on the same few golden solutions. "
    "stop_class sums the probabilities of both stop tokens."
)


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

    @property
    def model(self) -> Path:
        return RunDirectory(self.directory).model

    def steps_done(self) -> int:
        """Steps that the run has finished, from the rows of its metrics.jsonl."""
        metrics = RunDirectory(self.directory).metrics
        if self.model.is_dir() or not metrics.is_file():
            return self.steps if self.model.is_dir() else 0
        return min(self.steps, metrics.read_bytes().count(b"\n"))


def demo_jobs(directory: Path, num_seeds: int = 1) -> list[Job]:
    """All runs below `directory` with seeds 0 .. num_seeds-1: the models, then the arms.

    Each seed has its own teacher and student.
    """
    models: list[Job] = []
    arms: list[Job] = []
    for seed in range(num_seeds):
        made = _models(directory / f"seed{seed}", seed)
        models += made.values()
        arms += [
            _arm(directory, arm, made["student"], made["teacher_other_stop"], seed) for arm in ARMS
        ]
    return [*models, *arms]


def _models(directory: Path, seed: int) -> dict[str, Job]:
    """The models of one seed: a teacher that knows all facts, and a student that lacks some."""
    knowing = {"recheck": [0.1]}
    teacher = _supervised(directory, "teacher", seed, TEACHER, 400, 3e-3, 64, knowing)
    lacking = knowing | {"unknown": UNKNOWN}
    student = _supervised(directory, "student", seed, STUDENT, 700, 5e-3, 64, lacking)
    other_stop = Job(
        name=f"seed{seed}/teacher_other_stop",
        directory=directory / "teacher_other_stop",
        after=(teacher.name,),
        seed=seed,
        swap_from=teacher.model,
    )
    return {job.directory.name: job for job in (teacher, student, other_stop)}


def _architecture(layers: int, hidden: int, heads: int, ffn: int, std: float) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 192,
        "vocab_size": len(VOCABULARY),
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "initializer_range": std,
    }


TEACHER = _architecture(layers=3, hidden=96, heads=6, ffn=256, std=0.1)
STUDENT = _architecture(layers=2, hidden=64, heads=4, ffn=128, std=0.12)


def _supervised(
    directory: Path,
    name: str,
    seed: int,
    architecture: dict[str, Any],
    steps: int,
    lr: float,
    batch: int,
    documents: dict[str, Any],
) -> Job:
    """Train on fresh documents, each seen once, from random weights."""
    options = {"rows": steps * batch, "seed": 1000 + seed, **documents}
    changes = {
        "run": {"name": name, "directory": str(directory)},
        "student": {"architecture": architecture},
        "data": {"train": {"options": options}},
        "rollout": {"prompts_per_step": batch},
        "optimizer": {"lr": lr, "min_lr": 0.05 * lr},
        "train": {"steps": steps, "seed": seed},
    }
    return Job(
        name=f"{directory.name}/{name}",
        directory=directory / name,
        steps=steps,
        config=_settings("supervised", changes),
        seed=seed,
    )


def _arm(directory: Path, arm: str, student: Job, teacher: Job, seed: int) -> Job:
    """One arm. Arms differ only in their settings in ARMS."""
    home = directory / f"seed{seed}" / COLLAPSE
    changes = {
        "run": {"name": arm, "directory": str(home)},
        "student": {"path": str(student.model)},
        "teacher": {"path": str(teacher.model), "stop_token_ids": [VOCABULARY.index(SECOND_STOP)]},
        "data": {"train": {"options": {"seed": seed}}},
        "train": {"seed": seed},
    }
    config = _settings(COLLAPSE, changes, ARMS[arm])
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
