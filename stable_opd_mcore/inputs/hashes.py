"""What a run reads again after its first start: data, tokenizer, weights of teacher and reference,
own code, and the base model where an export copies tensors from it.

`train` stores sizes and hashes of these files in the run directory, and a copy of the user's own
code; `train` and `check` compare them when the run is resumed. A file of up to 64 MiB is hashed
whole; of a larger one, 64 pieces of 64 KiB, evenly spaced, so a change between them is not seen.
Times are not compared: a copy has others.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from stable_opd_mcore.config.data import RewardConfig
from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.tokenizer_backend import is_tokenizer_file
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.json_files import read_json_object
from stable_opd_mcore.host.user_code import UserFunction, is_user_function
from stable_opd_mcore.inputs.loading import configured_architecture

_WHOLE_BYTES = 64 * 2**20
_PIECES, _PIECE_BYTES = 64, 64 * 2**10


def inputs_of(config: Config) -> dict[str, dict[str, Any]]:
    """The path of each setting, and size and hash of each file there.

    Hub ids are left out: their commit is itself a setting.
    """
    found: dict[str, dict[str, Any]] = {}
    places = dict(_places(config))
    tokenizer = config.tokenizer.path or config.student.path
    if tokenizer is not None and tokenizer not in places.values():
        places["tokenizer"] = tokenizer
    for key, place in places.items():
        path = Path(place)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [each for each in files if each.is_file() and not each.name.startswith(".")]
        if key == "tokenizer":  # weights of this directory are read at the first start only
            files = [each for each in files if is_tokenizer_file(each.relative_to(path))]
        if files:
            described = {str(each.relative_to(path)): _describe(each) for each in files}
            found[key] = {"path": place, "files": described}
    return found


def write_inputs(config: Config) -> None:
    """Store them in the run directory, and the user's own code next to them."""
    for key, function in _own_functions(config):
        copy = config.run.files.own_code / f"{key}.py"
        write_atomically(copy, function.source)
        for place, content in function.neighbours:
            write_atomically(copy.with_suffix("") / place, content)
    text = json.dumps(inputs_of(config), indent=1)
    write_atomically(config.run.files.inputs, text.encode())


def changed_inputs(config: Config) -> dict[str, tuple[Any, Any]]:
    """File -> (before, now), of files under unchanged paths. Empty where nothing was stored."""
    stored = config.run.files.inputs
    if not stored.is_file():
        return {}
    before = read_json_object(stored)
    changed: dict[str, tuple[Any, Any]] = {}
    for key, now in inputs_of(config).items():
        old = before.get(key, {})
        if old.get("path") != now["path"]:
            continue
        for name in {**old["files"], **now["files"]}:
            pair = old["files"].get(name, "absent"), now["files"].get(name, "absent")
            if pair[0] != pair[1]:
                changed[f"contents of {key}={Path(now['path']) / name}"] = pair
    return changed


def refuse_changed_base(config: Config) -> None:
    """Raise a UserError where tensors that an export copies may differ from those of the start."""
    if not _copies_from_base(config):
        return
    changed = [key for key in changed_inputs(config) if key.startswith("contents of student.path")]
    if changed:
        raise UserError(
            f"{config.run.files.model} is not written: an export copies tensors from the base "
            f"model, which has changed since the start ({', '.join(changed)}). Checkpoints are "
            "intact: restore it, and start again"
        )


def _copies_from_base(config: Config) -> bool:
    """Whether tensors of `student.path` are not trained but copied into every export."""
    path = config.student.path
    if path is None or not (Path(path) / "config.json").is_file():
        return False
    return bool(configured_architecture(config.student).family.carried)


def _teachers(config: Config) -> Iterator[tuple[str, str]]:
    teacher = config.teacher
    if teacher is None or teacher.is_self:
        return
    if teacher.path is not None:
        yield "teacher.path", teacher.path
    for name, model in teacher.models.items():
        if model.path is not None:
            yield f"teacher.models.{name}.path", model.path
    for name, directory in teacher.adapters.items():
        yield f"teacher.models.{name}.adapter", str(directory)


def _places(config: Config) -> Iterator[tuple[str, str]]:
    sources = config.data.sources
    for number, source in enumerate(sources):
        key = "data.train.path" if len(sources) == 1 else f"data.train.{number}.path"
        yield key, source.path
    teacher, reference = config.teacher, config.reference
    own = teacher is not None and teacher.is_self
    yield from _teachers(config)
    if (config.largest_beta and reference.update == "never") or own:
        start = reference.path or config.student.path
        if start is not None:
            yield "reference.path" if reference.path else "student.path", start
    if _copies_from_base(config):
        yield "student.path", str(config.student.path)
    if config.student.lora is not None and config.student.lora.path is not None:
        yield "student.lora.path", config.student.lora.path
    for key, function in _own_functions(config):
        yield key, function.path
        for place, _ in function.neighbours:
            yield f"{key} ({place})", str(Path(function.path).parent / place)


def _own_functions(config: Config) -> Iterator[tuple[str, UserFunction]]:
    """Setting and value of each function of the user's own."""
    for settings in config.objectives:
        if is_user_function(settings.name):
            yield "objective.name", settings.read()
    if config.teacher is not None and config.teacher.prompt_function is not None:
        yield "teacher.prompt.function", config.teacher.prompt_function.read()
    sections: dict[str, RewardConfig | EnvironmentConfig | None] = {
        "reward": config.reward,
        "environment": config.environment,
    }
    for number, source in enumerate(config.data.sources):
        sections[f"data.train.{number}.reward"] = source.reward
        sections[f"data.train.{number}.environment"] = source.environment
    for key, section in sections.items():
        if section is not None and section.function is not None:
            yield f"{key}.function", section.read()


def _describe(path: Path) -> str:
    size, hasher = path.stat().st_size, xxhash.xxh3_64()
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            hasher.update(file.read())
        else:
            for piece in range(_PIECES):
                file.seek(piece * (size - _PIECE_BYTES) // (_PIECES - 1))
                hasher.update(file.read(_PIECE_BYTES))
    return f"{size} bytes, xxh3 {hasher.hexdigest()}"
