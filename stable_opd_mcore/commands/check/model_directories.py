"""Models that a run reads: config.json, and the names, shapes and types of their weights."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from os import SEEK_END
from pathlib import Path
from typing import Any

from stable_opd_mcore.commands.check.finding import Finding, finding
from stable_opd_mcore.config.cold_start import cold_start_config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.tokenizer_backend import has_tokenizer
from stable_opd_mcore.data.vocabulary import read_vocabulary, same_vocabulary
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.inputs.pair import EXAMPLE, ModelFiles
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.description.families import FAMILIES
from stable_opd_mcore.models.description.unread_settings import unread_settings

_END_BYTES = 65536
_MAY_DIFFER = {"max_positions", "tied", "initializer_range"}  # between student and reference
_MANY_ROWS = 8  # rows of a head that are enough to tell what rows without a token look like


def of_directory(model: ModelFiles) -> Iterator[Finding]:
    """What `train` refuses or does not read of a model's directory, where there is no config. A
    teacher's family may be another, because servers can hold it."""
    if not model.settings or (
        model.role == "teacher" and model.settings.get("model_type") not in FAMILIES
    ):
        return
    architecture = read_architecture(model.place)
    yield from _not_implemented(model.role, unread_settings(architecture.source))
    if any(Path(model.place).glob("*.safetensors*")) or (Path(model.place) / ".metadata").is_file():
        yield from _weights_of(model.place, architecture)


def settings_of_models(inputs: RunInputs) -> Iterator[Finding]:
    """A config.json that `train` refuses, or that asks for something that is not computed."""
    for role, (_, architecture) in inputs.models.items():
        yield from _not_implemented(role, unread_settings(architecture.source))


def reference_settings(inputs: RunInputs) -> Iterator[Finding]:
    """A reference that is not of the student's architecture and vocabulary, as which it is
    computed. Its window may differ, and the head's tie, which its weights show.
    """
    path, own = inputs.config.reference.path, inputs.reference_architecture
    if path is None or own is None:
        return
    names = [each.name for each in fields(own) if each.compare and each.name not in _MAY_DIFFER]
    values = {name: (getattr(own, name), getattr(inputs.architecture, name)) for name in names}
    if other := {name: pair for name, pair in values.items() if pair[0] != pair[1]}:
        said = ", ".join(f"{name}={a!r} (the student has {b!r})" for name, (a, b) in other.items())
        raise UserError(
            f"{Path(path) / 'config.json'}: {said}; expected the student's architecture, as which "
            "the reference is computed: set reference.path to a model of it, or correct the file"
        )
    yield from _not_implemented("reference", unread_settings(own.source))
    if has_tokenizer(path):
        vocabulary = read_vocabulary(path)
        renamed = same_vocabulary(
            inputs.tokenizer, vocabulary, "set reference.path to a model of it"
        )
        both = [each for each in renamed if each.first is not None and each.second is not None]
        for each in both[:1]:
            yield finding("reference-token", id=each.token_id, student=each.first, own=each.second)


def _not_implemented(
    role: str, found: Mapping[str, Any], file: str = "config.json"
) -> Iterator[Finding]:
    if found:
        values = ", ".join(f"{key}={value!r:.60}" for key, value in found.items())
        yield finding("unread-settings", file=file, role=role, values=values)


def same_weights(inputs: RunInputs) -> Iterator[Finding]:
    """A teacher with the student's weights and prompt; no whole file is read."""
    config = inputs.config
    teacher, student = config.teacher, config.student.path
    used = {config.teacher_of(each) for each in config.data.sources if config.asks_teacher(each)}
    if teacher is None or teacher.prompt is not None or None not in used:
        return
    lora = inputs.config.student.lora
    starts_elsewhere = lora is not None and lora.path is not None  # the student's start has factors
    if teacher.is_self or (
        student
        and teacher.path
        and not starts_elsewhere
        and _ends(student) == _ends(teacher.path) != {}
    ):
        yield finding("same-weights", student=student, teacher=teacher.path)


