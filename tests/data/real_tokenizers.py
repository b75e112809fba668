"""Five published chat templates, with a tokenizer each.

Qwen2.5-Instruct and Qwen3 have the ids of Qwen2.5-Math's tokenizer, so it is read for them, too;
tokens of Qwen3 that it lacks are added.
"""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from stable_opd_mcore.data.chat import Tokenizer
from tests.real_data import real_data

MATH, QWEN25, QWEN3 = "Qwen2.5-Math-1.5B", "Qwen2.5-Instruct", "Qwen3"
THINKING, R1 = "Qwen3-Thinking-2507", "DeepSeek-R1-Distill-Qwen"


@cache
def real_tokenizer(name: str, **template_kwargs: Any) -> Tokenizer:
    if name in (MATH, R1):
        return Tokenizer.load(str(real_data(f"tokenizers/{name}")))
    config = json.loads((real_data(f"tokenizers/{name}") / "tokenizer_config.json").read_text())
    backend = PreTrainedTokenizerFast.from_pretrained(str(real_data(f"tokenizers/{MATH}")))
    for number, token in sorted(config["added_tokens_decoder"].items(), key=lambda kv: int(kv[0])):
        if int(number) >= len(backend):
            backend.add_tokens(AddedToken(**token), special_tokens=token["special"])
        assert backend.convert_tokens_to_ids(token["content"]) == int(number)
    backend.chat_template = config["chat_template"]
    return Tokenizer(backend, name, template_kwargs=template_kwargs)
