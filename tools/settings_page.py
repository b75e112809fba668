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
`stable-opd train CONFIG train.steps=10 kl.beta=0.1`. A key without a default is required. An
unknown key or a value of another type ends the run with one message.

*This page is generated: `python -m tools.settings_page > docs/configuration.md`.*
"""

_NAMES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "object": "map"}
_BOUNDS = {"exclusiveMinimum": "> ", "minimum": "≥ ", "exclusiveMaximum": "< ", "maximum": "≤ "}

Schema = dict[str, Any]


def settings_page() -> str:
    """The page, Markdown."""
    root = Config.model_json_schema(by_alias=True)
    tables = [_table("", root, root["$defs"])]
    tables += _section_tables("", root, root["$defs"])
    return "\n".join([_HEAD, *_without_copies(tables)])


def _without_copies(tables: list[str]) -> list[str]:
    """The tables, with "As `student.window`." for a text that an earlier key of the name has."""
    first: dict[tuple[str, str], str] = {}
    shortened: list[str] = []
    for line in "\n".join(tables).splitlines():
        if line.startswith("| `"):
            cells, _, text = line.removesuffix(" |").rpartition(" | ")
            key = cells.split("`")[1]
            same = first.setdefault((key.rpartition(".")[2], text), key)
            line = line if same == key else f"{cells} | As `{same}`. |"
        shortened.append(line)
    return [*shortened, ""]


def _section_tables(prefix: str, model: Schema, models: Schema) -> list[str]:
    """A table for each section, those inside it after it."""
    tables: list[str] = []
    for name, field in model["properties"].items():
        held, key = _sections_of(field, models), f"{prefix}{name}"
        if (section := held.get("")) is not None:
            tables.append(f"## {key}\n{_text(section)}\n\n{_table(f'{key}.', section, models)}")
            tables += _section_tables(f"{key}.", section, models)
        if (section := held.get("[]")) is not None:  # only what the single one lacks
            more = section["properties"].keys() - held[""]["properties"].keys()
            own = {k: v for k, v in section["properties"].items() if k in more}
            table = _table(f"{key}[].", section | {"properties": own}, models)
            tables.append(f"## {key}[]\n{_text(section)}\n\n{table}")
    return tables


def _table(prefix: str, model: Schema, models: Schema) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model["properties"].items():
        required = name in model.get("required", ())
        kind, default = _type(field), "" if required else _code(field.get("default"))
        held = _sections_of(field, models)
        if (section := held.get("")) is not None:
            if default != "`null`" and "[]" not in held:
                continue  # its own table follows
            kind, default = "section", "`null`" if default == "`null`" else ""
            field = section | field
        rows.append(f"| `{prefix}{name}` | {kind} | {default} | {_text(field)} |")
    return "\n".join(rows) + "\n"


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
    """A description on one line, fit for a cell of a table."""
    return " ".join(schema["description"].split()).replace("|", r"\|")


if __name__ == "__main__":
    print(settings_page(), end="")
