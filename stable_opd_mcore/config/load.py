"""Read a YAML file and dotted overrides as a `Config`; errors name key, file and remedy.

`base: other.yaml` at the top of a file takes that file's settings first; the path is relative to
the file. A run's resolved copy holds every value and no base.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.host.atomic_files import write_atomically

BASE = "base"
REPLACES = "++"  # before an override that replaces earlier ones of its key
_AMBIGUOUS = re.compile(
    r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)$"
)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> Config:
    """Read `path` and its bases, apply overrides such as "train.steps=10", validate.

    Two overrides of one setting are refused, unless the later one is written `++key=value`, as
    scripts do that append their own.

    Args:
        changes: plain values that replace those of the file, before the overrides.

    Raises:
        ConfigError: missing file, broken YAML, unknown key (with the nearest right spelling),
            wrong type or value, two overrides of one setting.
    """
    path = Path(path)
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"override {item!r} has no =: write key=value, e.g. train.steps=10")
    given, overrides = overrides, [item.removeprefix(REPLACES) for item in overrides]
    plain: dict[str, Any] = _escaped(changes or {})
    parsed = [_parse_override(override) for override in overrides]
    try:
        tree = _with_bases(path)
        for over in (OmegaConf.create(plain), *parsed):
            tree = _merged(tree, over)
        _refuse_replaced(given, parsed, tree)
        values = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: not readable as YAML settings; fix this: {error}") from error
    return parse_config(values, str(path), overrides)


def _with_bases(path: Path, within: tuple[Path, ...] = ()) -> DictConfig:
    """A file's settings over those of its base, section by section; lists are replaced whole."""
    chain = (*within, path.resolve())
    if path.resolve() in within:
        files = " -> ".join(str(file) for file in chain)
        raise ConfigError(f"{path}: its bases form a circle: {files}; drop one `base`")
    tree = read_mapping(path)
    if BASE not in tree:
        return tree
    base = cast("dict[str, Any]", OmegaConf.to_container(tree))[BASE]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r}; set it to the path of one YAML file")
    del tree[BASE]
    return _merged(_with_bases(path.parent / base, chain), tree)


def _merged(under: DictConfig, over: DictConfig) -> DictConfig:
    """The settings `under`, with those of `over` in their place, section by section. A list is
    replaced whole, also by a section, and a section by a list or by an empty section."""
    if nothing := OmegaConf.missing_keys(over):
        raise ConfigError(f"{', '.join(sorted(nothing))}: ??? is no value; give one, or null")
    _drop_other_forms(under, cast("dict[str, Any]", OmegaConf.to_container(over)))
    return cast("DictConfig", OmegaConf.merge(under, over))


def _drop_other_forms(under: DictConfig, over: Mapping[str, Any]) -> None:
    plain = cast("dict[str, Any]", OmegaConf.to_container(under))
    for key, value in over.items():
        if isinstance(value, dict) and value and isinstance(plain.get(key), dict):
            _drop_other_forms(under[key], cast("dict[str, Any]", value))
        elif isinstance(value, dict | list) and isinstance(plain.get(key), dict | list):
            del under[key]


def _parse_override(override: str) -> DictConfig:
    """The override as settings; one with what YAML takes for a comment (" # ...") is text."""
    key, _, value = override.partition("=")
    try:
        _refuse_ambiguous(value, f"override {override!r:.200}")
        ends: list[int] = [
            token.end_mark.index
            for token in cast("Any", yaml).scan(value)
            if token.start_mark.index < token.end_mark.index
        ]
        if value[max(ends, default=0) :].strip():
            override = f"{key}={json.dumps(value)}"
        return OmegaConf.from_dotlist([override])
    except (YAMLError, RecursionError) as error:
        raise ConfigError(
            f"override {override!r:.200}: not YAML; correct it, and put a text in quotes, which "
            f"YAML must see, too: '{key}=\"...\"': {error}"
        ) from error


def _refuse_replaced(
    overrides: Sequence[str], parsed: Sequence[DictConfig], tree: DictConfig
) -> None:
    """Raise a ConfigError for an override of which a later one, without ++, changes a value."""
    final = OmegaConf.to_container(tree)
    for number, (override, over) in enumerate(zip(overrides, parsed, strict=True)):
        key, changes = override_key(override), not _holds(OmegaConf.to_container(over), final)
        for later in overrides[number + 1 :]:
            other = override_key(later)
            if not later.startswith(REPLACES) and (
                key == other or (changes and _overlap(key, other))
            ):
                raise ConfigError(
                    f"override {override!r:.200} and override {later!r:.200}: two values of one "
                    f"setting; drop one, or write {REPLACES}{later:.200} to replace the first"
                )


def override_key(override: str) -> str:
    """The dotted key of an override."""
    return override.removeprefix(REPLACES).partition("=")[0]


def _holds(given: Any, final: Any) -> bool:
    """Whether every value of `given` is in `final`."""
    if isinstance(given, dict) and given:
        values = cast("dict[Any, Any]", given)
        return isinstance(final, dict) and all(
            key in final and _holds(value, cast("dict[Any, Any]", final)[key])
            for key, value in values.items()
        )
    return repr(cast("object", given)) == repr(final)


