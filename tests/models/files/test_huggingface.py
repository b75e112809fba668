"""Logits equal those of transformers to 1e-5 in fp32; loaded and exported files are bit-identical.

A damaged directory is refused with the file's and the tensor's name before any weight changes.
"""

import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.description.families import FAMILIES
from stable_opd_mcore.models.files.huggingface import export_hf, load_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.parallel.world import World
from tests.models import tiny
from tests.models.description.test_architecture import FREQUENCIES, LLAMA3, SCALED

INDEX = "model.safetensors.index.json"
LLAMA3_1 = LLAMA3 | FREQUENCIES | {"factor": 8.0}
YARN_OF_DEEPSEEK = {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}


MODELS = {model_type: tiny.config(model_type) for model_type in FAMILIES} | {
    "qwen2 tied": tiny.config("qwen2", tie_word_embeddings=True),
    "qwen3 tied": tiny.config("qwen3", tie_word_embeddings=True),
    "qwen3_moe not normalised": tiny.config("qwen3_moe", norm_topk_prob=False),
    "qwen3_5_moe stacked": tiny.config("qwen3_5_moe"),
    "llama": tiny.config("llama", num_key_value_heads=4),
    "llama 3.1": tiny.config("llama", rope_parameters=LLAMA3_1),
    "qwen3 yarn": tiny.config("qwen3", rope_parameters=SCALED),
    "qwen3_vl tied yarn": tiny.config(
        "qwen3_vl", tie_word_embeddings=True, rope_parameters=tiny.SECTIONS | SCALED
    ),
    "llama yarn": tiny.config("llama", rope_parameters=SCALED | YARN_OF_DEEPSEEK),
    "llama linear": tiny.config(
        "llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "llama biases": tiny.config("llama", attention_bias=True),
    "qwen3_moe biases": tiny.config("qwen3_moe", attention_bias=True),
    "mistral window": tiny.config("mistral", sliding_window=5),
    "qwen2 window": tiny.config("qwen2", **tiny.WINDOWS),
    "qwen3 window and biases": tiny.config("qwen3", attention_bias=True, **tiny.WINDOWS),
}


def _save_transformers_model(fields: dict, directory: Path, *, stacked: bool = False):
    """stacked: as published, where experts are stacked as in memory, and multi-token prediction has
    tensors that transformers ignores."""
    model = tiny.transformer(fields, seed=1)
    # Random norms and biases: their initial ones and zeros would hide that they are not loaded.
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            is_weight = isinstance(weight, torch.nn.Parameter) or "correction_bias" in name
            if not is_weight:
                continue
            if weight.dim() == 1 or name.endswith("_bias"):
                weight.add_(torch.randn_like(weight), alpha=0.2)
            if fields["model_type"] == "gpt_oss" and name.endswith("gate_up_proj"):
                weight.mul_(20)  # many gates and ups are clamped
    model.save_pretrained(directory, max_shard_size="40KB")
    if stacked:
        for file in directory.glob("model*"):
            file.unlink()
        mtp = {"mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 6, 4).bfloat16()}
        save_torch_state_dict(model.state_dict() | mtp, directory, max_shard_size="40KB")
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_exported_weights_equal_transformers(
    name: str, world: World, tmp_path: Path
) -> None:
    stacked = name.endswith("stacked")
    transformers_model = _save_transformers_model(MODELS[name], tmp_path / "in", stacked=stacked)
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    (tmp_path / "in" / "preprocessor_config.json").write_text("{}")
    chunks = build_model(read_architecture(tmp_path / "in"), world, seed=None)
    load_hf(chunks, tmp_path / "in")

    batch = tiny.microbatch([90, 9, 1, 17])
    head = output_head(chunks)
    assert head is not None
    logits_TV = forward_hidden(chunks[0], batch) @ head.weight_VH.T
    weights_TV = torch.linspace(-1, 1, logits_TV.numel()).view_as(logits_TV)
    (logits_TV * weights_TV).sum().backward()
    # With delta nets transformers itself is 5e-5 away from its result in fp64.
    tolerance = tiny.tolerance(chunks[0].architecture)
    begin = 0
    for length in (90, 9, 1, 17):
        part = slice(begin, begin + length)
        wanted = transformers_model(batch.tokens_T[None, part]).logits[0]
        torch.testing.assert_close(logits_TV[part], wanted, rtol=1e-5, atol=tolerance)
        (wanted * weights_TV[part]).sum().backward()
        begin += length

    before = os.umask(0o027)
    export_hf(chunks, tmp_path / "out", base=tmp_path / "in")
    os.umask(before)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o640
    original = {}
    for file in (tmp_path / "in").glob("*.safetensors"):
        original |= load_file(file)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], original[key]) for key in original)
    has_other_parts = bool(chunks[0].architecture.family.carried)
    assert (tmp_path / "out" / "preprocessor_config.json").is_file() == has_other_parts
    again = type(transformers_model).from_pretrained(tmp_path / "out")
    with torch.no_grad():
        tokens = batch.tokens_T[None, :60]
        assert torch.equal(again(tokens).logits, transformers_model(tokens).logits)
    for model in (chunks[0], transformers_model):  # gradients by the names of files
        _put_gradients_in_place_of_weights(model)
    transformers_model.save_pretrained(tmp_path / "gradients")
    wanted_of = load_file(tmp_path / "gradients" / "model.safetensors")
    # A gradient below 1e-3 of the largest is a sum that cancels, such as that of a gate's bias.
    least = 1e-3 * max(wanted.abs().max() for wanted in wanted_of.values())
    for name, gradient in tiny.file_tensors(chunks):
        error, scale = (gradient - wanted_of[name]).abs().max(), wanted_of[name].abs().max()
        allowed = 2 * tolerance * max(scale, least)
        assert error <= allowed, f"the gradient of {name} differs by {error:.1e}"


