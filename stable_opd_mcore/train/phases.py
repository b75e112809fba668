"""What each phase of a step needs on the device: `memory.offload` moves the rest to the host.

A step is rollout, score, update, publish; between steps come evaluation and checkpoints. Colocated
servers take the device inside a rollout (rollout/sglang/sglang_engine.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.parallel.device_memory import DeviceMemory, Part
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.train.student import Student

ROLLOUT = ("student",)  # an engine in the trainer needs it; colocated servers take even that
SCORE = ("student", "heads", "frozen")
UPDATE = ("student", "gradients", "optimizer", "heads")
FROZEN = ("heads", "frozen")
SAVE = ("student", "optimizer")
EXPORT = ("student",)


class TeacherInTurn(NamedTuple):
    """One of several teachers in the trainer, of which one at a time is on the device."""

    chunks: Sequence[HiddenStatesGPTModel]
    head: Head | None  # None off the last stage


_PARTS = {  # value of memory.offload -> parts
    "student": ("student",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "frozen": FROZEN,
}


def save_parts(config: Config) -> tuple[str, ...]:
    """What a checkpoint is written from, and read into."""
    return (*SAVE, *FROZEN) if config.frozen_models_move else SAVE


def device_memory(
    config: Config,
    world: World,
    student: Student,
    frozen: Sequence[Module],
    heads: Sequence[Head | None],
    in_turn: Mapping[str | None, TeacherInTurn],
) -> DeviceMemory:
    """The run's parts on this rank, of which those of `memory.offload` move, and teachers in turn.

    Args:
        frozen: model chunks of teacher and reference in the trainer.
        heads: their output heads, which the loss needs too.
        in_turn: each teacher where there are several. It and the lists above may be filled later.
    """
    content = "changes" if config.frozen_models_move else "constant"
    parts = [
        Part("student", lambda: _tensors(student.chunks)),
        Part("gradients", student.gradient_buffers, "scratch"),
        Part("optimizer", student.optimizer_tensors),
        Part("heads", lambda: [head.weight_VH for head in heads if head is not None], content),
        Part("frozen", lambda: _tensors(frozen), content),
    ]
    if config.teacher is not None and config.teacher.in_turn:
        for name in (None, *config.teacher.models):
            listed = zip(turn_of(name), (_head_in_turn, _rest_in_turn), strict=True)
            parts += [
                Part(part, partial(tensors, in_turn, name), "constant", takes_turns=True)
                for part, tensors in listed
            ]
    offloaded = [part for name in config.offloaded for part in _PARTS[name]]
    return DeviceMemory(parts, offloaded, world.device, config.memory.teachers_directory)


def turn_of(teacher: str | None) -> tuple[str, str]:
    """The parts of a teacher that take turns, by its key in teacher.models; None: teacher.path. The
    first is its head, which a loss over whole distributions needs after the scores."""
    return f"head of teacher {teacher or ''}", f"teacher {teacher or ''}"


def _head_in_turn(
    in_turn: Mapping[str | None, TeacherInTurn], teacher: str | None
) -> Iterator[Tensor]:
    if teacher in in_turn and (head := in_turn[teacher].head) is not None:
        yield head.weight_VH


def _rest_in_turn(
    in_turn: Mapping[str | None, TeacherInTurn], teacher: str | None
) -> Iterator[Tensor]:
    return _tensors(in_turn[teacher].chunks if teacher in in_turn else ())


def refuse_idle_offload(config: Config, frozen: Sequence[Module]) -> None:
    """Raise a ConfigError where `frozen` is to be offloaded and the run has no frozen model, or
    only teachers that wait on the host anyway."""
    if "frozen" in (config.memory.offload or ()) and not frozen:
        names = " and ".join(each.name for each in config.objectives)
        raise ConfigError(
            f"memory.offload names `frozen`, but objective.name={names} has no teacher or "
            "reference with weights of its own that stays in the trainer: leave it out"
        )


def _tensors(chunks: Sequence[Module]) -> Iterator[Tensor]:
    """Parameters, buffers, and the rotary tables that modules hold as plain attributes."""
    for chunk in chunks:
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            if hasattr(tensor, "get_data_tensors"):  # Transformer Engine's: without own storage
                held: Any = tensor
                yield from (data for data in held.get_data_tensors() if data is not None)
            else:
                yield tensor
        for module in chunk.modules():
            tables = [value for value in vars(module).values() if isinstance(value, Tensor)]
            # frequencies that share numpy's memory cannot move; they are a few bytes
            yield from (tensor for tensor in tables if tensor.untyped_storage().resizable())
