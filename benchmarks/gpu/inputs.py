"""Prompts, a tokenizer and configs of any size, made on the spot: the suite reads no file.

The vocabulary is words w3, w4, ... so that a model's whole output head takes part; problems and
solutions are random words. Not here: models, which the parts build, and what is measured.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config

PROMPT_WORDS = 64


def write_inputs(folder: Path, vocab: int, prompts: int, solution_words: int) -> None:
    """`tokenizer/` with `vocab` words and `prompts.jsonl` with random problems and solutions."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, vocab))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{rng.randrange(3, vocab)}" for _ in range(count))

    rows = [
        {"problem": text(PROMPT_WORDS), "solution": text(solution_words)} for _ in range(prompts)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def qwen2(hidden: int, layers: int, heads: int, groups: int, ffn: int, vocab: int, **more: Any):
    """The config.json of a Qwen2 model, as a dict."""
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        **more,
    }


def config_of(folder: Path, name: str, **sections: Any) -> Config:
    """A Stable-OPD run over the inputs in `folder`; `sections` are merged over the defaults."""
    values: dict[str, Any] = {
        "run": {"name": name, "directory": str(folder)},
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {"train": {"path": str(folder / "prompts.jsonl"), "columns": {"answer": None}}},
        "kl": {"beta": 0.1},
        "mixture": {"lambda": 0.1},
        "checkpoint": {"every": 0},
        "evaluation": {"every": 0},
        "monitoring": {"tensorboard": False},
    }
    for section, fields in sections.items():
        values[section] = values.get(section, {}) | fields
    return parse_config(values, origin=name)
