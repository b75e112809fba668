"""The demo's runs: the training of its teacher and student, and the arms of its two acts.

All are settings of ordinary training runs, chained by the models that the runs write. The task is
the arithmetic of data/synthetic.py. Not here: running them (run.py), reading them (summary.py).

Plain distillation collapses here by construction. The teacher seldom starts to repeat a step, but
once it has started, it almost surely continues. A response may be six times its normal length. The
loss is a mean over tokens, so long responses have more weight. The learning rate is high.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stable_opd_mcore.data.synthetic import SECOND_STOP, VOCABULARY
from stable_opd_mcore.monitoring.sinks import METRICS_FILE

MODEL = "model"  # directory of the trained student inside a run
MAX_NEW_TOKENS = 160
WINDOW = 172  # the longest prompt and MAX_NEW_TOKENS
STOP_MAX_NEW_TOKENS = 80  # three times the normal length

CAPTIONS = {
    "collapse": "The teacher is almost certain inside loops. Plain OPD improves, then collapses. "
    "The KL to the initial student, the golden mixture, or both prevent it. "
    "sft trains on golden solutions only.",
    "stop_mismatch": "Student and teacher use different stop tokens. Plain OPD improves, then the "
    "student no longer stops. With the stop tokens of both summed (opd_stop_class) it stops.",
}
COLLAPSE_ARMS: dict[str, dict[str, Any]] = {
    "opd": {},
    "opd_kl": {"kl": {"beta": 1.0}},
    "opd_mixture": {"mixture": {"lambda": 1.0}},
    "stable_opd": {"kl": {"beta": 1.0}, "mixture": {"lambda": 1.0}},
    "sft": {"objective": {"name": "sft"}},
}
STOP_ARMS: dict[str, dict[str, Any]] = {
    "opd": {"objective": {"name": "opd", "stop_class": False}},
    "opd_stop_class": {"objective": {"name": "opd", "stop_class": True}},
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


def demo_jobs(directory: Path, seeds: Iterable[int]) -> list[Job]:
    """All runs of the demo. Each seed has its own teacher and student."""
    models: list[Job] = []
    arms: list[Job] = []
    for seed in seeds:
        made = _models(directory / f"seed{seed}", seed)
        models += made.values()
        student, loops, other_stop = made["student"], made["teacher"], made["teacher_other_stop"]
        arms += [
            _arm(directory, "collapse", name, settings, student, loops, seed)
            for name, settings in COLLAPSE_ARMS.items()
        ]
        arms += [
            _arm(directory, "stop_mismatch", name, settings, student, other_stop, seed)
            for name, settings in STOP_ARMS.items()
        ]
    return models + arms


def _models(directory: Path, seed: int) -> dict[str, Job]:
    """The models of one seed: each is trained on the task, then on documents with its weakness."""
    clean_teacher = _supervised(
        directory,
        "teacher_clean",
        seed,
        TEACHER,
        {"steps": 400, "lr": 3e-3, "batch": 64},
        {"recheck": [0.1], "error_rate": 0.03},
    )
    teacher = _supervised(
        directory,
        "teacher",
        seed,
        clean_teacher,
        {"steps": 200, "lr": 1.5e-3, "batch": 48},
        {
            "recheck": [0.25, 0.6, 0.97, 0.995, 0.999],
            "error_rate": 0.03,
            "loop": 0.25,
            "junk": 0.06,
            "loop_repeats": 2,
            "window": WINDOW,
        },
    )
    clean_student = _supervised(
        directory,
        "student_clean",
        seed,
        STUDENT,
        {"steps": 400, "lr": 5e-3, "batch": 64},
        {"recheck": [0.1]},
    )
    student = _supervised(
        directory,
        "student",
        seed,
        clean_student,
        {"steps": 100, "lr": 1e-3, "batch": 64},
        {"recheck": [0.1], "error_rate": 0.45},
    )
    other_stop = Job(
        name=f"seed{seed}/teacher_other_stop",
        directory=directory / "teacher_other_stop",
        after=(clean_teacher.name,),
        seed=seed,
        swap_from=clean_teacher.model,
    )
    made = (clean_teacher, clean_student, student, teacher, other_stop)
    return {job.directory.name: job for job in made}


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
    start: dict[str, Any] | Job,
    training: dict[str, Any],
    documents: dict[str, Any],
) -> Job:
    """Train on fresh documents, each seen once, from random weights or from another job's model."""
    steps, batch = training["steps"], training["batch"]
    begin = {"path": str(start.model)} if isinstance(start, Job) else {"architecture": start}
    config = {
        "run": {"name": name, "directory": str(directory)},
        "student": begin,
        "tokenizer": {"path": "synthetic"},
        "data": {
            "train": {
                "path": "synthetic:arithmetic",
                "options": {"rows": steps * batch, "seed": 1000 + seed, **documents},
            }
        },
        "objective": {"name": "sft"},
        "rollout": {"prompts_per_step": batch},
        "optimizer": {
            "lr": training["lr"],
            "min_lr": 0.05 * training["lr"],
            "schedule": "cosine",
            "warmup_steps": 30,
            "beta2": 0.98,
        },
        "train": {"steps": steps, "seed": seed},
        "checkpoint": {"every": 0},
        "evaluation": {"every": 0},
        "monitoring": {"tensorboard": False},
    }
    return Job(
        name=f"{directory.name}/{name}",
        directory=directory / name,
        steps=steps,
        config=config,
        after=(start.name,) if isinstance(start, Job) else (),
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
    collapse = act == "collapse"
    home = directory / f"seed{seed}" / act
    problems = {"path": "synthetic:arithmetic", "options": {"rows": 1024, "seed": seed}}
    config: dict[str, Any] = {
        "run": {"name": arm, "directory": str(home)},
        "student": {"path": str(student.model)},
        "teacher": {
            "path": str(teacher.model),
            "stop_token_ids": None if collapse else [VOCABULARY.index(SECOND_STOP)],
        },
        "tokenizer": {"path": "synthetic"},
        "data": {
            "train": {**problems, "options": {**problems["options"], "recheck": [0.1]}},
            "eval": {**problems, "split": "test", "options": {"rows": 256}},
        },
        "sampling": {"max_new_tokens": MAX_NEW_TOKENS if collapse else STOP_MAX_NEW_TOKENS},
        "rollout": {"prompts_per_step": 16 if collapse else 32, "samples_per_prompt": 1},
        "objective": {"name": "opd"},
        "aggregation": "token_mean",
        "optimizer": {
            "lr": 2e-3 if collapse else 1e-3,
            "warmup_steps": 60 if collapse else 20,
        },
        "train": {"steps": 150 if collapse else 250, "seed": seed},
        "checkpoint": {"every": 0},
        "evaluation": {"every": 10, "temperature": 1.0, "also_greedy": True},
        "monitoring": {
            "tensorboard": False,
            "repetition_tail_characters": 64,
            "repetition_ratio": 2.0,
        },
        **settings,
    }
    if arm == "sft":
        config["teacher"] = None
        del config["aggregation"]
    return Job(
        name=f"seed{seed}/{act}/{arm}",
        directory=home / arm,
        steps=config["train"]["steps"],
        config=config,
        after=(student.name, teacher.name),
        act=act,
        arm=arm,
        seed=seed,
    )
