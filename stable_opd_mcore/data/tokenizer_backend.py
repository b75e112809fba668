"""Where a tokenizer comes from: a model directory's files, or code, for the arithmetic task."""

# Not strict: Transformers' types are incomplete.
# pyright: basic

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from stable_opd_mcore.data.synthetic import PAD, PROMPT_END, SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.hub import MORE_TEMPLATES, TOKENIZER_FILES
from stable_opd_mcore.host.json_files import MIB, read_json_object, require_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SYNTHETIC = "synthetic"
# The stop token ends an assistant turn; PROMPT_END ends a user turn.
_SYNTHETIC_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}" + PROMPT_END + "{% endif %}{% endfor %}"
)
_LARGEST_BYTES = {  # the largest published tokenizers have 35 MiB
    "tokenizer.json": 256 * MIB,
    "tokenizer_config.json": 16 * MIB,
    "special_tokens_map.json": 16 * MIB,
    "added_tokens.json": 16 * MIB,
    "chat_template.jinja": 1 * MIB,
    "chat_template.json": 1 * MIB,
}
_STOP_FILES = ("generation_config.json", "config.json")


def load_backend(path: str, *, needs_eos: bool) -> PreTrainedTokenizerFast:
    """Load a directory with tokenizer.json, or the built-in "synthetic" one.

    Args:
        needs_eos: whether its EOS says where responses stop.

    Raises:
        DataError: no such directory, no tokenizer.json in it, files that cannot be loaded or
            contradict each other in ids, a chat template that is no text, named ones without a
            default, or a needed EOS that the files lack.
    """
    # Imported here because it takes seconds, and some commands load no tokenizer.
    from transformers import PreTrainedTokenizerFast

    if path == SYNTHETIC:
        return _synthetic()
    directory = Path(path)
    if not directory.is_dir():
        raise DataError(
            f"{path}: no such tokenizer directory; give a local model directory, or {SYNTHETIC!r}"
        )
    if not has_tokenizer(directory):
        raise DataError(
            f"{path}: no tokenizer.json in it; download the model with its tokenizer, "
            "or set tokenizer.path"
        )
    limits = ((directory / name, limit) for name, limit in _LARGEST_BYTES.items())
    files = [(file, limit) for file, limit in limits if file.is_file()]
    for file, limit in files:
        require_size(file, limit)
    try:
        backend = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # tokenizers raises no narrower class
        for file, limit in files:
            if file.suffix == ".json":
                read_json_object(file, limit)
        raise DataError(
            f"{path}: its tokenizer files cannot be loaded: {error}; download them again"
        ) from error
    _refuse_moved_tokens(backend, directory)
    _complete_template(backend, directory)
    if needs_eos and not _knows_eos(backend, directory):
        raise DataError(
            f"{path}: its eos_token {backend.eos_token!r} is not in tokenizer.json; expected "
            "one of its tokens: correct tokenizer_config.json, or set student.stop_token_ids "
            "(for a teacher, teacher.stop_token_ids)"
        )
    return backend


def tokenizer_files(path: str) -> dict[str, bytes]:
    """The tokenizer's files of a model directory as they are, with code of its own, which its
    `auto_map` names; empty for the built-in one."""
    directory = Path(path)
    if path == SYNTHETIC or not directory.is_dir():
        return {}
    files = [directory / name for name in TOKENIZER_FILES if name not in _STOP_FILES]
    files += [*directory.glob(f"{MORE_TEMPLATES}/*"), *directory.glob("tokenization*.py")]
    return {str(f.relative_to(directory)): f.read_bytes() for f in files if f.is_file()}


