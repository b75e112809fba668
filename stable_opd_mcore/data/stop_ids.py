"""Which ids end a response, and the files that say so."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.json_files import read_json_object

GENERATION = "generation_config.json"


class SpecialTokens(Protocol):
    """What is read of a tokenizer (chat.py)."""

    path: str

    @property
    def vocab_size(self) -> int: ...

    @cached_property
    def turn_end_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...


def resolve_stop_ids(
    model_dir: str | Path | None, tokenizer: SpecialTokens, override: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Every id that ends a response; generation stops on all of them.

    `override` if given. Otherwise the token that ends an assistant turn of the chat template, then
    eos_token_id of generation_config.json, of config.json and of the tokenizer, each once. The
    sources disagree: Qwen2.5-Math's template ends turns with 151645, its configs hold 151643.

    Raises:
        DataError: no id in any source, or an id outside the vocabulary.
    """
    sources = stop_sources(model_dir, tokenizer) if override is None else {"override": override}
    ids = tuple(dict.fromkeys(token for ids in sources.values() for token in ids))
    if not ids:
        raise DataError(
            f"{tokenizer.path}: no chat template and no file names a token that ends a response; "
            "set student.stop_token_ids (for a teacher, teacher.stop_token_ids)"
        )
    outside = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
    if outside:
        raise DataError(
            f"{tokenizer.path}: stop tokens {outside} are outside the vocabulary, whose ids are "
            f"below {tokenizer.vocab_size}; correct stop_token_ids or the model's config.json"
        )
    return ids


def stop_sources(
    model_dir: str | Path | None, tokenizer: SpecialTokens
) -> dict[str, tuple[int, ...]]:
    """The ids that each source names as the end of a response, in the order of `resolve_stop_ids`.

    Raises:
        DataError: a file that is not a JSON object, or an eos_token_id that is not an id.
    """
    turn_end, eos = tokenizer.turn_end_id, tokenizer.eos_token_id
    sources: dict[str, tuple[int, ...]] = {"chat template": () if turn_end is None else (turn_end,)}
    for name in (GENERATION, "config.json"):
        sources[name] = () if model_dir is None else _eos_of(Path(model_dir) / name)
    return sources | {"tokenizer": () if eos is None else (eos,)}


def _eos_of(path: Path) -> tuple[int, ...]:
    if not path.is_file():
        return ()
    record = read_json_object(path)
    text: Any = record.get("text_config")  # a model with vision keeps the decoder's settings here
    inner = cast("dict[str, Any]", text if isinstance(text, dict) else {})
    eos: Any = record.get("eos_token_id")
    eos = inner.get("eos_token_id") if eos is None else eos
    ids = cast("list[Any]", eos) if isinstance(eos, list) else [eos]
    if not all(token is None or type(token) is int for token in ids):
        raise DataError(
            f"{path}: eos_token_id is {eos!s:.80}; expected an id or a list of ids; correct it"
        )
    return tuple(token for token in ids if token is not None)
