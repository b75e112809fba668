"""Experts in MXFP4 are read as transformers reads them, and exported in bf16."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import export_hf, load_hf, stored_dtypes
from stable_opd_mcore.models.files.mxfp4 import dequantised
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.world import World
from tests.models import tiny

FIELDS = tiny.config("gpt_oss", intermediate_size=64, num_hidden_layers=2, layer_types=None)


def test_every_code_at_every_exponent_is_that_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    wanted = convert_moe_packed_tensors(blocks[None], scales[None])[0].t()
    assert wanted.dtype == torch.bfloat16
    assert torch.equal(dequantised(blocks, scales).view(torch.int16), wanted.view(torch.int16))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A directory in the format that OpenAI publishes, with random matrices."""
    directory = tmp_path / "packed"
    model = tiny.transformer(FIELDS, seed=1).bfloat16()
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    content = load_file(file)
    for name in [name for name in content if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = content.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        content[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        content[f"{name}_scales"] = torch.randint(119, 125, shape, dtype=torch.uint8)
    save_file(content, file, {"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(fields | {"quantization_config": method}))
    return directory


def test_files_in_mxfp4_are_loaded_as_by_transformers_and_exported_in_bf16(
    packed: Path, world: World, tmp_path: Path
) -> None:
    architecture = read_architecture(packed)
    assert architecture.mxfp4
    assert stored_dtypes(packed, architecture) == {"BF16"}
    chunks = build_model(architecture, world, precision="bf16", seed=None)
    load_hf(chunks, packed)
    export_hf(chunks, tmp_path / "out", base=packed)
    assert not read_architecture(tmp_path / "out").mxfp4
    exported = load_file(tmp_path / "out" / "model.safetensors")
    unpacked = AutoModelForCausalLM.from_pretrained(
        packed, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = unpacked.state_dict()
    assert exported.keys() == wanted.keys() == again.state_dict().keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, wanted[name]), name
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        (
            "scales",
            lambda tensor: tensor[:, 1:],
            r"proj_scales has shape .* expected \(8, 128, 1\)",
        ),
        ("blocks", lambda tensor: tensor.bfloat16(), "proj_blocks has dtype BF16, expected .* U8"),
        ("scales", lambda tensor: tensor.fill_(255), "gate_up_proj_blocks holds NaN or infinity"),
    ],
)
def test_damaged_blocks_and_scales_are_refused(part, changed, message, packed, world) -> None:
    file = packed / "model.safetensors"
    content = load_file(file)
    name = next(name for name in sorted(content) if name.endswith(f"gate_up_proj_{part}"))
    content[name] = changed(content[name]).contiguous()
    save_file(content, file, {"format": "pt"})
    chunks = build_model(read_architecture(packed), world, seed=None)
    with pytest.raises(UserError, match=message):
        load_hf(chunks, packed)
