"""Convert weights between Hugging Face's and Megatron's form, on one process or a grid of ranks.

In bf16 where all weights are, else in fp32, which also holds fp16 exactly. A run's low-rank factors
are merged in the precision of its training.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from torch.nn import Module

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.tokenizer_backend import has_tokenizer
from stable_opd_mcore.data.vocabulary import read_vocabulary, same_vocabulary
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.host.atomic_files import require_new_directory
from stable_opd_mcore.inputs.loading import refuse_small_vocabulary
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.files.huggingface import export_hf, require_base, stored_dtypes
from stable_opd_mcore.models.files.megatron_checkpoint import is_megatron, save_weights
from stable_opd_mcore.models.files.peft_directory import is_adapter
from stable_opd_mcore.models.files.peft_loading import factor_dtypes, merge_adapter, merged_carried
from stable_opd_mcore.models.files.safetensors_files import Change
from stable_opd_mcore.models.files.small_files import copy_generation_settings, copy_tokenizer
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.persistence.checkpoint import merge_factors
from stable_opd_mcore.train.persistence.stored_models import (
    StoredModel,
    model_in,
    run_settings,
    weights_under,
)
from stable_opd_mcore.train.reference import read_weights


def convert(
    source: Path, target: Path, tensor: int = 1, pipeline: int = 1, tokenizer: Path | None = None
) -> str:
    """Write `source` in the other form to the new directory `target`; return what was done.

    An adapter that PEFT has saved and a run's checkpoint of low-rank factors become the merged
    model, in Hugging Face's form.

    Args:
        tokenizer: holds the tokenizer, the generation settings, and the tensors of other parts that
            the model has; None: `source`.

    Raises:
        UserError: `target` exists, cannot be made or is inside `source`, `source` is not a model
            directory, or there is no tokenizer, or `tokenizer` has other ids than the model.
    """
    require_new_directory(target)
    if not (source / "config.json").is_file() and not is_adapter(source) | is_megatron(source):
        raise UserError(
            f"{source}: no model, checkpoint or adapter, since it has no config.json and no "
            "adapter_config.json; give the directory of one: in that of a run, model/, adapter/ or "
            "one of checkpoints/"
        )
    if target.resolve().is_relative_to(source.resolve()):
        raise UserError(
            f"{target}: inside {source}, which would then hold two models; give a directory "
            "elsewhere"
        )
    model = model_in(source)
    under = weights_under(model)  # of the model itself, or of that under its low-rank factors
    if under["path"] is None:
        raise UserError(
            f"{source}: low-rank factors over random weights, which are in no file; give those of "
            "a run with student.path"
        )
    weights = Path(under["path"])
    own = source if has_tokenizer(source) else weights
    holder = tokenizer or own
    if not has_tokenizer(holder):
        raise UserError(
            f"{holder}: no tokenizer.json in it, so the converted model would have no tokenizer; "
            "name a directory that has it with --tokenizer"
        )
    architecture = read_architecture(
        weights, window=under.get("window"), rope_theta=under.get("rope_theta")
    )
    _refuse_other_ids(tokenizer, own, architecture)
    precision, rounded = _precision(model, weights, architecture)
    if is_megatron(weights):
        require_base(holder, architecture)
    world = start_world(ParallelConfig(tensor=tensor, pipeline=pipeline), seed=0)
    chunks = build_model(architecture, world, precision=precision, trainable=False, seed=None)

    def save_tokenizer(directory: Path) -> None:
        if not model.is_whole:  # an adapter's directory may lack the settings
            copy_generation_settings(weights, directory)
        copy_tokenizer(holder, directory)

    read_weights(chunks, str(weights))
    if not model.is_whole:
        change = _merge(chunks, source, weights, architecture)
        export_hf(chunks, target, base=weights, change=change, save_tokenizer=save_tokenizer)
        done = f"{source} merged into {weights}, in {precision}{rounded}"
    elif is_megatron(source):
        export_hf(chunks, target, base=holder, save_tokenizer=save_tokenizer)
        done = f"Megatron to Hugging Face, in {precision}"
    else:
        save_weights(chunks, target, save_tokenizer)
        done = f"Hugging Face to Megatron, in {precision}{rounded}"
    stop_world()
    return done


def _merge(
    chunks: Sequence[Module], source: Path, weights: Path, architecture: Architecture
) -> Change | None:
    """Merge low-rank factors; what becomes of the tensors that an export copies."""
    if is_adapter(source):
        merge_adapter(chunks, source)
        return merged_carried(source, weights, architecture)
    merge_factors(chunks, source)
    return None


def _refuse_other_ids(tokenizer: Path | None, own: Path, architecture: Architecture) -> None:
    """Raise a UserError if the given tokenizer has other ids than the model. `own` is the model's
    directory, which may have a tokenizer."""
    if tokenizer is None:
        return
    vocabulary = read_vocabulary(str(tokenizer))
    refuse_small_vocabulary(str(own), architecture, max(vocabulary.names_by_id) + 1, "--tokenizer")
    if not has_tokenizer(own):
        return
    with suppress(DataError):  # a broken tokenizer of the model is what --tokenizer replaces
        same_vocabulary(vocabulary, read_vocabulary(str(own)), "give the model's own --tokenizer")


def _precision(
    model: StoredModel, weights: Path, architecture: Architecture
) -> tuple[Literal["bf16", "fp32"], str]:
    """The precision to convert in, and what to say of rounding."""
    dtypes = stored_dtypes(weights, architecture)
    precision = "bf16" if dtypes == {"BF16"} else "fp32"
    if not model.is_whole and is_megatron(model.path):
        precision = run_settings(model.path)["train"]["precision"]
    kept = {"bf16": {"BF16"}, "fp32": {"BF16", "F16", "F32"}}[precision]
    lost = {"weights": dtypes - kept}
    if is_adapter(model.path):
        lost["factors"] = factor_dtypes(model.path) - kept
    said = [f", {what} rounded from {'/'.join(sorted(of))}" for what, of in lost.items() if of]
    return precision, "".join(said)
