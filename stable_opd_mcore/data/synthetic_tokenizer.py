"""The tokenizer of the arithmetic task, built without a file.

Not here: the task itself (synthetic.py), prompts and stop tokens (chat.py).
"""

# Not strict: Transformers' types are incomplete.
# pyright: basic

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stable_opd_mcore.data.synthetic import PAD, PROMPT_END, SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.errors import DataError

SYNTHETIC = "synthetic"
# The stop token ends an assistant turn; PROMPT_END ends a user turn.
_SYNTHETIC_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}" + PROMPT_END + "{% endif %}{% endfor %}"
)


def check_symbols(texts: Sequence[str]) -> None:
    """Raise a DataError for a character that is no token."""
    for text in texts:
        strange = sorted(set(text).difference(VOCABULARY))
        if strange:
            raise DataError(
                f"{text[:60]!r} has {''.join(strange)!r}, which the synthetic tokenizer lacks; it "
                "reads only the arithmetic task: set tokenizer.path to a model's directory"
            )


def synthetic_backend() -> PreTrainedTokenizerFast:
    """A token for each character of the task."""
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(vocabulary))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=STOP,
        pad_token=PAD,
        additional_special_tokens=[SECOND_STOP],
        chat_template=_SYNTHETIC_TEMPLATE,
    )
