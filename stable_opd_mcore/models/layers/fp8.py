"""FP8 in the products of a model's layers: which models can have it, and Megatron's settings.

With Transformer Engine the products run in FP8, and a frozen model holds these weights in FP8.
Elsewhere the torch layers round their operands to FP8 and back (fp8_emulation.py). Both obey the
size rules of Transformer Engine's GEMMs, so that a laptop refuses what a cluster would.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.tensors import hf_shape, is_in_fp8, layer_parameters

# FP8 products need multiples of it in both widths of a matrix on one rank and in the tokens of a
# micro-batch. transformer_engine/pytorch/utils.py assert_dim_for_fp8_exec asks for 16 and 8,
# megatron/core/fp8_utils.py get_fp8_align_size for 16.
MULTIPLE = 16


def refuse_fp8(architecture: Architecture, fp8: Fp8, *, tensor: int, precision: str | None) -> None:
    """Raise a UserError if family, sizes or precision do not suit FP8; precision None: it is
    emulated."""
    if architecture.family.biases:
        raise UserError(
            f"{fp8.setting}: the experts of this {architecture.model_type} model have biases, with "
            f"which FP8 is not implemented; set fp8.{fp8.role}=null"
        )
    for entry in chain.from_iterable(
        layer_parameters(architecture, n) for n in architecture.kinds()
    ):
        if not is_in_fp8(entry, architecture):
            continue
        shapes = [hf_shape(name, architecture) for name in entry.hf_names]
        outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        if entry.layout == "columns":
            inputs //= tensor
        elif entry.is_cut:
            outputs //= tensor
        if outputs % MULTIPLE or inputs % MULTIPLE:
            raise UserError(
                f"{fp8.setting}: {' + '.join(entry.hf_names)} is {outputs} x {inputs} on a rank of "
                f"parallel.tensor={tensor}, and an FP8 product needs multiples of {MULTIPLE}: "
                f"choose a smaller parallel.tensor, or fp8.{fp8.role}=null"
            )
    if precision not in (None, "bf16"):
        raise UserError(
            f"{fp8.setting} with train.precision={precision}: on a GPU the attention between the "
            "FP8 products takes bf16; set train.precision=bf16"
        )


def refuse_fp8_on_device(fp8: Fp8) -> None:
    """Raise a UserError if Transformer Engine cannot run this recipe on this process's GPU."""
    found = torch.cuda.get_device_capability()
    needed = (9, 0) if fp8.recipe == "blockwise" else (8, 9)
    if found < needed:
        raise UserError(
            f"{fp8.setting}: this GPU has compute capability {found[0]}.{found[1]}, and the recipe "
            f"needs {needed[0]}.{needed[1]}; set fp8.{fp8.role}=null"
        )
    cuda = torch.version.cuda or "0.0"
    if fp8.recipe == "blockwise" and tuple(map(int, cuda.split(".")[:2])) < (12, 9):
        raise UserError(
            f"{fp8.setting}: torch is built for CUDA {cuda}, and the recipe needs 12.9; install a "
            f"newer torch, or set fp8.{fp8.role}=null"
        )


def megatron_settings(fp8: Fp8, *, trainable: bool) -> dict[str, Any]:
    """TransformerConfig's fields. `blockwise` is e4m3 throughout, as Transformer Engine defines it;
    the others round gradients to e5m2. Only a frozen model's weights are held in FP8.
    """
    return {
        "fp8": "e4m3" if fp8.recipe == "blockwise" else "hybrid",
        "fp8_recipe": fp8.recipe,
        "fp8_param": not trainable,
    }
