"""Exports are loaded by the oldest release of transformers that has their family.

`make old-transformers` installs the releases. Each reads in a process of its own, with this
environment's torch, and has the trainer's log-probabilities. Not here: adapters.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.description.families import FAMILIES
from stable_opd_mcore.models.files.huggingface import export_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from tests.models import tiny

RELEASES = Path(__file__).parents[2] / ".venv-old"
OLDEST = {
    "4.37.2": ("qwen2", "llama", "mistral"),
    "4.50.0": ("gemma3", "gemma3_text"),
    "4.51.3": ("qwen3", "qwen3_moe"),
    "4.54.0": ("deepseek_v2", "deepseek_v3", "glm4_moe"),  # V3 since 4.51, but not Moonlight
    "4.55.0": ("gpt_oss",),
    "4.57.1": ("qwen3_next", "qwen3_vl"),
    "5.0.0": ("glm4_moe_lite",),
    "5.2.0": ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
}
TOKENS = list(range(3, 20)) * 2
READ = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__ == sys.argv[1]
for path in sys.argv[2:]:
    AutoTokenizer.from_pretrained(path)
    auto = AutoModelForCausalLM
    if "vision_config" in open(f"{path}/config.json").read() and sys.argv[1] < "5":
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(path).eval()
    with torch.no_grad():
        found = model(torch.tensor([json.loads(sys.stdin.readline())])).logits[0].float()
    print(path, float((found.log_softmax(-1) - torch.load(f"{path}.pt")).abs().max()))
"""
pytestmark = pytest.mark.cluster


def test_every_family_has_its_oldest_release():
    assert sorted(sum(OLDEST.values(), ())) == sorted(FAMILIES)


def published(family: str) -> dict:
    """A tiny config with the rotary settings of the family's published files."""
    fields = tiny.config(family)
    inner = fields.get("text_config", fields)
    if family == "gpt_oss":  # releases before 4.56 compute YaRN's factor, 32, from the window
        inner["max_position_embeddings"] = 32 * 64
    if family in (*OLDEST["5.0.0"], *OLDEST["5.2.0"]):
        return fields
    rope = {**inner.pop("rope_parameters")}
    if family in OLDEST["4.50.0"]:
        del inner["layer_types"]
        inner["sliding_window_pattern"] = 2
        inner["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = {**rope["full_attention"]}
    if family == "deepseek_v2":  # 5.2.0 and older releases do not read them
        del rope["mscale"], rope["mscale_all_dim"]
    inner |= {k: rope.pop(k) for k in ("rope_theta", "partial_rotary_factor") if k in rope}
    if family == "qwen3_vl" or rope.get("rope_type", "default") != "default":
        inner["rope_scaling"] = rope
    return fields


@pytest.mark.parametrize("release", OLDEST)
def test_the_oldest_release_reads_what_is_exported(release, world, tmp_path):
    installed = RELEASES / release
    if not installed.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"no {installed}: `make old-transformers` installs it")
    batch = tiny.microbatch([len(TOKENS)])
    batch.tokens_T[:] = torch.tensor(TOKENS)
    paths = [tmp_path / family for family in OLDEST[release]]
    for path in paths:
        fields, base = published(path.name), tmp_path / f"{path.name}_base"
        tiny.transformer(fields, 0).save_pretrained(base)
        chunks = build_model(read_architecture(fields), world, seed=1)
        export_hf(chunks, path, base=base, save_tokenizer=Tokenizer.load("synthetic").save)
        head = output_head(chunks)
        assert head is not None
        with torch.no_grad():
            logits = (forward_hidden(chunks[0], batch) @ head.weight_VH.T)[:, : tiny.VOCAB_SIZE]
        torch.save(logits.log_softmax(-1), f"{path}.pt")
    found = subprocess.run(
        [sys.executable, "-c", READ, release, *map(str, paths)],
        env=os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"},
        input=f"{json.dumps(TOKENS)}\n" * len(paths),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    gaps = [float(line.split()[-1]) for line in found.stdout.splitlines()]
    assert len(gaps) == len(paths)
    assert max(gaps) < 1e-5, found.stdout
