"""Stop tokens: the class that the loss compares, and sources that contradict each other.

`stop_class` is what the loss does (docs/method.md §4); `train` prints it.
"""

from collections.abc import Iterator
from pathlib import Path

from stable_opd_mcore.commands.check.finding import Finding, finding
from stable_opd_mcore.data.stop_ids import stop_sources
from stable_opd_mcore.data.tokenizer_backend import special_token
from stable_opd_mcore.host.json_files import read_json_object
from stable_opd_mcore.inputs.pair import ModelFiles, Pair

_TEMPLATE = "chat template"  # its name among ModelFiles.stop_sources
# Keys of generation_config.json that do not change what is sampled, or are read elsewhere
_OTHER_GENERATION_KEYS = {
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length",
    "max_new_tokens", "do_sample", "use_cache", "cache_implementation", "transformers_version",
}  # fmt: skip
_NEUTRAL = {"temperature": 1, "top_p": 1, "min_p": 0, "top_k": 0, "repetition_penalty": 1}


def stop_class(pair: Pair) -> list[str]:
    """What each model stops on and which file says so, and what the loss compares, as lines."""
    lines = [
        f"{model.role} stops on "
        + ", ".join(f"{model.named(token)}{_said_by(model, token)}" for token in model.stop_ids)
        for model in pair.models
    ]
    if pair.merged_stops:
        ids = " + ".join(map(str, pair.merged_stops))
        lines.append(f"stop class: the loss compares p({ids}), one outcome for both models")
    elif pair.teacher is not None:
        lines.append("stop class: none; the loss compares the probability of single tokens")
    return lines


def different_stops(pair: Pair) -> Iterator[Finding]:
    """A student and a teacher that end responses with different tokens, which are not merged."""
    student, teacher = pair.student, pair.teacher
    if teacher is None or pair.merged_stops:
        return
    if set(student.stop_ids) != set(teacher.stop_ids):
        named = {model.role: model.named_all(model.stop_ids) for model in pair.models}
        yield finding("separate-stops", **named)


def _said_by(model: ModelFiles, token_id: int) -> str:
    names = [name for name, ids in model.stop_sources.items() if token_id in ids]
    return f" ({', '.join(names)})" if names else ""


def end_of_turn_is_not_eos(pair: Pair) -> Iterator[Finding]:
    """A chat template whose end of a turn is not the EOS token that the model's files name.

    Both are stop ids, so the contradiction is harmless where the other model has the same one.
    """
    if pair.teacher is None or _ends(pair.student) == _ends(pair.teacher):
        return
    for model in pair.models:
        turn_end, eos = _ends(model)
        files = [name for name, ids in model.stop_sources.items() if ids and name != _TEMPLATE]
        if turn_end and eos and turn_end[0] not in eos:
            yield finding(
                f"{model.role}-end-of-turn",
                role=model.role,
                turn_end=model.named_all(turn_end),
                files=", ".join(files),
                eos=model.named_all(eos),
            )


def _ends(model: ModelFiles) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The token that ends a turn of the template, and those that the files name as EOS."""
    eos = [token for name, ids in model.stop_sources.items() if name != _TEMPLATE for token in ids]
    return model.stop_sources.get(_TEMPLATE, ()), tuple(dict.fromkeys(eos))


def unread_stops(pair: Pair) -> Iterator[Finding]:
    """Stop ids in the files of student.path where tokenizer.path is another directory."""
    model = pair.student
    if model.place == model.tokenizer.path or not Path(model.place).is_dir():
        return
    if "student.stop_token_ids" in model.stop_sources:
        return
    sources = stop_sources(model.place, model.tokenizer)
    named = {token: file for file, ids in sources.items() for token in ids if Path(file).suffix}
    unread = tuple(token for token in named if token not in model.stop_ids)
    if unread:
        fields = {"named": model.named_all(unread), "stops": model.named_all(model.stop_ids)}
        yield finding("unread-stops", file=named[unread[0]], **fields)


def two_special_tokens(pair: Pair) -> Iterator[Finding]:
    """An EOS or BOS for which two files of a tokenizer name different tokens.

    Two EOS tokens that both end responses are harmless.
    """
    for model in pair.models_with_own_tokenizer:
        directory = Path(model.tokenizer.path)
        for key, used_id in (
            ("eos_token", model.tokenizer.eos_token_id),
            ("bos_token", model.tokenizer.bos_token_id),
        ):
            named = special_token(directory, key)
            if len(set(named.values())) < 2:
                continue
            stops = {model.tokenizer.names_by_id.get(token) for token in model.stop_ids}
            if key == "eos_token" and (
                used_id not in model.stop_ids or set(named.values()) <= stops
            ):
                continue
            config, other = named.values()
            fields = {"config": config, "other": other, "used": model.named(used_id)}
            yield finding("two-special-tokens", place=directory, key=key, **fields)


def ignored_generation_settings(pair: Pair) -> Iterator[Finding]:
    """Settings of the student's generation_config.json that sampling does not follow."""
    file = Path(pair.student.place) / "generation_config.json"
    settings = read_json_object(file) if file.is_file() else {}
    given = {
        key: value
        for key, value in settings.items()
        if key not in _OTHER_GENERATION_KEYS and not key.startswith("_")
        if (value or (value is not None and key in _NEUTRAL)) and value != _NEUTRAL.get(key)
    }
    if given:
        values = ", ".join(f"{key}={value!s:.60}" for key, value in given.items())
        yield finding("ignored-generation-settings", role=pair.student.role, values=values)
