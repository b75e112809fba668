"""The student's tokenizer: prompts by its chat template, golden responses, stop tokens.

Token ids are the model's own; nothing is translated between vocabularies. A golden response does
not pass through the template's assistant turn, because some templates (DeepSeek-R1's) delete
everything before </think> there. Its text follows the generation prompt directly, and the token
that ends an assistant turn follows its text.

Not here: the check of lengths against a window (data/prompts.py).
"""

# Not strict: Transformers' types are incomplete.
# pyright: basic

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from stable_opd_mcore.data.synthetic import PAD, PROMPT_END, SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.errors import DataError, UserError

SYNTHETIC = "synthetic"
_THINK, _THINK_END = "<think>", "</think>"
_MARK = "assistant-turn-mark"
_JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# The stop token ends an assistant turn; PROMPT_END ends a user turn.
_SYNTHETIC_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}" + PROMPT_END + "{% endif %}{% endfor %}"
)


class Tokenizer:
    """A Hugging Face fast tokenizer with its chat template and its stop tokens.

    `stop_token_ids` holds every id that ends a response; the first one ends golden responses.
    """

    def __init__(
        self,
        backend: PreTrainedTokenizerFast,
        path: str,
        stop_token_ids: Sequence[int] | None = None,
    ):
        self.path = path
        self._backend = backend
        self._is_synthetic = backend.get_vocab().keys() == set(VOCABULARY)
        model_dir = Path(path) if Path(path).is_dir() else None
        self.stop_token_ids = resolve_stop_ids(model_dir, self, stop_token_ids)

    @classmethod
    def load(cls, path: str, stop_token_ids: Sequence[int] | None = None) -> Tokenizer:
        """From a directory with tokenizer.json, or the built-in "synthetic" one.

        Args:
            stop_token_ids: replaces the ids found in the directory (see `resolve_stop_ids`).

        Raises:
            DataError: no such directory, no tokenizer.json in it, files that cannot be loaded, or
                no valid stop token.
        """
        if path == SYNTHETIC:
            return cls(_synthetic_backend(), SYNTHETIC, stop_token_ids)
        directory = Path(path)
        if not directory.is_dir():
            raise DataError(
                f"{path}: no such tokenizer directory; give a local model directory, "
                f"or {SYNTHETIC!r}"
            )
        if not (directory / "tokenizer.json").is_file():
            raise DataError(
                f"{path}: no tokenizer.json in it; download the model with its tokenizer, "
                "or set tokenizer.path"
            )
        try:
            backend = PreTrainedTokenizerFast.from_pretrained(path)
        except Exception as error:  # tokenizers raises no narrower class
            for name in _JSON_FILES:
                if (directory / name).is_file():
                    _read_json(directory / name)
            raise DataError(
                f"{path}: its tokenizer files cannot be loaded: {error}; download them again"
            ) from error
        return cls(backend, path, stop_token_ids)

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json, its config and its chat template, for `load`."""
        self._backend.save_pretrained(str(directory))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows."""
        return len(self._backend)

    @property
    def eos_token_id(self) -> int | None:
        eos = self._backend.eos_token_id
        return eos if isinstance(eos, int) else None

    @property
    def has_template(self) -> bool:
        return self._backend.chat_template is not None

    @cached_property
    def turn_end_id(self) -> int | None:
        """The token that ends an assistant turn of the chat template; None without one."""
        if not self.has_template:
            return None
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        tail = self.encode(self._render(messages, generation_prompt=False).rpartition(_MARK)[2])
        added = set(self._backend.get_added_vocab().values())
        return next((token for token in tail if token in added), None)

    @cached_property
    def _control_tokens(self) -> re.Pattern[str] | None:
        """Matches the text of added tokens that are special, stop a response or mark a turn.

        Not every mark of a turn is special (R1-Distill's are not). Think tokens are content.
        """
        messages = [{"role": "user", "content": "0"}, {"role": "assistant", "content": _MARK}]
        turns = self._render(messages, generation_prompt=True) if self.has_template else ""
        control = {*self.stop_token_ids, *self.encode(turns.replace(_MARK, ""))}
        texts = [
            token.content
            for token_id, token in self._backend.added_tokens_decoder.items()
            if (token.special or token_id in control)
            and token.content.strip() not in ("", _THINK, _THINK_END)
        ]
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def control_token_in(self, text: str) -> str | None:
        """The first control token that `encode` would find in `text`; None without one."""
        match = self._control_tokens.search(text) if self._control_tokens else None
        return match.group() if match else None

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without a template and without added tokens.

        Raises:
            DataError: the synthetic tokenizer lacks a character.
        """
        if not texts:
            return []
        if self._is_synthetic:
            _check_symbols(texts)
        encodings = self._backend.backend_tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response without the stop token at its end; it keeps special tokens."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self._backend.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def encode_prompt(
        self, problem: str, template: str = "{problem}", system: str | None = None
    ) -> tuple[int, ...]:
        """Ids of the problem after prompt template, chat template and generation prompt."""
        return tuple(self.encode(self.render_prompt(problem, template, system)))

    def render_prompt(
        self, problem: str, template: str = "{problem}", system: str | None = None
    ) -> str:
        """The text that `encode_prompt` encodes.

        Without a chat template: the system prompt, a blank line, the problem.

        Raises:
            DataError: a prompt template without "{problem}", or a chat template that fails.
        """
        if "{problem}" not in template:
            raise DataError(
                f"data.prompt_template {template!r} lacks {{problem}}: put it where problems go"
            )
        # Not str.format: LaTeX braces in templates are text.
        user = template.replace("{problem}", problem)
        if not self.has_template:
            return user if system is None else f"{system}\n\n{user}"
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self._render([*messages, {"role": "user", "content": user}], generation_prompt=True)

    def response_text(self, solution: str, prompt_text: str) -> str:
        """A golden solution as the response to a prompt, which may have opened <think> already.

        A solution without </think> then begins with it, in Qwen3's form for an empty thought.
        Without it the model would learn to leave the thought open.
        """
        if not opens_thinking(prompt_text):
            return solution
        if _THINK_END not in solution:
            return f"\n{_THINK_END}\n\n{solution}"
        opening = solution.lstrip()
        return opening.removeprefix(_THINK).lstrip("\n") if opening.startswith(_THINK) else solution

    def encode_response(
        self, solution: str, prompt_text: str = "", complete: bool = True
    ) -> tuple[int, ...]:
        """Ids of a golden response; a complete one ends with the first stop token."""
        ids = self.encode(self.response_text(solution, prompt_text))
        return (*ids, self.stop_token_ids[0]) if complete else tuple(ids)

    def _render(self, messages: list[dict[str, str]], generation_prompt: bool) -> str:
        try:
            text = self._backend.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a template is foreign code, which may raise anything
            raise DataError(
                f"{self.path}: its chat template fails on {messages!s:.300}: {error}"
            ) from error
        assert isinstance(text, str)
        return text


def opens_thinking(prompt_text: str) -> bool:
    """Whether a prompt ends with <think>, which the response must then close."""
    return prompt_text.rstrip().endswith(_THINK)


def resolve_stop_ids(
    model_dir: str | Path | None, tokenizer: Tokenizer, override: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Every id that ends a response; generation stops on all of them.

    `override` if given. Otherwise the token that ends an assistant turn of the chat template, then
    eos_token_id of generation_config.json, of config.json and of the tokenizer, each once. The
    sources disagree: Qwen2.5-Math's template ends turns with 151645, its configs hold 151643.

    Raises:
        DataError: no id in any source, or an id outside the vocabulary.
    """
    if override is not None:
        candidates = list(override)
    else:
        candidates = [tokenizer.turn_end_id]
        for name in ("generation_config.json", "config.json"):
            candidates.extend(_eos_of(Path(model_dir) / name) if model_dir is not None else [])
        candidates.append(tokenizer.eos_token_id)
    ids = tuple(dict.fromkeys(token for token in candidates if token is not None))
    if not ids:
        raise DataError(
            f"{tokenizer.path}: no stop token found; set student.stop_token_ids (teacher likewise)"
        )
    outside = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
    if outside:
        raise DataError(
            f"{tokenizer.path}: stop tokens {outside} are outside the vocabulary of "
            f"{tokenizer.vocab_size}; mend stop_token_ids or the model's config.json"
        )
    return ids


