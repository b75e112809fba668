"""Which ids two tokenizers share, and which ids have different names in them."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.tokenizer_backend import load_backend
from stable_opd_mcore.errors import UserError


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer that encodes no text here."""

    path: str
    names_by_id: Mapping[int, str]
    added_ids: Set[int]  # ids of the tokens outside the base vocabulary


@dataclass(frozen=True)
class RenamedToken:
    """An added token whose id has different names in two tokenizers; None: no such id there."""

    token_id: int
    first: str | None
    second: str | None


def read_vocabulary(path: str) -> Vocabulary:
    """The ids in a directory with tokenizer.json; a DataError as `load_backend`."""
    backend = load_backend(path, needs_eos=False)
    names = {token_id: name for name, token_id in backend.get_vocab().items()}
    return Vocabulary(path, names, frozenset(backend.get_added_vocab().values()))


def same_vocabulary(
    first: Tokenizer | Vocabulary,
    second: Tokenizer | Vocabulary,
    remedy: str = "choose a teacher with the student's",
) -> list[RenamedToken]:
    """Check that two tokenizers share their base vocabulary; return the added tokens that differ.

    Added tokens may have different names under one id (R1-Distill's User mark is Qwen's
    <|im_start|>) or exist on one side only.

    Raises:
        UserError: a base token differs; the message names both paths and the first such id.
    """
    names = first.names_by_id, second.names_by_id
    added = first.added_ids, second.added_ids
    renamed: list[RenamedToken] = []
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
                f"{a!r} in the first and {b!r} in the second; expected one "
                f"vocabulary: {remedy}"
            )
        renamed.append(RenamedToken(token_id, a, b))
    return renamed
