"""The student's tokenizer: prompts by its chat template, golden responses, stop tokens.

A golden response does not pass through the template's assistant turn, because some templates
(DeepSeek-R1's) delete everything before </think> there. Its text follows the generation prompt
directly, and the token that ends an assistant turn follows its text.
"""

# Not strict: Transformers' types are incomplete.
# pyright: basic

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from stable_opd_mcore.data import tokenizer_backend
from stable_opd_mcore.data.message_form import MessageForm, other_forms
from stable_opd_mcore.data.messages import Message, with_system
from stable_opd_mcore.data.stop_ids import GENERATION, resolve_stop_ids
from stable_opd_mcore.data.synthetic import VOCABULARY
from stable_opd_mcore.data.template_variables import given_tools, refuse_unread, warn_of_clock
from stable_opd_mcore.data.thoughts import MARKS
from stable_opd_mcore.data.tool_schemas import Tool
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.json_files import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PROMPT_MARK, _MARK = "user-turn-mark", "assistant-turn-mark"
_TURNS = [{"role": "user", "content": _PROMPT_MARK}, {"role": "assistant", "content": _MARK}]
_PLAIN = ": 'a' < \"b\" & \\frac{é}\n\n{{c}}."  # filters such as escape and tojson change it


class Tokenizer:
    """A Hugging Face fast tokenizer; the first of `stop_token_ids` ends golden responses."""

    def __init__(
        self,
        backend: PreTrainedTokenizerFast,
        path: str,
        stop_token_ids: Sequence[int] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.path = path
        self._backend, self._files = backend, tokenizer_backend.tokenizer_files(path)
        # A tokenizer.json keeps the lengths of its last call, which would cut or fill every text.
        backend.backend_tokenizer.no_truncation()
        backend.backend_tokenizer.no_padding()
        self._take(template_kwargs or {})
        warn_of_clock(self._template, path)
        self.is_synthetic = backend.get_vocab().keys() == set(VOCABULARY)
        model_dir = Path(path) if Path(path).is_dir() else None
        generation = Path(path) / GENERATION
        self._generation = read_json_object(generation) if generation.is_file() else {}
        self.stop_token_ids = resolve_stop_ids(model_dir, self, stop_token_ids)

    @classmethod
    def load(
        cls,
        path: str,
        stop_token_ids: Sequence[int] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Load a directory with tokenizer.json, or the built-in "synthetic" one.

        Args:
            stop_token_ids: replaces the ids found in the directory (see `resolve_stop_ids`).
            template_kwargs: arguments of the chat template, such as enable_thinking.

        Raises:
            DataError: as `load_backend`, no valid stop token, or an argument that the chat
                template never reads.
        """
        backend = tokenizer_backend.load_backend(path, needs_eos=stop_token_ids is None)
        return cls(backend, path, stop_token_ids, template_kwargs)

    def with_template_kwargs(self, template_kwargs: Mapping[str, Any] | None) -> Tokenizer:
        """A copy with other arguments of the chat template; DataError for one that it ignores."""
        if template_kwargs is None:
            return self
        other = copy.copy(self)
        other._take(template_kwargs)
        return other

    def _take(self, template_kwargs: Mapping[str, Any]) -> None:
        """Keep the arguments of the chat template; `tools` are those of prompts without any."""
        self.template_kwargs = dict(template_kwargs)
        refuse_unread(self.template_kwargs, self._template, self.path)
        self._tools = given_tools(self.template_kwargs.pop("tools", ()), self.path)
        names = self._backend.get_added_vocab()
        self.form = MessageForm(self._rendered, self._template, names, self.path)
        # Conversations that the template keeps: their roles, and whether there are tools
        self._whole_turns: set[tuple[bool, tuple[str, ...]]] = set()

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer's files as they came, and generation_config.json.

        The latter names `stop_token_ids` as EOS for other programs; `load` needs an override again.
        """
        tokenizer_backend.save_backend(self._backend, self._files, Path(directory))
        generation = self._generation | {"eos_token_id": list(self.stop_token_ids)}
        (Path(directory) / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")

    @property
    def vocab_size(self) -> int:
        """The largest id plus one. Ids may have gaps, and a model's embedding more rows."""
        return max(self.names_by_id, default=-1) + 1

    @property
    def eos_token_id(self) -> int | None:
        return cast("int | None", self._backend.eos_token_id)

    @property
    def bos_token_id(self) -> int | None:
        return cast("int | None", self._backend.bos_token_id)

    @property
    def adds_bos(self) -> int | None:
        """The BOS that the tokenizer itself puts before a text, or None; encoding never adds it."""
        ids = self._backend.backend_tokenizer.encode("1", add_special_tokens=True).ids
        return self.bos_token_id if ids and ids[0] == self.bos_token_id else None

    @cached_property
    def names_by_id(self) -> dict[int, str]:
        """Every token's name, as the vocabulary writes it."""
        return {token_id: name for name, token_id in self._backend.get_vocab().items()}

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens outside the base vocabulary."""
        return frozenset(self._backend.get_added_vocab().values())

    @property
    def has_template(self) -> bool:
        return self._backend.chat_template is not None

    @property
    def response_template(self) -> dict[str, Any] | None:
        """How transformers takes a response apart (tokenizer_config.json); None without one."""
        return getattr(self._backend, "response_template", None)

    @property
    def _template(self) -> str | None:
        return self._backend.get_chat_template() if self.has_template else None

    @cached_property
    def turn_end_id(self) -> int | None:
        """The token that ends an assistant turn of the chat template; None without one."""
        text = self.render(_TURNS) if self.has_template else ""
        before, prompt, rest = text.partition(_PROMPT_MARK)
        between, response, tail = rest.partition(_MARK)
        if not prompt or not response:  # it does not render both turns
            return None
        opening, middle, closing = (
            [token for token in self.encode(part) if token in self.added_ids]
            for part in (before, between, tail)
        )
        # Where turns have no end, the next one begins; EOS may separate them.
        opens_turn = {*opening[-1:], *middle[-1:]} - {self.eos_token_id}
        return closing[0] if closing and closing[0] not in opens_turn else None

    @cached_property
    def lost_header(self) -> tuple[str, str] | None:
        """The text that opens an assistant turn, and another one that ends a prompt instead; None
        if they agree.

        A prompt may go on with a thought. Its text may also be shorter where the template reads
        add_generation_prompt (gpt-oss leaves the channel to the response).
        """
        turns = self.render(_TURNS) if self.has_template else ""
        opened, has_response, _ = turns.partition(_MARK)
        if not has_response:
            return None
        closed = self.render(_TURNS[:1])
        prompt = self.render(_TURNS[:1], generation_prompt=True)
        header, ending = (
            text.rpartition(_PROMPT_MARK)[2].partition(MARKS[0][0])[0].strip()
            for text in (opened, prompt)
        )
        is_shorter = header.startswith(ending) and prompt != closed
        return None if is_shorter or ending.startswith(header) else (header, ending)

    @property
    def json_text(self) -> str:
        """The text of a tokenizer.json: all that another process needs to encode or decode."""
        return self._backend.backend_tokenizer.to_str()

    @cached_property
    def control_tokens(self) -> re.Pattern[str] | None:
        """Matches the text of added tokens that are special, stop a response or mark a turn.

        Not every mark of a turn is special (R1-Distill's are not). Think tokens are content.
        """
        turns = self.render(_TURNS, generation_prompt=True) if self.has_template else ""
        marks = turns.replace(_PROMPT_MARK, "").replace(_MARK, "")
        control = {*self.stop_token_ids, *self.encode(marks)}
        texts = [
            token.content
            for token_id, token in self._backend.added_tokens_decoder.items()
            if (token.special or token_id in control)
            and token.content.strip() not in ("", *chain(*MARKS))
        ]
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def control_token_in(self, text: str) -> str | None:
        """The first control token that `encode` would find in `text`; None without one."""
        match = self.control_tokens.search(text) if self.control_tokens else None
        return match.group() if match else None

    def neutralised(self, text: str) -> tuple[str, int]:
        """Foreign text with a space inside each control token, and how many there were.

        With the synthetic tokenizer, a character that it lacks becomes "_" and is counted too.
        """
        text = text.encode(errors="replace").decode()  # half a character cannot be encoded
        number = 0
        while token := self.control_token_in(text):
            number += text.count(token)
            text = text.replace(token, f"{token[:1]} {token[1:]}" if len(token) > 1 else " ")
        if self.is_synthetic:
            lacking = [symbol not in VOCABULARY for symbol in text]
            number += sum(lacking)
            text = "".join("_" if lacks else c for c, lacks in zip(text, lacking, strict=True))
        return text, number

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with none added; DataError for what the synthetic tokenizer lacks."""
        if self.is_synthetic:
            tokenizer_backend.check_symbols(texts)
        encodings = self._backend.backend_tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32]) -> str:
        """The text of a response without the stop token at its end; it keeps special tokens."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        # Not transformers' own decode: it looks at every id in Python first.
        return self._backend.backend_tokenizer.decode(ids, skip_special_tokens=False)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token; where several spell one character, the last one gets it."""
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._backend.backend_tokenizer, token) or "" for token in token_ids]

    def render_prompt(
        self,
        problem: str,
        template: str = "{problem}",
        system: str | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """Render a problem in a prompt template; DataError if the template lacks {problem}."""
        if "{problem}" not in template:
            raise DataError(
                f"data.prompt_template {template!r} lacks {{problem}}: put it where problems go"
            )
        # Not str.format: LaTeX braces in templates are text.
        user = template.replace("{problem}", problem)
        turns: list[Message] = [{"role": "user", "content": user}]
        return self.render_turns(turns, system, tools)

    def render_turns(
        self,
        messages: Sequence[Message],
        system: str | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The turns of a prompt after chat template and generation prompt; without a chat template,
        their texts with blank lines between. `system`: the system message where they have none.

        Raises:
            DataError: a chat template that fails or drops a text, or an assistant's turn without
                one.
        """
        messages = with_system(messages, system)
        if self._template is not None:
            text = self.render(messages, generation_prompt=True, tools=tools)
            self._refuse_dropped_texts(messages, tools)
            return text
        if any(message["role"] == "assistant" for message in messages):
            raise DataError(
                f"{self.path}: it has no chat template, which a conversation of several turns "
                "needs; save one there as chat_template.jinja"
            )
        return "\n\n".join(message["content"] for message in messages)

    def _refuse_dropped_texts(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raise a DataError if the chat template drops or changes texts of such a conversation.

        Marks stand for the texts, which a template may strip. Not here: tool calls and replies.
        """
        roles = tuple(message["role"] for message in messages)
        if (bool(tools), roles) in self._whole_turns:
            return
        marks = {n: f"{role} {n}{_PLAIN}" for n, role in enumerate(roles) if role != "tool"}
        marks = {n: mark for n, mark in marks.items() if not messages[n].get("tool_calls")}
        turns = [{**t, "content": marks[n]} if n in marks else t for n, t in enumerate(messages)]
        text = self.render(turns, generation_prompt=True, tools=tools)
        for number, mark in marks.items():
            if mark not in text:
                role = roles[number]
                remedy = ", or give no system message (data.system_prompt)"
                raise DataError(
                    f"{self.path}: its chat template drops or changes the text of the {role} "
                    "message; expected it in the prompt as it is, given as a string and not as a "
                    f"list of parts: correct the template{remedy if role == 'system' else ''}"
                )
        self._whole_turns.add((bool(tools), roles))

    def render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool = False,
        template: str | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """Render messages and tools with a chat template, by default the tokenizer's own; without
        tools, those of its arguments. A template that fails is a DataError."""
        taken = [self.form.taken(message) for message in messages]
        try:
            return self._rendered(taken, generation_prompt, template, tools)
        except Exception as error:  # a template is foreign code, which may raise anything
            for form in other_forms(taken):
                with suppress(Exception):
                    return self._rendered(form, generation_prompt, template, tools)
            raise DataError(
                f"{self.path}: its chat template fails on {messages!s:.300}: {error}; "
                "write the messages as it expects them, or correct the template"
            ) from error

    def _rendered(
        self,
        messages: Sequence[Message],
        generation_prompt: bool = False,
        template: str | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """Messages by a chat template, in the form in which they are given."""
        text = self._backend.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            tools=[dict(tool) for tool in tools or self._tools] or None,
            **self.template_kwargs,
        )
        return str(text)
