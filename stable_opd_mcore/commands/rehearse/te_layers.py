"""Whether a model of Transformer Engine's layers has the parameters of the torch layers.

    line = compare_layers(config, gpus=64, ranks=[0, 32])

The torch layers are tested on a CPU; import, export, publish and checkpoints take parameters by
name and shape. A process of its own builds each model of a config with either kind of layers, for
the ranks of a fake world, with a pretended GPU (pretended_gpu.py). Nothing is computed.
"""

import dataclasses
import importlib.util
import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from stable_opd_mcore.commands.rehearse.fake_tensors import fake_tensors
from stable_opd_mcore.commands.rehearse.fake_world import fake_world
from stable_opd_mcore.commands.rehearse.replacing import replaced
from stable_opd_mcore.config.schema import Config, ModelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.loading import configured_architecture
from stable_opd_mcore.models import gpt, spec
from stable_opd_mcore.models.files.megatron_checkpoint import weights_of
from stable_opd_mcore.models.weights import described_parameters
from stable_opd_mcore.parallel.world import World

_CHILD = """
from stable_opd_mcore.commands.rehearse.pretended_gpu import pretend_gpu, skip_quantisation
pretend_gpu()
import transformer_engine.pytorch, transformer_engine_torch
skip_quantisation(transformer_engine_torch)
from stable_opd_mcore.commands.rehearse.te_layers import answer
answer()
"""
_NAME = "Transformer Engine's layers"

Facts = dict[str, tuple[Any, ...]]


def is_installed() -> bool:
    """Whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def compare_layers(config: Config, gpus: int, ranks: Sequence[int]) -> str:
    """Build every model of the config on `ranks` of `gpus`; which they were, as a line."""
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps((config, gpus, list(ranks))),
        capture_output=True,
        check=False,
    )
    if child.returncode:
        raise UserError(f"{_NAME} cannot be built here:\n{child.stderr[-4000:].decode()}")
    roles, differences = json.loads(child.stdout.splitlines()[-1])
    if differences:
        raise UserError(f"{_NAME} differ from the torch layers: {'; '.join(differences[:5])}")
    return f"{_NAME} of {', '.join(roles)}: built, with the parameters of torch's  ok"


def answer() -> None:
    """The separate process: read config and ranks, write roles and differences as JSON."""
    config, gpus, ranks = pickle.load(sys.stdin.buffer)
    differences: list[str] = []
    for rank in ranks:
        with fake_world(config.parallel, gpus, rank) as world, fake_tensors():
            world = dataclasses.replace(world, device=torch.device("cpu"))
            for role in _models(config):
                fused, plain = (facts(config, world, role, fused) for fused in (True, False))
                found = differing(fused, plain)
                differences += [f"{role}, rank {rank}: {text}" for text in found]
    print(json.dumps([list(_models(config)), differences]))


def _models(config: Config) -> dict[str, ModelConfig]:
    """The models that a run builds from these layers, by their role."""
    return {"student": config.student, "reference": config.student, **config.models_in_trainer}


def facts(config: Config, world: World, role: str, fused: bool) -> Facts:
    """Shapes, dtype and marks of every parameter and of every tensor in a checkpoint.

    `fused`: of Transformer Engine's layers where they are usable, else of torch's.
    """

    def on_the_cpu(*args: Any, **options: Any) -> Any:
        found = transformer_config(*args, **options)
        return dataclasses.replace(found, use_cpu_initialization=True)

    transformer_config, usable = gpt.transformer_config, spec.transformer_engine_is_usable
    choose = usable if fused else lambda: False
    with (
        replaced(gpt, transformer_config=on_the_cpu, transformer_engine_is_usable=choose),
        replaced(spec, transformer_engine_is_usable=choose),
    ):
        chunks = gpt.build_model(
            configured_architecture(_models(config)[role]),
            world,
            precision=config.train.precision,
            fp8=config.fp8.of(role) if fused else None,  # torch's emulation has these parameters
            trainable=role == "student",
            seed=None,
        )
    found: Facts = {}
    for _, weight, entry in described_parameters(chunks):
        marks = (
            getattr(weight, "tensor_model_parallel", False),
            getattr(weight, "partition_dim", -1),
            getattr(weight, "sequence_parallel", False),
            getattr(weight, "allreduce", True),  # False: an expert's
        )
        found[" + ".join(entry.hf_names)] = (tuple(weight.shape), str(weight.dtype), *marks)
    return found | _saved(weights_of(chunks))


def _saved(tree: Any) -> Facts:
    found: Facts = {}
    for item in nested_values(tree):
        parts = nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item]
        for part in parts:
            assert isinstance(part, ShardedTensor), f"{part}: weights_of gives only tensors"
            found[f"saved {part.key} at {part.global_offset}"] = (
                tuple(part.local_shape),
                tuple(part.global_shape),
                str(part.dtype),
                part.replica_id,
            )
    return found


def differing(fused: Facts, plain: Facts) -> list[str]:
    """A text for each name that only one has, or whose facts differ."""
    return [
        f"{name}: {fused.get(name, 'absent')}, with torch {plain.get(name, 'absent')}"
        for name in sorted(fused.keys() | plain.keys())
        if fused.get(name) != plain.get(name)
    ]