@dataclass(frozen=True)
class RenamedToken:
    """An added token whose id has different names in two tokenizers; None: no such id there."""

    token_id: int
    first: str | None
    second: str | None


def same_vocabulary(first: Tokenizer, second: Tokenizer) -> list[RenamedToken]:
    """Check that two tokenizers share their base vocabulary; return the added tokens that differ.

    Added tokens may have different names under one id (R1-Distill's User mark is Qwen's
    <|im_start|>) or exist on one side only.

    Raises:
        UserError: a base token differs; the message names both paths and the first such id.
    """
    names = [_names_by_id(tokenizer) for tokenizer in (first, second)]
    added = [set(tokenizer._backend.get_added_vocab().values()) for tokenizer in (first, second)]
    renamed = []
    for token_id in sorted(names[0].keys() | names[1].keys()):
        a, b = names[0].get(token_id), names[1].get(token_id)
        if a == b:
            continue
        is_base = (a is not None and token_id not in added[0]) or (
            b is not None and token_id not in added[1]
        )
        if is_base:
            raise UserError(
                f"{first.path} and {second.path} have different tokenizers: id {token_id} is "
                f"{a!r} in the first and {b!r} in the second; on-policy distillation needs a "
                "teacher with the student's vocabulary"
            )
        renamed.append(RenamedToken(token_id, a, b))
    return renamed


def _names_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: name for name, token_id in tokenizer._backend.get_vocab().items()}


def _eos_of(path: Path) -> list[int | None]:
    if not path.is_file():
        return []
    eos = _read_json(path).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    if not all(token is None or type(token) is int for token in ids):
        raise DataError(
            f"{path}: eos_token_id is {eos!s:.80}; expected a token id or a list of them"
        )
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: a JSON {type(values).__name__}, not an object")
    return values


def _check_symbols(texts: Sequence[str]) -> None:
    known = set(VOCABULARY)
    for text in texts:
        strange = sorted(set(text) - known)
        if strange:
            raise DataError(
                f"{text[:60]!r} has {''.join(strange)!r}, which the synthetic tokenizer lacks; it "
                "reads only the arithmetic task: set tokenizer.path to a model's directory"
            )


def _synthetic_backend() -> PreTrainedTokenizerFast:
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(VOCABULARY)}
    raw = RawTokenizer(models.WordLevel(vocabulary))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=STOP,
        pad_token=PAD,
        additional_special_tokens=[SECOND_STOP],
        chat_template=_SYNTHETIC_TEMPLATE,
    )