@torch.no_grad()
def _put_gradients_in_place_of_weights(model) -> None:
    for weight in model.parameters():
        if weight.grad is not None:  # a text has none in the part for images
            weight.copy_(weight.grad)


def test_bf16_weights_are_loaded_and_exported_bit_identically(world: World, tmp_path: Path) -> None:
    """The model also computes in bf16."""
    model = _save_transformers_model(MODELS["qwen3"], tmp_path / "fp32").bfloat16()
    model.save_pretrained(tmp_path / "in")
    chunks = build_model(read_architecture(tmp_path / "in"), world, precision="bf16")
    load_hf(chunks, tmp_path / "in")
    export_hf(chunks, tmp_path / "out")
    original = load_file(tmp_path / "in" / "model.safetensors")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[key], original[key]) for key in original)
    hidden_TH = forward_hidden(chunks[0], tiny.microbatch([7, 5]))
    assert hidden_TH.dtype == torch.bfloat16
    assert hidden_TH.isfinite().all()


@pytest.fixture(scope="module")
def checkpoint(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "qwen3"
    export_hf(build_model(tiny.architecture("qwen3"), world), directory, max_file_bytes=30_000)
    return directory


def _assert_refused(
    directory: Path, world: World, match: str, model_type: str = "qwen3", **changes
) -> None:
    chunks = build_model(tiny.architecture(model_type, **changes), world, seed=8)
    before = [weight.clone() for weight in chunks[0].parameters()]
    with pytest.raises(ValueError, match=match):
        load_hf(chunks, directory)
    after = list(chunks[0].parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_weights_of_another_architecture_are_refused(checkpoint: Path, world: World) -> None:
    _assert_refused(
        checkpoint, world, r"shape \(53, 32\), expected \(53, 40\).*give a comp", hidden_size=40
    )
    _assert_refused(checkpoint, world, r"layers.4\..* is missing", num_hidden_layers=5)
    _assert_refused(checkpoint, world, r"layers.3\..* no place in the model", num_hidden_layers=3)
    _assert_refused(checkpoint, world, r"q_proj.bias is missing", model_type="qwen2")


def _without(file: Path, name: str) -> None:
    save_file({key: value for key, value in load_file(file).items() if key != name}, file)


def _quantised(file: Path, name: str) -> None:
    content = load_file(file)
    save_file(content | {name: content[name].to(torch.int8)}, file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file, _: file.write_bytes(file.read_bytes()[:-100]), "{file}: not readable, prob"),
        (_without, "{name} is not in this file"),
        (_quantised, "{name} has dtype I8"),
        (lambda file, _: file.unlink(), "{file}: no such file"),
        (lambda file, _: (file.parent / INDEX).unlink(), "neither model.safetensors nor"),
    ],
)
def test_damaged_directories_are_refused(
    damage, message: str, checkpoint: Path, world: World, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint, tmp_path / "copy")
    file = sorted(directory.glob("*.safetensors"))[1]
    name = min(load_file(file))
    damage(file, name)
    _assert_refused(directory, world, message.format(file=file.name, name=name))
    for whole in (checkpoint / file.name, checkpoint / INDEX):  # downloaded again
        shutil.copy(whole, directory)
    load_hf(build_model(tiny.architecture("qwen3"), world, seed=8), directory)


