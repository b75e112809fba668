"""The demo's runs: the training of its teacher and student, and the arms of its acts.

All are settings of ordinary training runs, chained by the models that the runs write; what the runs
of one kind share stands in the YAML files beside this one. The task is the arithmetic of
data/synthetic.py. Not here: running them (run.py), reading them (summary.py).

The student lacks a part of the facts that the teacher knows, and golden solutions are few. Plain
distillation collapses here by construction: the teacher ends its responses with another stop token
than the student and gives that of the student almost no probability. The student learns the facts
first, because it is almost certain of its stop token. A response may be three times its normal
length.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stable_opd_mcore.data.synthetic import SECOND_STOP, VOCABULARY
from stable_opd_mcore.monitoring.sinks import METRICS_FILE

MODEL = "model"  # directory of the trained student inside a run
UNKNOWN = 0.3  # share of facts of which the student has seen random results only


@dataclass(frozen=True)
class Act:
    """Arms that are compared with each other."""

    caption: str
    arms: dict[str, dict[str, Any]]  # settings in which each differs from plain OPD
    seeds: int  # how many unless the user says otherwise


COLLAPSE_ARMS: dict[str, dict[str, Any]] = {
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
TOP_K = 4  # of 24 tokens
OTHER_OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {
        "objective": {"name": "grpo"},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8},
        "data": {"train": {"options": {"rows": 1024}}},  # it would learn 32 answers by heart
        "optimizer": {"lr": 1.0e-4},
    },
    "lsm": {"objective": {"name": "lsm", "top_k": TOP_K}},
    "gkd": {"objective": {"name": "gkd"}},
    "student_topk": {"objective": {"name": "student_topk", "top_k": TOP_K}},
    "vopd": {"objective": {"name": "opd", "advantage": {"control_variate": True}}},
}
COLLAPSE = "collapse"  # the act of a demo for which the user names none
ACTS = {
    COLLAPSE: Act(
        "The student lacks facts, and has another stop token than the teacher. Plain OPD improves, "
        "then loses stopping. stable_opd has the KL to the initial student and the "
        "golden mixture, opd_kl and opd_mixture one of them. sft trains on the same few golden "
        "solutions only. stop_class sums the probabilities of both stop tokens.",
        COLLAPSE_ARMS,
        seeds=1,
    ),
    "ablation": Act(
        "The arms of collapse, and other objectives with the same models and problems.",
        COLLAPSE_ARMS | OTHER_OBJECTIVES,
        seeds=5,
    ),
}


@dataclass(frozen=True)
class Job:
    """One training run; with `swap_from`, a copy of a model that uses the other stop token."""

    name: str
    directory: Path
    steps: int = 0
    config: dict[str, Any] | None = None
    after: tuple[str, ...] = ()
    act: str | None = None
    arm: str | None = None
    seed: int = 0
    swap_from: Path | None = None

    @property
    def model(self) -> Path:
        return self.directory / MODEL

    def steps_done(self) -> int:
        """Steps that the run has finished, from the rows of its metrics.jsonl."""
        metrics = self.directory / METRICS_FILE
        if self.model.is_dir() or not metrics.is_file():
            return self.steps if self.model.is_dir() else 0
        return min(self.steps, metrics.read_bytes().count(b"\n"))


def demo_jobs(directory: Path, act: str, num_seeds: int | None = None) -> list[Job]:
    """All runs of an act. Each seed has its own teacher and student; acts share models and arms.

    Args:
        directory: of all runs.
        act: a name in ACTS.
        num_seeds: seeds 0 .. num_seeds-1; None: the act's number.
    """
    models: list[Job] = []
    arms: list[Job] = []
    for seed in range(num_seeds or ACTS[act].seeds):
        made = _models(directory / f"seed{seed}", seed)
        models += made.values()
        arms += [
            _arm(directory, act, arm, settings, made["student"], made["teacher_other_stop"], seed)
            for arm, settings in ACTS[act].arms.items()
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


def _arm(
    directory: Path,
    act: str,
    arm: str,
    settings: dict[str, Any],
    student: Job,
    teacher: Job,
    seed: int,
) -> Job:
    """One arm of an act. The arms of an act differ in `settings` only."""
    home = directory / f"seed{seed}" / COLLAPSE
    changes = {
        "run": {"name": arm, "directory": str(home)},
        "student": {"path": str(student.model)},
        "teacher": {"path": str(teacher.model), "stop_token_ids": [VOCABULARY.index(SECOND_STOP)]},
        "data": {"train": {"options": {"seed": seed}}},
        "train": {"seed": seed},
    }
    config = _settings(COLLAPSE, changes, settings)
    if arm in ("sft", "grpo"):
        config["teacher"] = None
        del config["objective"]["stop_class"]
    if arm == "sft":
        del config["aggregation"]
    return Job(
        name=f"seed{seed}/{COLLAPSE}/{arm}",
        directory=home / arm,
        steps=config["train"]["steps"],
        config=config,
        after=(student.name, teacher.name),
        act=act,
        arm=arm,
        seed=seed,
    )


def _settings(kind: str, *changes: dict[str, Any]) -> dict[str, Any]:
    """The settings of the runs of one kind, with the changes of one run."""
    shared = OmegaConf.load(Path(__file__).with_name(f"{kind}.yaml"))
    merged: Any = OmegaConf.to_container(OmegaConf.merge(shared, *changes))
    return merged
