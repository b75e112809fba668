"""Which variables a chat template reads, so that an argument it would ignore can be refused.

Not here: rendering (chat.py).
"""

from __future__ import annotations

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from stable_opd_mcore.errors import DataError

# What the renderer itself gives to a template.
_OF_THE_RENDERER = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)


class _Generation(Extension):
    """`{% generation %}` marks an assistant's tokens in Hugging Face's templates."""

    tags = {"generation"}  # noqa: RUF012, jinja2's form

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def template_variables(template: str) -> frozenset[str]:
    """The names that a template reads and the renderer does not give; special tokens excepted.

    Raises:
        DataError: the template is no valid Jinja.
    """
    environment = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])  # never rendered
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError as error:
        raise DataError(f"a chat template is no valid Jinja: {error}") from error
    return frozenset(
        name for name in names - _OF_THE_RENDERER if not name.endswith(("_token", "_tokens"))
    )


def refuse_unread(arguments: dict[str, object], template: str | None, path: str) -> None:
    """
    Raises:
        DataError: an argument that the template of the model in `path` never reads.
    """
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
