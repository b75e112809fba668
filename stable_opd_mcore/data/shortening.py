"""Messages that are too long lose their middle."""

from collections.abc import Sequence

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import Message


def shortened(
    messages: Sequence[Message], max_tokens: int, mark: str, tokenizer: Tokenizer
) -> tuple[list[Message], int]:
    """The messages with at most `max_tokens` tokens of text, and the number of those left out.

    The longest ones are cut to equal lengths, and `mark` replaces the middle of each.
    """
    ids_of = tokenizer.encode_many([message["content"] for message in messages])
    if sum(map(len, ids_of)) <= max_tokens:
        return [*messages], 0
    limit = _equal_limit(list(map(len, ids_of)), max_tokens)
    kept = limit - len(tokenizer.encode(mark))
    if kept <= 0:  # no room for the mark
        mark, kept = "", limit
    shorter, num_cut = [*messages], 0
    for place, ids in enumerate(ids_of):
        if len(ids) > limit:
            halves = ids[: kept - kept // 2], ids[len(ids) - kept // 2 :]
            # A cut may divide a character.
            head, tail = (tokenizer.decode(half).strip("\ufffd") for half in halves)
            shorter[place] = {**messages[place], "content": head + mark + tail}
            num_cut += len(ids) - kept
    return shorter, num_cut


def _equal_limit(lengths: Sequence[int], total: int) -> int:
    """The largest length to cut the longest ones to so that all together have at most `total`."""
    for place, length in enumerate(sorted(lengths)):
        share = total // (len(lengths) - place)
        if length > share:
            return share
        total -= length
    raise AssertionError("nothing has to be cut")
