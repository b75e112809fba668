"""docs/configuration.md, written from the settings: every key, its type, default and meaning.

    python -m tools.settings_page > docs/configuration.md

Not here: the meanings themselves, which are the texts under the fields of each section.
"""

from __future__ import annotations

import json
from typing import Any

from stable_opd_mcore.config.schema import Config

_HEAD = """# Settings

A config is one YAML file with these keys. Any of them can be overridden on the command line:
`stable-opd train CONFIG train.steps=10 kl.beta=0.1`. An unknown key or a value of another type ends
the run with one message. Each key is followed by its type and default. Most runs set only
[the ten settings that matter](first_gpu_day.md#the-ten-settings-that-matter).

*This page is generated: `python -m tools.settings_page > docs/configuration.md`.*
"""

_NAMES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "object": "map"}
_BOUNDS = {"exclusiveMinimum": "> ", "minimum": "≥ ", "exclusiveMaximum": "< ", "maximum": "≤ "}

Schema = dict[str, Any]


def settings_page() -> str:
    """The page, Markdown."""
    root = Config.model_json_schema(by_alias=True)
    lists = [_list("", root, root["$defs"]), *_section_lists("", root, root["$defs"])]
    return "\n".join([_HEAD, *_without_copies(lists)])


def _without_copies(lists: list[str]) -> list[str]:
    """The lines, with "As `student.window`." for a text that an earlier key of the name has."""
    first: dict[tuple[str, str], str] = {}
    shortened: list[str] = []
    for line in "\n".join(lists).splitlines():
        if line.startswith("- `"):
            start, _, text = line.partition("): ")
            key = start.split("`")[1]
            same = first.setdefault((key.rpartition(".")[2], text), key)
            line = line if same == key else f"{start}): As `{same}`."
        shortened.append(line)
    return [*shortened, ""]


def _section_lists(prefix: str, model: Schema, models: Schema) -> list[str]:
    """A list for each section, those inside it after it."""
    lists: list[str] = []
    for name, field in model["properties"].items():
        held, key = _sections_of(field, models), f"{prefix}{name}"
        if (section := held.get("")) is not None:
            lists.append(f"## {key}\n{_text(section)}\n\n{_list(f'{key}.', section, models)}")
            lists += _section_lists(f"{key}.", section, models)
        if (section := held.get("[]")) is not None:  # only what the single one lacks
            more = section["properties"].keys() - held[""]["properties"].keys()
            own = {k: v for k, v in section["properties"].items() if k in more}
            entries = _list(f"{key}[].", section | {"properties": own}, models)
            lists.append(f"## {key}[]\n{_text(section)}\n\n{entries}")
    return lists


def _list(prefix: str, model: Schema, models: Schema) -> str:
    entries: list[str] = []
    for name, field in model["properties"].items():
        is_required = name in model.get("required", ())
        kind, default = _type(field), "required" if is_required else _code(field.get("default"))
        held = _sections_of(field, models)
        if (section := held.get("")) is not None:
            if default != "`null`" and "[]" not in held:
                continue  # its own list follows
            plain = [each for each in kind.split(" or ") if each]
            kind, field = " or ".join([*plain, "section"]), section | field
            default = default if default == "`null`" else "required"
        entries.append(f"- `{prefix}{name}` ({kind}; {default}): {_text(field)}")
    return "\n".join(entries) + "\n"


def _sections_of(field: Schema, models: Schema) -> dict[str, Schema]:
    """The models that a field holds, under "", and a list of them holds, under "[]"; none for a
    plain value.
    """
    found: dict[str, Schema] = {}
    options = [
        field,
        *(each for kind in ("anyOf", "allOf", "oneOf") for each in field.get(kind, ())),
    ]
    for option in options:
        for suffix, held in (("", option), ("[]", option.get("items", {}))):
            if "$ref" in held:
                found[suffix] = models[held["$ref"].rpartition("/")[2]]
    return found


def _type(field: Schema) -> str:
    if "anyOf" in field:
        kinds = [_type(option) for option in field["anyOf"] if option.get("type") != "null"]
        return " or ".join(kinds)
    if "enum" in field:
        return ", ".join(_code(value) for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    limits = [f"{sign}{field[bound]:g}" for bound, sign in _BOUNDS.items() if bound in field]
    return " ".join([_NAMES.get(field.get("type", ""), ""), ", ".join(limits)]).strip()


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _text(schema: Schema) -> str:
    """A description on one line."""
    return " ".join(schema["description"].split())


if __name__ == "__main__":
    print(settings_page(), end="")