def test_failed_export_keeps_the_previous_directory(world: World, tmp_path: Path) -> None:
    """The partly written directory is removed."""
    chunks = build_model(tiny.architecture("qwen3"), world)
    export_hf(chunks, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    torch.nn.init.zeros_(chunks[0].output_layer.weight)
    chunks[0].architecture = replace(chunks[0].architecture, source={"unwritable": {1, 2}})
    with pytest.raises(TypeError):
        export_hf(chunks, tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "neither model.safetensors nor"),
        (lambda base: (base / "a.safetensors").unlink(), "a.safetensors: no such file"),
        (lambda base: os.truncate(base / "a.safetensors", 50), "a.safetensors: not readable"),
        (
            lambda base: save_file({"other": torch.ones(1)}, base / "a.safetensors"),
            "tensor mtp.norm.weight is not in this file",
        ),
    ],
)
def test_a_base_that_was_damaged_since_the_start_ends_an_export(
    damage, message: str, world: World, tmp_path: Path
) -> None:
    """An older export stays, and the same call writes the new one once the base is there again."""
    base, out, mtp = tmp_path / "base", tmp_path / "out", {"mtp.norm.weight": torch.ones(3)}
    chunks = build_model(tiny.architecture("qwen3_5"), world)

    def write_base() -> None:
        base.mkdir(exist_ok=True)
        save_file(mtp, base / "a.safetensors")
        (base / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(mtp, "a.safetensors")}))

    write_base()
    export_hf(chunks, out, base=base)
    damage(base)
    with pytest.raises(UserError, match=rf"out is not written: .*{message}.* restore the base"):
        export_hf(chunks, out, base=base)
    assert torch.equal(load_file(out / "model.safetensors")["mtp.norm.weight"], torch.ones(3))
    mtp["mtp.norm.weight"] += 1
    write_base()
    export_hf(chunks, out, base=base)
    assert torch.equal(load_file(out / "model.safetensors")["mtp.norm.weight"], 1 + torch.ones(3))


def test_non_finite_weights_are_neither_loaded_nor_exported(
    checkpoint: Path, world: World, tmp_path: Path
) -> None:
    """The message names the file and the tensor; an older export stays."""
    directory = shutil.copytree(checkpoint, tmp_path / "copy")
    damaged = min(directory.glob("*.safetensors"))
    content = load_file(damaged)
    name = min(content)
    content[name].view(-1)[3] = torch.inf
    save_file(content, damaged)
    chunks = build_model(tiny.architecture("qwen3"), world)
    with pytest.raises(UserError, match=f"{damaged.name}: tensor {name} holds NaN or infinity"):
        load_hf(chunks, directory)
    chunks = build_model(tiny.architecture("qwen3"), world)
    torch.nn.init.constant_(chunks[0].decoder.final_layernorm.weight, torch.nan)
    with pytest.raises(UserError, match=r"copy is not written: .*model.norm.weight"):
        export_hf(chunks, directory)
    assert load_file(damaged).keys() == content.keys()


def test_a_weight_that_the_table_does_not_name_is_an_error(checkpoint: Path, world: World) -> None:
    """A model is built without weights, so one that nothing fills would hold any values."""
    chunks = build_model(tiny.architecture("qwen3"), world, seed=None)
    chunks[0].decoder.register_parameter("sinks", torch.nn.Parameter(torch.empty(4)))
    with pytest.raises(KeyError, match=r"decoder\.sinks"):
        load_hf(chunks, checkpoint)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "a JSON list, not an object"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"{}", "weight_map=None should be an object"),
        (b'{"weight_map": 3}', "weight_map=3 should be an object"),
        (b'{"weight_map": {"lm_head.weight": 5}}', "lm_head.weight=5 should be the name of a file"),
    ],
)
def test_unexpected_index_is_refused(
    index: bytes, words: str, checkpoint: Path, world: World, tmp_path: Path
) -> None:
    (tmp_path / INDEX).write_bytes(index)
    _assert_refused(tmp_path, world, f"index.json: {words}.*download the model again")


def test_export_beyond_the_free_space_is_refused(world: World, tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk; the previous export stays."""
    chunks = build_model(tiny.architecture("qwen3"), world)
    export_hf(chunks, tmp_path / "model")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"model: cannot be written: .*; needed 0.1 MiB, free"):
            export_hf(chunks, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    load_hf(chunks, tmp_path / "model")
