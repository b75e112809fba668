"""What a chat template reads: arguments that it ignores are refused; a clock gives a warning."""

# Not strict: Transformers' types are incomplete.
# pyright: basic

import logging

from jinja2 import TemplateError, meta, nodes

from stable_opd_mcore.data.tool_schemas import Tool, parse_tools
from stable_opd_mcore.errors import DataError

_LOG = logging.getLogger(__name__)
# What the renderer itself gives to a template, in addition to its global functions.
_OF_THE_RENDERER = frozenset({"messages", "add_generation_prompt"})


def template_variables(template: str) -> frozenset[str]:
    """The names that a template reads and the renderer does not give; a DataError if invalid."""
    # Imported here because it takes seconds, and some commands load no tokenizer.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment  # the one that renders it
        tree = environment.parse(template)
        # What is set in a loop is unknown outside it, so it is no argument.
        of_loops = {
            name.name
            for loop in tree.find_all(nodes.For)
            for name in loop.find_all(nodes.Name)
            if name.ctx == "store"
        }
        names = meta.find_undeclared_variables(tree) - of_loops
    except TemplateError as error:
        raise DataError(f"a chat template is not valid Jinja; correct it: {error}") from error
    return frozenset(
        name for name in names - _OF_THE_RENDERER if not name.endswith(("_token", "_tokens"))
    )


def refuse_unread(arguments: dict[str, object], template: str | None, path: str) -> None:
    """Raise a DataError for an argument that the template of the model in `path` never reads, and
    for the text of a truth value."""
    if not arguments:
        return
    if template is None:
        raise DataError(
            f"{path}: it has no chat template that could read chat_template_kwargs; drop them"
        )
    for name, value in arguments.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise DataError(
                f"{path}: {name} of chat_template_kwargs is the text {value!r}, which is neither "
                "true nor false to a chat template; write it without quotes"
            )
    read = template_variables(template)
    unread = sorted(arguments.keys() - read)
    if unread:
        raise DataError(
            f"{path}: its chat template never reads {', '.join(unread)} of chat_template_kwargs; "
            f"it reads {', '.join(sorted(read)) or 'no argument'}; drop the others"
        )


def given_tools(value: object, path: str) -> tuple[Tool, ...]:
    """`tools` of chat_template_kwargs; a DataError where one is not in OpenAI's form."""
    tools = parse_tools(value)
    given = value if isinstance(value, list | tuple) else [value]
    if len(tools) != len(given) and value is not None:
        raise DataError(
            f"{path}: tools of chat_template_kwargs is {value!s:.80}; expected a list of functions "
            "in OpenAI's form: write {type: function, function: {name: ..., parameters: ...}} for "
            "each"
        )
    return tools


def warn_of_clock(template: str | None, path: str) -> None:
    """Warn of a template that may write the time of rendering into prompts."""
    if template is not None and "strftime_now" in template:
        _LOG.warning(
            "%s: its chat template reads the clock (strftime_now); if it writes the date into "
            "prompts, a run that is resumed on another day continues with other prompts. Give a "
            "date with chat_template_kwargs, set data.system_prompt, or write a date into the "
            "template",
            path,
        )