def save_backend(
    backend: PreTrainedTokenizerFast, files: Mapping[str, bytes], directory: Path
) -> None:
    """Write a tokenizer: its own `files`, or where it has none what transformers writes of it.

    transformers 5 names an internal class, and settings of this machine, which other releases do
    not know.
    """
    write_files(files, directory)
    if files:
        return
    backend.save_pretrained(str(directory))
    file = directory / "tokenizer_config.json"
    fields = {k: v for k, v in _json(file).items() if k not in ("is_local", "local_files_only")}
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    fields["additional_special_tokens"] = fields.pop("extra_special_tokens", [])  # the older key
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Write what `tokenizer_files` has read."""
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def has_tokenizer(directory: str | Path) -> bool:
    """Whether a model directory holds a tokenizer."""
    return (Path(directory) / "tokenizer.json").is_file()


def stored_templates(directory: Path) -> dict[str, str]:
    """File -> the chat template there; the first one is used.

    Raises:
        DataError: a file that cannot be read, or a chat template that is no text.
    """
    found: dict[str, str] = {}
    if (directory / "chat_template.jinja").is_file():
        found["chat_template.jinja"] = (directory / "chat_template.jinja").read_text("utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = _json(directory / name).get("chat_template")
        if isinstance(template, list):
            template = {each["name"]: each["template"] for each in template}
        if isinstance(template, dict):
            template = template.get("default")
        if not isinstance(template, str | None):
            raise DataError(
                f"{directory / name}: chat_template is {template!s:.60}; expected its text: "
                "correct it, or remove it"
            )
        if template is not None:
            found[name] = template
    return found


def special_token(directory: Path, key: str) -> dict[str, str]:
    """File -> the token that it names as `key`, such as eos_token."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json(directory / name).get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _json(file: Path) -> dict[str, Any]:
    return read_json_object(file, _LARGEST_BYTES[file.name]) if file.is_file() else {}


def _refuse_moved_tokens(backend: PreTrainedTokenizerFast, directory: Path) -> None:
    """Raise a DataError for an added token that a file gives another id than it is loaded with."""
    listed = _json(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    tokens = _json(directory / "tokenizer.json").get("added_tokens") or ()
    for name, ids in (
        ("tokenizer.json", [(token["content"], token["id"]) for token in tokens]),
        ("tokenizer_config.json", [(t["content"], int(number)) for number, t in listed.items()]),
        ("added_tokens.json", _json(directory / "added_tokens.json").items()),
    ):
        for token, number in ids:
            loaded = backend.backend_tokenizer.token_to_id(token)
            if loaded not in (None, number):
                raise DataError(
                    f"{directory / name}: it gives {token!r} id {number}, but that token is loaded "
                    f"with id {loaded}; expected one id in all tokenizer files, and "
                    "none left out before it: correct them, or download them again"
                )


def is_tokenizer_file(file: Path) -> bool:
    """Whether ids, chat template or stop ids are read from this file of a model directory."""
    return str(file) in (*_LARGEST_BYTES, *_STOP_FILES) or file.parts[:1] == (MORE_TEMPLATES,)


def _complete_template(backend: PreTrainedTokenizerFast, directory: Path) -> None:
    """Take the chat template from a processor's file, which transformers leaves unread, if there is
    no other; a DataError if named ones lack a default."""
    templates = stored_templates(directory)
    if backend.chat_template is None:
        backend.chat_template = templates.get("chat_template.json")
    if isinstance(backend.chat_template, dict) and "default" not in backend.chat_template:
        raise DataError(
            f"{directory}: its chat templates are named {', '.join(sorted(backend.chat_template))};"
            " expected one named default: save the one for prompts there as chat_template.jinja"
        )


def _knows_eos(backend: PreTrainedTokenizerFast, directory: Path) -> bool:
    """Whether the files contain the EOS token; transformers gives a missing one a new id."""
    eos, added = backend.eos_token, backend.init_kwargs["added_tokens_decoder"].values()
    if eos is None or str(eos) in map(str, added):
        return True
    vocabulary = (directory / "tokenizer.json").read_text("utf-8")
    return any(json.dumps(eos, ensure_ascii=ascii) in vocabulary for ascii in (True, False))


def _synthetic() -> PreTrainedTokenizerFast:
    """A token for each character of the task."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: token_id for token_id, symbol in enumerate(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(vocabulary))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=STOP,
        pad_token=PAD,
        additional_special_tokens=[SECOND_STOP],
        chat_template=_SYNTHETIC_TEMPLATE,
    )


def check_symbols(texts: Sequence[str]) -> None:
    """Raise a DataError for a character that is not a token."""
    for text in texts:
        strange = sorted(set(text).difference(VOCABULARY))
        if strange:
            raise DataError(
                f"{text[:60]!r} has {''.join(strange)!r}, which the synthetic tokenizer lacks; it "
                "reads only the arithmetic task: set tokenizer.path to a model's directory"
            )
