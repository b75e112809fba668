"""Whether the oldest release of transformers that has a family loads an export of it.

    python -m benchmarks.old_transformers write DIRECTORY            # in the project's environment
    python benchmarks/old_transformers.py read DIRECTORY FAMILY...   # with the other release

`write` exports a small random model of each family, with a tokenizer, and keeps its
log-probabilities of a text. `read` loads them with AutoModelForCausalLM and AutoTokenizer, and
prints the largest difference. It imports nothing of the project.
"""

import json
import sys
from pathlib import Path

FAMILIES = ("qwen2", "llama", "mistral", "qwen3", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5")
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
    for family in FAMILIES:
        fields = tiny.config(family)
        inner = fields.get("text_config", fields)
        if family not in ("gpt_oss", "qwen3_5"):  # as published; of these two the newer form is
            share = {k: v for k, v in inner.pop("rope_parameters").items() if "partial" in k}
            inner |= {"rope_theta": 10000.0} | share
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for family in families:
        path = directory / family
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path).eval()
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