def _ends(directory: str) -> dict[str, tuple[int, bytes]]:
    """Size and last values of each file of weights."""
    ends: dict[str, tuple[int, bytes]] = {}
    for path in chain(*map(Path(directory).glob, ("*.safetensors", "*.distcp"))):
        with path.open("rb") as file:
            size = file.seek(0, SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            ends[path.name] = size, file.read()
    return ends


def adapter(inputs: RunInputs) -> Iterator[Finding]:
    """An adapter to start from that `train` refuses, or whose settings are not all read."""
    config = inputs.config
    if config.cold_start is not None and cold_start_config(config).run.files.model.is_dir():
        return  # the adapter is merged into that model
    lora = config.student.lora
    if lora is not None and lora.path is not None:
        from stable_opd_mcore.models.files import peft_directory, peft_loading
        from stable_opd_mcore.models.files.safetensors_files import weight_files

        peft_loading.check_adapter(Path(lora.path), inputs.architecture, lora)
        found = peft_directory.unread_settings(Path(lora.path))
        yield from _not_implemented("adapter", found, peft_directory.CONFIG)
        unread = weight_files(Path(lora.path)) - {peft_directory.WEIGHTS}
        yield from _unread(lora.path, unread, peft_directory.WEIGHTS)
        yield from _own_tokenizer(inputs, lora.path)
        base = peft_directory.named_base(Path(lora.path))
        if base and config.student.path and Path(base).name != Path(config.student.path).name:
            yield finding("other-base", path=lora.path, base=base, student=config.student.path)


def adapters_of_teachers(inputs: RunInputs) -> None:
    """Teachers that are adapters of the teacher's own model, which `train` may refuse."""
    teacher = inputs.config.teacher
    if teacher is not None and inputs.teacher_architecture is not None:
        from stable_opd_mcore.models.files.peft_loading import adapter_form

        for name, directory in teacher.adapters.items():
            adapter_form(directory, inputs.teacher_architecture, name)


def _own_tokenizer(inputs: RunInputs, path: str) -> Iterator[Finding]:
    """An adapter's tokenizer with another chat template, or other stop ids, than is used."""
    if not has_tokenizer(path):
        return
    try:
        own = Tokenizer.load(path, inputs.config.student.stop_token_ids)
    except DataError:  # nothing else reads it
        return
    used = inputs.tokenizer.with_template_kwargs({})
    same_vocabulary(used, own, "give an adapter of this model")
    fields = {"path": path, "place": used.path}
    texts = [each.render_prompt(EXAMPLE) for each in (own, used)]
    if own.has_template and texts[0] != texts[1]:
        shown = {"own": repr(texts[0]), "used": repr(texts[1])}
        yield finding("own-tokenizer", what="chat template", **shown, **fields)
    if not set(own.stop_token_ids) <= set(used.stop_token_ids):
        ids = {"own": own.stop_token_ids, "used": used.stop_token_ids}
        yield finding("own-tokenizer", what="stop token", **ids, **fields)


def _unread(path: str, files: Collection[str], read: str) -> Iterator[Finding]:
    if files:
        yield finding("unread-weights", path=path, files=", ".join(sorted(files)), read=read)


def untrained_stops(inputs: RunInputs) -> Iterator[Finding]:
    """Stop tokens that low-rank factors cannot teach: in the frozen head, their rows are as close
    to the mean of the rows without a token as those rows are themselves."""
    config, architecture = inputs.config, inputs.architecture
    path, used = config.student.path, inputs.tokenizer.vocab_size
    if config.student.lora is None or path is None or architecture.vocab_size - used < _MANY_ROWS:
        return
    from stable_opd_mcore.models.files.huggingface import read_head  # as in `_weights_of`
    from stable_opd_mcore.models.files.megatron_checkpoint import is_megatron

    if is_megatron(path):
        return
    stops = inputs.tokenizer.stop_token_ids
    ranges = [slice(used, architecture.vocab_size), *(slice(each, each + 1) for each in stops)]
    unused_UH, *stop_rows_1H = (rows.float() for rows in read_head(path, architecture, ranges))
    mean_H = unused_UH.mean(dim=0)
    farthest = (unused_UH - mean_H).norm(dim=1).max()
    named = zip(stops, stop_rows_1H, strict=True)
    found = tuple(token for token, row_1H in named if (row_1H - mean_H).norm() <= farthest)
    if found:
        student = inputs.pair.student
        yield finding(
            "untrained-stops",
            found=student.named_all(found),
            stops=student.named_all(student.stop_ids),
        )


def weights(inputs: RunInputs) -> Iterator[Finding]:
    """Files that `train` refuses when it loads a model, and files of weights that it passes over;
    few values are read.
    """
    config, models = inputs.config, inputs.models.values()
    places = [(settings.path, model) for settings, model in models]
    if config.largest_beta:
        places.append((config.reference.path, inputs.architecture))
    read = [(path, built) for path, built in places if path is not None]
    for path, architecture in read:
        yield from _weights_of(path, architecture)


def _weights_of(path: str, architecture: Architecture) -> Iterator[Finding]:
    # imports Megatron, which takes seconds
    from stable_opd_mcore.models.files.huggingface import check_hf
    from stable_opd_mcore.models.files.manifest import MANIFEST, listed_files
    from stable_opd_mcore.models.files.megatron_checkpoint import (
        is_megatron,
        refuse_factors,
        require_manifest,
    )
    from stable_opd_mcore.models.files.safetensors_files import SINGLE, weight_files

    if is_megatron(path):
        require_manifest(path)
        refuse_factors(path)
        unread = weight_files(Path(path)) - listed_files(Path(path))
        yield from _unread(path, unread, f"the files that {MANIFEST} lists")
    else:
        read = f"the tensors of {SINGLE} or its index"
        yield from _unread(path, check_hf(path, architecture), read)
