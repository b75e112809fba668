"""Settings of earlier releases that are gone: what holds without them, and what to do instead.

A file that asks for what still holds is read as before, so that runs of earlier releases resume.
Any other value is refused by name. A row stays for one release.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from stable_opd_mcore.errors import ConfigError


@dataclass(frozen=True)
class Removed:
    # Values that are accepted: what now always holds, old defaults. None: all, without effect.
    still_hold: tuple[Any, ...] | None
    instead: str  # one sentence: what to do with any other value


def _constant(value: float, *harmless: float) -> Removed:
    """A setting that always has its former default. Others' files may have harmless values."""
    return Removed((value, *harmless), f"drop it: it is always {value:g}")


def _variable(name: str, default: Any) -> Removed:
    return Removed((default,), f"drop it, and set the environment variable {name}")


_BUDGET = "drop it: it follows from sampling.max_new_tokens"
_OWN_FILE = Removed(None, "drop it: a run compares the file with its own copy")
_ABLATION = "drop it: the last commit with this ablation is tagged before-lighter"
# Dotted keys; those in a list of sections have no index.
REMOVED: dict[str, Removed] = {
    "checkpoint.asynchronous": Removed((True, False), "drop it: training waits for each save"),
    "data.train.reward.sha256": _OWN_FILE,
    "data.train.reward.timeout_seconds": _constant(10),
    "evaluation.teacher_accuracy": Removed(
        (None,), "drop it: evaluate the teacher by `stable-opd evaluate` and compare"
    ),
    "fp8.keep_first_layers": Removed((0,), "drop it: all layers of a model in FP8 are in FP8"),
    "fp8.keep_last_layers": Removed((0,), "drop it: all layers of a model in FP8 are in FP8"),
    "guard.baseline": _constant(20),
    "guard.max_rollbacks": _constant(2),
    "guard.patience": _constant(10),
    "guard.relax_steps": Removed((50,), "drop it: beta and lambda stay as the guard raised them"),
    "guard.window": _constant(5),
    "monitoring.mlflow_experiment": _variable("MLFLOW_EXPERIMENT_NAME", "stable-opd"),
    "monitoring.overlap_every": _constant(10),
    "monitoring.repetition_ratio": Removed((10, 2), _BUDGET),  # 2: the demo's
    "monitoring.repetition_tail_characters": Removed((None, 64), _BUDGET),
    "monitoring.sample_every": _constant(20, 0),
    "monitoring.token_values": _constant(8, 0),
    "monitoring.wandb_entity": _variable("WANDB_ENTITY", None),
    "monitoring.wandb_project": _variable("WANDB_PROJECT", "stable-opd"),
    "monitoring.wandb_tags": _variable("WANDB_TAGS", []),
    "objective.advantage.constant": Removed((None,), _ABLATION),
    "objective.position_half_life": Removed((None,), _ABLATION),
    "objective.sha256": _OWN_FILE,
    "optimizer.beta1": _constant(0.9),
    "optimizer.distributed": Removed((True,), "drop it: the optimizer's state is always sharded"),
    "optimizer.eps": _constant(1e-8),
    "reward.sha256": _OWN_FILE,
    "reward.timeout_seconds": _constant(10),
    "rollout.order": Removed(
        ("submitted",),
        "drop it: steps train on the prompts in the data's order; for rollouts as fresh, set "
        "rollout.partial=true and lower rollout.max_staleness by 1",
    ),
    "rollout.sglang.bucket_mib": _constant(512),
    "rollout.sglang.dtype": Removed((None,), "drop it: servers compute in train.precision"),
    "rollout.sglang.first_gpu": Removed((None, 1), "drop it, and set CUDA_VISIBLE_DEVICES"),
    "rollout.sglang.health_interval_seconds": _constant(10),
    "rollout.sglang.max_restarts": _constant(3),
    "rollout.sglang.request_timeout_seconds": _constant(1800),
    # The accepted limits are shorter than what always holds.
    "rollout.sglang.startup_timeout_seconds": _constant(1800, 600, 1200),
    "rollout.sglang.sync_host": Removed((None,), "drop it: the address is found from the routes"),
    "rollout.sglang.sync_timeout_seconds": _constant(600),
    "teacher.request_timeout_seconds": _constant(600),
    "train.loss_block_tokens": _constant(1024, 256),  # 256: configs/gsm8k_cpu.yaml until then
    "train.moe_aux_loss_coeff": Removed(
        (0.0,), "drop it: balancing a student's experts left its KL to the teacher as it was"
    ),
}


def without_removed(
    values: Any, origin: str, overrides: Sequence[str] = (), free: Sequence[str] = ()
) -> Any:
    """A copy of the config's values without the settings that are gone.

    Args:
        free: keys and sections whose values do not count; none of their keys is refused.

    Raises:
        ConfigError: keys that are gone ask for what no longer exists; the message names each, with
            the override that set it or `origin`.
    """
    values = deepcopy(values)
    refused: list[str] = []
    for key, removed in REMOVED.items():
        *path, name = key.split(".")
        for section in _sections(values, path):
            if name not in section:
                continue
            value = section.pop(name)
            if removed.still_hold is None or is_in(key, free):
                continue
            if value not in removed.still_hold:
                given = [item for item in overrides if item.partition("=")[0] == key]
                where = f"override {given[-1]!r:.200}" if given else origin
                refused.append(f"{where}: {key}={value!r:.200} is gone; {removed.instead}")
    if refused:
        raise ConfigError("\n".join(refused))
    return values


def is_in(key: str, keys: Sequence[str]) -> bool:
    """Whether a setting is one of the keys or in a section among them."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _sections(values: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """All sections at a path of keys; a list on the way stands for each of its entries."""
    if isinstance(values, list):
        for entry in cast("list[Any]", values):
            yield from _sections(entry, path)
    elif isinstance(values, Mapping):
        section = cast("dict[str, Any]", values)
        if not path:
            yield section
        elif path[0] in section:
            yield from _sections(section[path[0]], path[1:])
