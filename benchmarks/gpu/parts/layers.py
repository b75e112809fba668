"""Compare Transformer Engine's layers with torch's: logits and gradients of one Stable-OPD step.

torch's layers in fp32 are the definition. In bf16 Transformer Engine must be about as close to it
as torch's layers in bf16 are. In fp32 its products are in TF32, and it must agree as closely as
TF32 allows.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec

from benchmarks.gpu.inputs import write_inputs
from benchmarks.gpu.one_step import StepRecord, relative_error, relative_errors, take_steps
from benchmarks.gpu.part import Options
from benchmarks.gpu.parts.step import TINY_VOCAB, VOCAB, replaying, step_config
from benchmarks.gpu.record import Record
from stable_opd_mcore.inputs.loading import configured_architecture

BF16_LIMIT = 0.2  # limit for torch's own layers; an error this large is not rounding
TIMES_TORCH, ADDED = 1.5, 2e-3  # how far beyond torch's bf16 error
TF32_ROUNDING = 2.0**-11  # relative error of an operand: TF32 has 10 bits of mantissa
# No ratio is clipped: rounding may move a token over the bound, and its gradient would be gone.
UNCLIPPED = {"objective": {"clip": 1e3}}
PRODUCTS_OF_A_LAYER = 4  # one after another: queries, keys and values; output; two of the MLP


def run(record: Record, options: Options) -> None:
    folder, environment = options.scratch, dict(os.environ)
    write_inputs(folder, VOCAB if options.on_gpu else TINY_VOCAB, prompts=8, solution_words=24)
    plain = step_config(options, "torch_fp32", **UNCLIPPED)
    replay = UNCLIPPED | replaying(folder / "torch_fp32")
    bf16 = {"train": {"precision": "bf16"}, **replay}
    rounded = step_config(options, "torch_bf16", **bf16)
    expected, torch_bf16 = take_steps("torch", folder, [plain, rounded], environment)
    allowed = {}
    for name, error in errors(torch_bf16, expected).items():
        record.check(f"torch, bf16: {name}", error, BF16_LIMIT)
        allowed[name] = TIMES_TORCH * error + ADDED

    if not options.on_gpu or find_spec("transformer_engine") is None:
        record.skip("Transformer Engine's layers", "need the package and CUDA")
        return
    (found,) = take_steps(
        "installed", folder, [step_config(options, "te_bf16", **bf16)], environment
    )
    for name, error in errors(found, expected).items():
        record.check(f"Transformer Engine, bf16: {name}", error, allowed[name])
    (found,) = take_steps(
        "installed", folder, [step_config(options, "te_fp32", **replay)], environment
    )
    limit = tf32_limit(configured_architecture(plain.student).num_layers)
    for name, error in errors(found, expected).items():
        record.check(f"Transformer Engine, fp32: {name}", error, limit, note="TF32's rounding")


def tf32_limit(layers: int) -> float:
    """The relative error of a gradient whose products round both operands to TF32.

    It passes through every product forward and backward; their errors are independent, so their
    squares add up.
    """
    return TF32_ROUNDING * math.sqrt(2 * 2 * PRODUCTS_OF_A_LAYER * layers)


def errors(found: StepRecord, expected: StepRecord) -> dict[str, float]:
    whole, _ = relative_errors(found.gradients, expected.gradients)
    return {"logits": relative_error(found.logits_NV, expected.logits_NV), "gradients": whole}