def _overlap(key: str, other: str) -> bool:
    """Whether two keys are one, or one is in the section of the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _refuse_ambiguous(text: str, where: str) -> None:
    """Raise a ConfigError for numbers that YAML 1.1 reads otherwise than most people: 010 (8) and
    1:30 (90)."""
    for token in cast("Any", yaml).scan(text):
        if isinstance(token, yaml.ScalarToken) and token.plain and _AMBIGUOUS.match(token.value):
            raise ConfigError(
                f"{where}, line {token.start_mark.line + 1}: {token.value} is not a decimal number "
                "to YAML: with a leading 0 it is octal, with a colon a time; write a decimal "
                "number, or quote a text"
            )


def read_mapping(path: Path) -> DictConfig:
    """The settings in a YAML file, neither resolved nor validated.

    Raises:
        ConfigError: no file, no YAML text, or a list or a value in place of settings.
    """
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; give one as in configs/") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file ({error}); give a YAML file") from error
    except OSError as error:
        if error.errno is None:  # OmegaConf: YAML, but neither a mapping nor a list
            raise ConfigError(f"{path}: no settings; write sections as in configs/") from error
        raise ConfigError(f"{path}: {error.strerror}; give a readable YAML file") from error
    except (YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as YAML settings; fix this: {error}") from error
    _refuse_ambiguous(path.read_text("utf-8"), str(path))
    if not isinstance(tree, DictConfig):
        raise ConfigError(
            f"{path}: a list at the top; expected sections with keys: write it as in configs/"
        )
    return tree


def parse_config(values: Any, origin: str, overrides: Sequence[str] = ()) -> Config:
    """Validate plain values; errors name the override that set a wrong one, else `origin`."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found = [_explain(item, origin, overrides) for item in error.errors()]
        raise ConfigError("\n".join(found)) from None


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config atomically; `load_config` reads an equal one."""
    write_atomically(path, config_yaml(config))


def config_yaml(config: Config) -> bytes:
    """The contents of a resolved config's file."""
    values = config.model_dump(mode="json", by_alias=True)
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(values))).encode()


def _escaped(values: Any) -> Any:
    """Plain values with `${` as `\\${` in texts, because OmegaConf would replace `${key}`.
    Backslashes before a `${` are doubled, because it halves them.
    """
    return _with_texts(values, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def unescaped(values: Any) -> Any:
    """The values of a stored config as they were before `config_yaml` escaped them."""
    escape = re.compile(r"(?<!\\)((?:\\\\)*)\\(?=\$\{)")
    return _with_texts(values, lambda text: escape.sub(lambda m: m[1][::2], text))


def _with_texts(values: Any, change: Callable[[str], str]) -> Any:
    """The values with every text in them, at any depth, changed; keys stay."""
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        return {key: _with_texts(value, change) for key, value in items}
    if isinstance(values, list):
        return [_with_texts(value, change) for value in cast("list[Any]", values)]
    return change(values) if isinstance(values, str) else values


def _explain(item: Any, origin: str, overrides: Sequence[str]) -> str:
    # "<one>" and the like are pydantic's names of the forms that a value may have.
    key = ".".join(part for part in map(str, item["loc"]) if not part.startswith("<"))
    unknown = item["type"] == "extra_forbidden"
    for override in overrides:
        if _overlap(key, override.partition("=")[0].replace("[", ".").replace("]", "")):
            origin = f"override {override!r:.200}"
    if unknown:
        return f"{origin}: unknown key {key}; {_advice(key)}"
    if item["type"] == "missing":
        return f"{origin}: {key} is required; set it"
    given = "" if item["type"] == "value_error" else f" (given {item['input']!r:.200})"
    if item["type"] == "string_type" and isinstance(item["input"], dict | list):
        given += '; put the text in quotes, which YAML must see, too: "..."'
    where = f"{key}: " if key else ""
    return f"{origin}: {where}{item['msg'].removeprefix('Value error, ')}{given}"


def _advice(unknown: str) -> str:
    """What an unknown key may have meant: a key of its section, or one of that name elsewhere."""
    known = list(dict.fromkeys(_known_keys(Config)))
    section, _, name = unknown.rpartition(".")
    if unknown in known:
        return f"write {section} as a list, whose entries have it"
    while section and section not in known:  # the section is unknown too
        section, _, name = section.rpartition(".")
    prefix = f"{section}." if section else ""
    siblings = [k.removeprefix(prefix) for k in known if k.startswith(prefix)]
    siblings = [sibling for sibling in siblings if "." not in sibling]
    near = [prefix + sibling for sibling in difflib.get_close_matches(name, siblings, n=1)]
    near += [key for key in known if key.endswith(f".{unknown.rpartition('.')[2]}")][:3]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{f'keys of {section}' if section else 'sections'}: {', '.join(siblings)}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        keys.append(key)
        for section in _sections_in(field.annotation):
            keys.extend(_known_keys(section, f"{key}."))
    return keys


def _sections_in(kind: Any) -> list[type[BaseModel]]:
    """The sections that a type holds, such as both of `SourceConfig | tuple[TrainSource, ...]`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for part in get_args(kind) for section in _sections_in(part)]
