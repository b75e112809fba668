"""Whether the oldest release of transformers that has a family loads an export of it.

    python -m benchmarks.old_transformers write DIRECTORY            # in the project's environment
    python benchmarks/old_transformers.py read DIRECTORY FAMILY...   # with the other release

`write` exports a small random model of each family, with a tokenizer, and keeps its
log-probabilities of a text. `read` loads them with AutoModelForCausalLM (Qwen3-VL: with
AutoModelForImageTextToText) and AutoTokenizer, and prints the largest difference. It imports
nothing of the project. An old release needs no environment of its own:

    pip install --target OLD --no-deps transformers==4.55.0 tokenizers==0.21.4 \\
        huggingface_hub==0.36.0
    PYTHONPATH=OLD python benchmarks/old_transformers.py read DIRECTORY gpt_oss
"""

import json
import sys
from pathlib import Path

OLDEST = {  # the first release that has the family
    **dict.fromkeys(("qwen2", "llama", "mistral"), "4.37.2"),
    **dict.fromkeys(("qwen3", "qwen3_moe"), "4.51.3"),
    "gpt_oss": "4.55.0",
    **dict.fromkeys(("qwen3_next", "qwen3_vl"), "4.57.1"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "5.2.0"),
}
TOKENS = list(range(3, 20)) * 2


def write(directory: Path) -> None:
    import torch

    from stable_opd_mcore.config.schema import ParallelConfig
    from stable_opd_mcore.data.chat import Tokenizer
    from stable_opd_mcore.models.description.architecture import read_architecture
    from stable_opd_mcore.models.files.huggingface import export_hf
    from stable_opd_mcore.models.gpt import build_model
    from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
    from stable_opd_mcore.parallel.world import start_world, stop_world
    from tests.models import tiny

    world = start_world(ParallelConfig(), seed=0)
    for family, release in OLDEST.items():
        fields = tiny.config(family)
        inner = fields.get("text_config", fields)
        if family == "gpt_oss":  # releases before 4.56 compute YaRN's factor, 32, from the window
            inner["max_position_embeddings"] = 32 * 64
        if release < "5":  # the form of its published files
            rope = inner.pop("rope_parameters")
            inner |= {k: rope.pop(k) for k in ("rope_theta", "partial_rotary_factor") if k in rope}
            inner |= {"rope_scaling": rope} if family in ("gpt_oss", "qwen3_vl") else {}
        tiny.transformer(fields, 0).save_pretrained(directory / f"{family}_base")
        chunks = build_model(read_architecture(fields), world, seed=1)
        base = directory / f"{family}_base"
        save = Tokenizer.load("synthetic").save
        export_hf(chunks, directory / family, base=base, save_tokenizer=save)
        batch = tiny.microbatch([len(TOKENS)])
        batch.tokens_T[:] = torch.tensor(TOKENS)
        head = output_head(chunks)
        assert head is not None
        with torch.no_grad():
            logits = (forward_hidden(chunks[0], batch) @ head.weight_VH.T)[:, : tiny.VOCAB_SIZE]
        torch.save(logits.log_softmax(-1), directory / f"{family}.pt")
    stop_world()


def read(directory: Path, families: list[str]) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    for family in families:
        path = directory / family
        tokenizer = AutoTokenizer.from_pretrained(path)
        auto = AutoModelForImageTextToText if family == "qwen3_vl" else AutoModelForCausalLM
        model = auto.from_pretrained(path).eval()
        with torch.no_grad():
            found = model(torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
        gap = float((found - torch.load(directory / f"{family}.pt")).abs().max())
        said = {
            "transformers": transformers.__version__,
            "family": family,
            "tokenizer": type(tokenizer).__name__,
            "largest difference": gap,
        }
        print(json.dumps(said))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        read(Path(sys.argv[2]), sys.argv[3:])
