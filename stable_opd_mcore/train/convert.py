"""Convert weights between Hugging Face's and Megatron's form, on one process or a grid of ranks.

In bf16 where all weights are, else in fp32, which also holds fp16 exactly.
"""

from functools import partial
from pathlib import Path

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import require_new_directory
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.huggingface import (
    export_hf,
    load_hf,
    require_base,
    stored_dtypes,
)
from stable_opd_mcore.models.megatron_checkpoint import is_megatron, load_weights, save_weights
from stable_opd_mcore.models.peft_directory import base_of, is_adapter, merge_adapter
from stable_opd_mcore.models.small_files import copy_tokenizer
from stable_opd_mcore.parallel.world import start_world, stop_world


def convert(
    source: Path, target: Path, tensor: int = 1, pipeline: int = 1, tokenizer: Path | None = None
) -> str:
    """Write `source` in the other form to the new directory `target`; return what was done.

    An adapter that PEFT has saved becomes the merged model, in Hugging Face's form.

    Args:
        tokenizer: holds the tokenizer, the generation settings, and the tensors of other parts that
            the model has; None: `source`.

    Raises:
        UserError: `target` exists or cannot be made, `source` is not a model directory, or there is
            no tokenizer.
    """
    require_new_directory(target)
    if not source.is_dir():
        raise UserError(
            f"{source}: not a directory; give that of a model, with config.json, or of a checkpoint"
        )
    adapter = source if is_adapter(source) else None
    if adapter is not None:
        source = base_of(adapter)
    holder = tokenizer or source
    if not (holder / "tokenizer.json").is_file():
        raise UserError(
            f"{holder}: no tokenizer.json in it, so the converted model would have no tokenizer; "
            "name a directory that has it with --tokenizer"
        )
    architecture = read_architecture(source)
    dtype = architecture.source.get("dtype") or architecture.source.get("torch_dtype")
    # In Hugging Face's form the files decide: config.json may name a type that they do not have.
    dtypes = {dtype} if is_megatron(source) else stored_dtypes(source, architecture)
    precision = "bf16" if dtypes <= {"bfloat16", "BF16"} else "fp32"
    if is_megatron(source):
        require_base(holder, architecture)
    world = start_world(ParallelConfig(tensor=tensor, pipeline=pipeline), seed=0)
    chunks = build_model(architecture, world, precision=precision, trainable=False, seed=None)
    save_tokenizer = partial(copy_tokenizer, holder)
    if is_megatron(source):
        load_weights(chunks, source)
    else:
        load_hf(chunks, source)
    if adapter is not None:
        merge_adapter(chunks, adapter)
        export_hf(chunks, target, base=source, save_tokenizer=save_tokenizer)
        done = f"{adapter} merged into {source}, in {precision}"
    elif is_megatron(source):
        export_hf(chunks, target, base=holder, save_tokenizer=save_tokenizer)
        done = f"Megatron to Hugging Face, in {precision}"
    else:
        save_weights(chunks, target, save_tokenizer)
        rounded = ", fp64 weights rounded to fp32" if "F64" in dtypes else ""
        done = f"Hugging Face to Megatron, in {precision}{rounded}"
    stop_world()
    return done
