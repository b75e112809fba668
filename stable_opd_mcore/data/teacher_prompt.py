"""The teacher's own prompt: `teacher.prompt`, a Jinja template over the columns of a row.

The template runs in Jinja's sandbox: values of a row are data, never code.
"""

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.tool_schemas import refuse_unnamed
from stable_opd_mcore.errors import ConfigError, DataError

_SURROGATE = re.compile("[\ud800-\udfff]")


class TeacherPrompt:
    """Renders and encodes the teacher's prompt of a row.

    Args:
        tokenizer: the teacher's, with its own arguments of the chat template.
        window: positions of the teacher; None: not known here.

    Raises:
        ConfigError: no valid template, or one that reads no column.
    """

    def __init__(
        self, template: str, tokenizer: Tokenizer, system: str | None, window: int | None
    ) -> None:
        environment: Any = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, finalize=_present, keep_trailing_newline=True
        )
        try:
            names = meta.find_undeclared_variables(environment.parse(template))
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise ConfigError(f"teacher.prompt is not valid Jinja; correct it: {error}") from error
        self.columns = frozenset(names.difference(environment.globals))
        if not self.columns:
            raise ConfigError(
                f"teacher.prompt={template!r:.80} reads no column of a row: write for example "
                "{{ problem }}"
            )
        self.window, self._tokenizer, self._system = window, tokenizer, system

    def text(self, row: Row) -> str:
        """The prompt of a row whose `columns` are those that the template reads.

        Raises:
            DataError: the template fails, the message contains a control token, or the prompt
                does not name the row's tools.
        """
        try:
            message = self._template.render(row.columns or {})
        except Exception as error:  # an expression over foreign values may raise anything
            raise DataError(
                f"{row.row_id}: teacher.prompt fails on this row: {error}; correct the template or "
                "drop the row"
            ) from error
        found = self._tokenizer.control_token_in(message) or _SURROGATE.search(message)
        if found:
            raise DataError(
                f"{row.row_id}: the message of teacher.prompt contains {found!r:.80}, a control "
                f"token of {self._tokenizer.path} or half a character; fix or drop the row"
            )
        text = self._tokenizer.render_prompt(message, system=self._system, tools=row.tools)
        refuse_unnamed(row.tools, text, f"{row.row_id}: teacher.prompt", self._tokenizer.path)
        return text

    def encode(self, rows: Sequence[Row]) -> list[list[int]]:
        """The token ids of each row's prompt; raises what `text` raises."""
        return self._tokenizer.encode_many([self.text(row) for row in rows])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens included."""
        return "".join(self._tokenizer.pieces(token_ids))


def _present(value: object) -> object:
    """What `{{ value }}` writes; the null of a row is refused, because it would write "None"."""
    if value is None:
        raise ValueError("a column that it writes is null")
    return value
