"""Small model directories with a real tokenizer, and what a mutation of one changes.

    write_model(tmp_path / "teacher", rename={"<|im_start|>": "<user>"})

Every byte is a token; the special tokens and the chat template are those of Qwen2.5, ids from 256.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stable_opd_mcore.commands.check.checklist import check_pair
from stable_opd_mcore.commands.check.finding import Finding
from tests.train.runs import tiny_architecture

TURN = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
TEMPLATE = (
    "{% for message in messages %}"
    + TURN
    + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|box_start|>", "<s>")
CONFIG = tiny_architecture(32, 2, vocab_size=272, eos_token_id=256, max_position_embeddings=512)


def write_model(
    directory: Path,
    *,
    rename: dict[str, str] | None = None,
    added: tuple[str, ...] = (),
    template: str | None = TEMPLATE,
    swap: tuple[str, str] | None = None,
    bos: str | None = None,
    add_bos: bool = False,
    **settings: Any,
) -> str:
    """A directory with tokenizer, template, config.json and generation_config.json; its path.

    Args:
        rename: names of special tokens that change, in the template too.
        added: more special tokens, after the others.
        swap: two base tokens that exchange their ids.
        settings: of config.json; None removes a key.
    """
    renamed = rename or {}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    if swap:
        first, second = swap
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    special = [renamed.get(name, name) for name in (*SPECIAL, *added)]
    raw.add_special_tokens(special)
    if add_bos:
        from tokenizers import processors

        raw.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single=f"{bos} $A", special_tokens=[(bos, raw.token_to_id(bos))]
        )
    for old, new in renamed.items():
        template = template and template.replace(old, new)
    backend = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=special[0], bos_token=bos, chat_template=template
    )
    backend.save_pretrained(str(directory))
    fields = {key: value for key, value in {**CONFIG, **settings}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(fields))
    generation = {"eos_token_id": fields.get("eos_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return str(directory)


def findings(tmp_path: Path, student: dict[str, Any], teacher: dict[str, Any]) -> list[Finding]:
    """What the checks find in a student and a teacher with these mutations."""
    paths = [
        write_model(tmp_path / name, **mutation)
        for name, mutation in (("student", student), ("teacher", teacher))
    ]
    return list(check_pair(*paths).findings)


def the(found: list[Finding], words: str) -> Finding:
    """The one finding whose title has these words."""
    matching = [finding for finding in found if words in finding.title]
    assert len(matching) == 1, [finding.title for finding in found]
    return matching[0]
