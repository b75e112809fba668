"""Which package serves Adam and the norms, and an `apex` that is not NVIDIA's.

Megatron takes Adam from the first of Transformer Engine, NVIDIA's apex and torch that can be
imported. The norms are Transformer Engine's or torch's (models/spec.py). Nothing is
imported here: a package of the wrong kind may run anything at its import.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from stable_opd_mcore.commands.check.finding import Finding, finding

Provider = Literal["Transformer Engine", "apex", "torch"]


@dataclass(frozen=True)
class Software:
    """What is installed where this interpreter looks."""

    transformer_engine: bool
    apex: Path | None  # where a package of this name is
    apex_is_nvidias: bool  # it has the module that Megatron imports
    apex_is_built: bool  # has its CUDA extensions, without which its Adam refuses to work
    on_gpu: bool

    @property
    def norms(self) -> Provider:
        return "Transformer Engine" if self.on_gpu and self.transformer_engine else "torch"

    @property
    def adam(self) -> Provider:
        """Megatron's choice (megatron/core/optimizer/__init__.py); on a CPU it is torch's."""
        takes_apex = self.on_gpu and not self.transformer_engine and self.apex_is_nvidias
        return "apex" if takes_apex else self.norms

    def line(self) -> str:
        where = "on a GPU" if self.on_gpu else "on a CPU"
        return f"software {where}: Adam is {self.adam}'s, norms are {self.norms}'s"


def installed(on_gpu: bool) -> Software:
    """What sys.path holds, for a run with or without GPUs."""
    apex = _folder("apex")
    return Software(
        transformer_engine=_folder("transformer_engine") is not None,
        apex=apex,
        apex_is_nvidias=apex is not None and (apex / "optimizers" / "fused_adam.py").is_file(),
        apex_is_built=PathFinder.find_spec("amp_C") is not None,
        on_gpu=on_gpu,
    )


def apex(software: Software) -> Iterator[Finding]:
    """A package named apex that is not NVIDIA's, or NVIDIA's without its extensions."""
    if software.apex is not None and not software.apex_is_nvidias:
        yield finding("other-apex", folder=software.apex)
    elif software.adam == "apex" and not software.apex_is_built:
        yield finding("apex-without-extensions", folder=software.apex)


def unfused(software: Software) -> Iterator[Finding]:
    """A GPU without Transformer Engine."""
    if software.on_gpu and not software.transformer_engine:
        yield finding("no-transformer-engine", adam=software.adam, norms=software.norms)


def _folder(name: str) -> Path | None:
    spec = PathFinder.find_spec(name)
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    return next((Path(place) for place in places if place), None)
