"""Tiny complete runs for tests: a Qwen2 student and a larger teacher of random weights, generated
problems.
"""

import json
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config

ALONE = {"teacher": None, "kl": {"beta": 0.0}, "mixture": {"lambda": 0.0}}  # sft and grpo need it
REWARDS = Path(__file__).with_name("rewards.py")
OBJECTIVES = {"rewarded": "grpo", "both": "grpo_opd", "taught": "gkd", "golden": "sft"}
WEIGHTS = {"rewarded": 2, "both": 1, "taught": 1.5, "golden": 0.5}
VOLATILE = ("time/", "throughput/", "memory/")  # what may differ between two identical runs


def tiny_architecture(hidden: int, layers: int, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "vocab_size": 27,  # odd, so that tensor parallelism pads it
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        **fields,
    }


def tiny_config(directory: Path, name: str, **sections: Any) -> Config:
    """A Stable-OPD run of a few seconds; `sections` are merged over the defaults, section by
    section.
    """
    values: dict[str, Any] = {
        "run": {"name": name, "directory": str(directory)},
        "student": {"architecture": tiny_architecture(32, 2)},
        "teacher": {"architecture": tiny_architecture(48, 2)},
        "tokenizer": {"path": "synthetic"},
        "data": {"train": {"path": "synthetic:arithmetic", "options": {"rows": 64}}},
        "sampling": {"max_new_tokens": 24},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 2},
        "kl": {"beta": 0.1},
        "mixture": {"lambda": 0.5},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "train": {"steps": 10, "micro_batch_tokens": 192},
        "checkpoint": {"every": 0},
        "evaluation": {"every": 0},
        "monitoring": {"tensorboard": False},
    }
    for section, fields in sections.items():
        values[section] = (
            {**values.get(section, {}), **fields} if isinstance(fields, dict) else fields
        )
    return parse_config(values, origin=name)


def objective_of_each_source() -> dict[str, Any]:
    """Sections of a run with OBJECTIVES, whose teacher reads another rollout or scores none."""
    sources = [
        {
            "path": "synthetic:arithmetic",
            "name": source,
            "weight": WEIGHTS[source],
            "options": {"rows": 32, "seed": number},
            "objective": {"name": objective},
            "reward": {"function": f"{REWARDS}:parity"},
        }
        for number, (source, objective) in enumerate(OBJECTIVES.items())
    ]
    return {
        "data": {"train": sources},
        "normaliser": "per_source",
        "rollout": {"prompts_per_step": 10, "samples_per_prompt": 3},
        "teacher": {"prompt": {"function": f"{REWARDS}:told"}},
    }


def problems(rows: int, held_out: int) -> dict[str, Any]:
    """The section `data`: generated problems, and others for evaluations."""
    path = "synthetic:arithmetic"
    return {
        "train": {"path": path, "options": {"rows": rows}},
        "eval": {"path": path, "split": "test", "options": {"rows": held_out}},
    }


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl without what may differ between identical runs."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows]
