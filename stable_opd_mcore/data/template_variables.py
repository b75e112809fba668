"""What a chat template reads: arguments that it would ignore and the clock are refused."""

# Not strict: Transformers' types are incomplete.
# pyright: basic

from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Template, TemplateError, meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from stable_opd_mcore.errors import DataError

# They differ in every field, the day of the week included.
_DAYS = (datetime(2001, 1, 1), datetime(2012, 12, 30, 23, 59, 59, 999999))
# What the renderer itself gives to a template, beside its global functions.
_OF_THE_RENDERER = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def template_variables(template: str) -> frozenset[str]:
    """The names that a template reads and the renderer does not give; special tokens excepted.

    Raises:
        DataError: the template is no valid Jinja.
    """
    try:
        environment = _compile_jinja_template(template).environment  # the one that renders it
        names = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError as error:
        raise DataError(f"a chat template is no valid Jinja: {error}") from error
    return frozenset(
        name for name in names - _OF_THE_RENDERER if not name.endswith(("_token", "_tokens"))
    )


def refuse_unread(arguments: dict[str, object], template: str | None, path: str) -> None:
    """Raise a DataError for an argument that the template of the model in `path` never reads."""
    if not arguments:
        return
    if template is None:
        raise DataError(
            f"{path}: it has no chat template that could read chat_template_kwargs; drop them"
        )
    read = template_variables(template)
    unread = sorted(arguments.keys() - read)
    if unread:
        raise DataError(
            f"{path}: its chat template never reads {', '.join(unread)} of chat_template_kwargs; "
            f"it reads {', '.join(sorted(read)) or 'no argument'}"
        )


def refuse_clock(template: str, data: dict[str, Any], path: str) -> None:
    """Raise a DataError for a template whose text of `data` depends on the time of rendering.

    Args:
        data: what the renderer would give it: messages, special tokens and arguments.
    """
    data = dict.fromkeys(_OF_THE_RENDERER) | data

    def is_dated(**changed: object) -> bool:
        try:
            return len({each.render(data | changed) for each in _on_days(template)}) > 1
        except Exception:  # foreign code, which may refuse what was changed
            return True

    if "strftime_now" not in template or not is_dated():
        return
    date = "26 Jul 2024"
    names = [name for name in sorted(template_variables(template)) if not is_dated(**{name: date})]
    remedies = [f"add {{{name}: {date}}} to chat_template_kwargs" for name in names]
    if not is_dated(messages=[{"role": "system", "content": "Add."}, *data["messages"]]):
        remedies.append("set data.system_prompt")
    remedies.append("replace strftime_now by a date in the template")
    raise DataError(
        f"{path}: its chat template writes the present date or time (strftime_now) into prompts, "
        "so a run that is resumed on another day would go on with other prompts; "
        f"{', or '.join(remedies)}"
    )


@cache
def _on_days(template: str) -> list[Template]:
    """The template as it renders on each of `_DAYS`."""
    compiled = _compile_jinja_template(template).environment.from_string
    return [compiled(template, globals={"strftime_now": day.strftime}) for day in _DAYS]
