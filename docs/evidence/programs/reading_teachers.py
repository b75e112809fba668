"""A student that reads teaches itself from what happened, on the demo's arithmetic
(../ring_teachers.md).

    python docs/evidence/programs/reading_teachers.py DIRECTORY [SEEDS]

The student is the demo's, but half of its documents begin with their own steps, so it learns to
read. Its missing facts have random results there too. Then all arms of each seed. Finished runs
are kept, so the same command continues. Prints the held-out accuracies of each run.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stable_opd_mcore.commands.demo import recipe
from stable_opd_mcore.data.synthetic import VOCABULARY, ArithmeticOptions, arithmetic_row

STEPS, READING = 60, 1200  # of an arm, and of the student's documents
HERE, DEMO = Path(__file__).resolve(), Path(recipe.__file__).parent
SELF = {"path": "self", "weights": "frozen"}
REWARDED = {"aggregation": "token_mean", "teacher": None, "objective": {"name": "grpo"}}


def self_taught(function: str) -> dict[str, Any]:
    return {"teacher": {**SELF, "prompt": {"function": f"{HERE}:{function}"}}}


ARMS: dict[str, dict[str, Any]] = {
    "golden": self_taught("golden"),
    "feedback": self_taught("feedback"),
    "sibling": self_taught("sibling"),
    "sibling_or_feedback": self_taught("sibling_or_feedback"),
    "grpo": REWARDED,
    "grpo_slow": {
        **REWARDED,
        "optimizer": {"lr": 2e-4, "schedule": "cosine", "warmup_steps": 20},
    },
}


def steps_of(text: str) -> list[str]:
    """ "2+1=3;w2+1=3;[3]" -> its steps without re-checks: ["2+1=3"]."""
    steps = text.split("[")[0].split(";")
    return [step for step in steps if step and not step.startswith("w")]


def reward(row: Mapping[str, Any], response: str) -> tuple[float, str]:
    """Whether the answer is right; the right steps up to the first that is wrong are feedback."""
    said = steps_of(response)
    right = steps_of(row["solution"])
    wrong = next((at for at, step in enumerate(right) if said[at : at + 1] != [step]), len(right))
    score = float(response.endswith(f"[{row['answer']}]"))
    return score, "".join(f"{step};" for step in right[: wrong + 1])


def with_note(row: Mapping[str, Any], note: str | None) -> str | None:
    return f"{note}_{row['problem']}" if note else None


def golden(row: Mapping[str, Any], rollout: Any, others: Sequence[Any]) -> str | None:
    return with_note(row, "".join(f"{step};" for step in steps_of(row["solution"])))


def feedback(row: Mapping[str, Any], rollout: Any, others: Sequence[Any]) -> str | None:
    return with_note(row, rollout.feedback)


def sibling(row: Mapping[str, Any], rollout: Any, others: Sequence[Any]) -> str | None:
    right = min((other.text for other in others if other.reward == 1), key=len, default="")
    return with_note(row, "".join(f"{step};" for step in steps_of(right)))


def sibling_or_feedback(row: Mapping[str, Any], rollout: Any, others: Sequence[Any]) -> str | None:
    return sibling(row, rollout, others) or feedback(row, rollout, others)


def rows_of(options: dict[str, Any], split: str, reads: bool) -> list[dict[str, Any]]:
    """Problems with solutions; with `reads`, half of them after their own steps."""
    parsed = ArithmeticOptions.model_validate(options)
    rows: list[dict[str, Any]] = []
    for index in range(parsed.rows):
        made = arithmetic_row(parsed, split, index)
        row = {"problem": made.problem, "answer": made.answer, "solution": made.solution}
        if reads and random.Random(f"{parsed.seed}/note/{index}").random() < 0.5:
            row["problem"] = golden(row, None, ()) or ""
        rows.append(row)
    return rows


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(kind: str, *changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = OmegaConf.merge(OmegaConf.load(DEMO / f"{kind}.yaml"), *changes)
    found: Any = OmegaConf.to_container(merged)
    return found


def student_run(home: Path, seed: int) -> dict[str, Any]:
    options = {"rows": 64 * READING, "seed": 1000 + seed, "unknown": 0.3, "recheck": [0.1]}
    changes = {
        "run": {"name": "student", "directory": str(home)},
        "student": {"architecture": {"vocab_size": len(VOCABULARY)}},
        "optimizer": {"min_lr": 0.05 * 5e-3},
        "train": {"seed": seed, "steps": READING},
    }
    config = settings("supervised", recipe.MODELS["student"], changes)
    config["data"]["train"] = {
        "path": written(home / "documents.jsonl", rows_of(options, "train", True))
    }
    return config


def arm_run(home: Path, name: str, seed: int) -> dict[str, Any]:
    problems = rows_of({"rows": 1024, "seed": seed}, "train", False)
    held_out = rows_of({"rows": 256, "seed": seed}, "test", False)
    changes = {
        "run": {"name": name, "directory": str(home)},
        "student": {"path": str(home / "student" / "model")},
        "objective": {"name": "gkd"},
        "reward": {"function": f"{HERE}:reward"},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4},
        "optimizer": {"lr": 1e-3, "schedule": "cosine"},
        "train": {"seed": seed, "steps": STEPS},
        "evaluation": {"every": STEPS // 2},
    }
    config: dict[str, Any] = settings("collapse", changes)
    config["data"] = {
        "train": {"path": written(home / "train.jsonl", problems)},
        "eval": {"path": written(home / "eval.jsonl", held_out)},
    }
    del config["objective"]["stop_class"]
    return config | ARMS[name]


def work(home: Path, name: str, seed: int) -> None:
    from stable_opd_mcore.commands.train.train import train
    from stable_opd_mcore.config.load import parse_config

    config = arm_run(home, name, seed) if name in ARMS else student_run(home, seed)
    train(parse_config(config, origin=str(HERE)), show_progress=False, accept_changes=True)


def table(directory: Path, seeds: int) -> None:
    """Accuracy before, halfway and at the end, sampled; and the end minus that of GRPO."""
    ends: dict[str, list[float]] = {}
    for name in ARMS:
        for seed in range(seeds):
            file = directory / f"seed{seed}" / name / "metrics.jsonl"
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            found = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
            print(f"{name:20} {seed}", *(f"{each:.3f}" for each in found))
            ends.setdefault(name, []).append(found[-1])
    for name, found in ends.items():
        gains = [end - other for end, other in zip(found, ends["grpo"], strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        print(f"{name:20} end minus grpo {statistics.mean(gains):.3f} +- {error:.3f}")


def main(directory: Path, seeds: int) -> None:
    for seed in range(seeds):
        home = directory / f"seed{seed}"
        for name in ("student", *ARMS):
            if (home / name / "model").is_dir():
                continue
            began, cpu = time.monotonic(), os.times()
            work(home, name, seed)
            spent = sum(os.times()[:4]) - sum(cpu[:4])
            print(
                f"{seed}/{name}: {time.monotonic() - began:.0f} s, {spent:.0f} s of CPU", flush=True
            )
    table(directory, seeds)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
