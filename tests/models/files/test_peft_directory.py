"""Adapters in PEFT's form: what is written is the trained model, and is read back to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.files.huggingface import load_hf
from stable_opd_mcore.models.files.peft_directory import (
    export_adapter,
    is_adapter,
    unread_settings,
)
from stable_opd_mcore.models.files.peft_loading import check_adapter, load_adapter, merge_adapter
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.models.layers.factors import factors_of
from stable_opd_mcore.models.lora import adapt
from stable_opd_mcore.models.weights import iter_hf_tensors
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from tests.models import tiny
from tests.parallel.launch import run_ranks

LENGTHS = [60, 9, 1, 17]


def adapted(
    fields: dict[str, Any], world: World, base: Path | None = None, expert_rank: int | None = None
) -> list[Any]:
    """A model with factors whose B is not zero."""
    architecture = tiny.read_architecture(fields)
    chunks = build_model(architecture, world, seed=1)
    if base is not None:
        load_hf(chunks, base)
    adapt(chunks, LoraConfig(rank=4, alpha=8.0, expert_rank=expert_rank))
    tiny.redraw_factors(chunks, 3, std=0.1)
    return chunks


def logprobs_of(chunks: list[Any]) -> Tensor:
    hidden_TH = forward_hidden(chunks[0], tiny.microbatch(LENGTHS))
    head = output_head(chunks)
    assert head is not None
    return (hidden_TH @ head.weight_VH.T)[:, : tiny.VOCAB_SIZE].log_softmax(-1).detach()


def logprobs_by_transformers(model: Any) -> Tensor:
    tokens = tiny.microbatch(LENGTHS).tokens_T.split(LENGTHS)
    with torch.no_grad():
        logits = [model(input_ids=each[None]).logits[0] for each in tokens]
    return torch.cat(logits).float().log_softmax(-1)


@pytest.mark.parametrize(
    ("model_type", "num_matrices"),
    [("qwen2", 7), ("qwen3_vl", 7), ("gemma3", 7), ("qwen3_5_text", 12), ("gpt_oss", 4)],
)
def test_the_files_are_the_trained_model(model_type, num_matrices, world: World, tmp_path) -> None:
    fields = tiny.config(model_type)
    tiny.transformer(fields, 0).save_pretrained(tmp_path / "base")
    chunks = adapted(fields, world, tmp_path / "base")
    export_adapter(chunks, tmp_path / "adapter", "the/base")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert settings["base_model_name_or_path"] == "the/base"
    assert len(settings["target_modules"]) == num_matrices
    model = tiny.transformer(fields, 0)
    tiny.add_adapter(model, load_file(tmp_path / "adapter" / "adapter_model.safetensors"), settings)
    found, tolerance = logprobs_by_transformers(model), 2 * tiny.tolerance(chunks[0].architecture)
    torch.testing.assert_close(found, logprobs_of(chunks), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "model_type",
    [
        *("gemma3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gpt_oss"),
        *("glm4_moe_lite", "glm4_moe", "deepseek_v3", "deepseek_v2"),
    ],
)
def test_peft_loads_the_files(model_type, world: World, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    fields = tiny.config(model_type)
    tiny.transformer(fields, 0).save_pretrained(tmp_path / "base")
    chunks = adapted(fields, world, tmp_path / "base", expert_rank=2)
    export_adapter(chunks, tmp_path / "adapter", str(tmp_path / "base"))
    model = peft.PeftModel.from_pretrained(tiny.transformer(fields, 0), tmp_path / "adapter")
    found = logprobs_by_transformers(model.eval())
    tolerance = 2 * tiny.tolerance(chunks[0].architecture)
    torch.testing.assert_close(found, logprobs_of(chunks), rtol=0, atol=tolerance)


def test_other_mlps_than_experts_are_named_as_parameters(world: World, tmp_path) -> None:
    """If gate_proj and the others are named as modules, PEFT finds only those of the experts."""
    export_adapter(adapted(tiny.config("glm4_moe"), world), tmp_path, None)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert settings["target_parameters"] == [
        *("mlp.down_proj.weight", "mlp.experts.down_proj", "mlp.experts.gate_up_proj"),
        *("mlp.gate_proj.weight", "mlp.up_proj.weight", "shared_experts.down_proj.weight"),
        *("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"),
    ]


def test_fewer_ranks_of_experts_are_padded(world: World, tmp_path) -> None:
    fields = tiny.config("qwen3_moe")
    chunks = adapted(fields, world, expert_rank=2)
    export_adapter(chunks, tmp_path, None)
    pairs = load_file(tmp_path / "adapter_model.safetensors")
    assert all(4 in tensor.shape for tensor in pairs.values())
    for factors in factors_of(chunks):
        for name, a_RI, b_OR in zip(factors.entry.hf_names, factors.A, factors.B, strict=True):
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            product = 2.0 * pairs[f"{stem}B.weight"] @ pairs[f"{stem}A.weight"]
            torch.testing.assert_close(product, factors.scale * b_OR.detach() @ a_RI.detach())


CHOSEN = [  # family, matrices, those of an adapter that has one more or one fewer
    ("qwen3", ("q_proj", "v_proj"), ("v_proj",)),
    ("gpt_oss", ("gate_up_proj", "k_proj"), ("gate_up_proj", "down_proj", "k_proj")),
    ("qwen3_5_moe", ("experts.up_proj", "in_proj_z"), ("up_proj", "in_proj_z")),
    ("qwen3_moe", ("experts.down_proj",), None),
    ("deepseek_v3", ("q_proj", "kv_b_proj"), ("kv_b_proj",)),
]


@pytest.mark.parametrize(("family", "matrices", "others"), CHOSEN)
def test_chosen_matrices_in_rslora(family, matrices, others, world: World, tmp_path) -> None:
    """Written, read to train on and merged; an adapter of others says what to set."""
    fields, forms = tiny.config(family), {"rank": 4, "alpha": 8.0, "rslora": True}
    lora, other = (LoraConfig(**forms, matrices=each) for each in (matrices, others))
    architecture = tiny.read_architecture(fields)
    chunks = build_model(architecture, world, seed=1)
    adapt(chunks, lora)
    tiny.redraw_factors(chunks, 3)
    export_adapter(chunks, tmp_path, None)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["lora_alpha"] / settings["r"] == 4.0  # others do not know rsLoRA
    again = build_model(architecture, world, seed=1)
    adapt(again, lora)
    load_adapter(again, tmp_path, lora)
    for own, read in zip(factors_of(chunks), factors_of(again), strict=True):
        assert own.names == read.names
        assert all(map(torch.equal, own.parameters(), read.parameters()))
    plain = build_model(architecture, world, seed=1)
    merge_adapter(plain, tmp_path)
    for (name, tensor), (_, wanted) in zip(
        iter_hf_tensors(plain), iter_hf_tensors(chunks), strict=True
    ):
        torch.testing.assert_close(tensor, wanted, msg=name)
    with pytest.raises(UserError, match=r"set student\.lora\.matrices=\[") as refusal:
        check_adapter(tmp_path, architecture, other)
    remedy = str(refusal.value).rpartition("matrices=[")[2].rstrip("]").split(",")
    check_adapter(tmp_path, architecture, LoraConfig(**forms, matrices=tuple(remedy)))


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5", "qwen3_5_moe", "gemma3"])
def test_a_model_with_other_parts_has_an_adapter_for_both_of_its_classes(
    model_type, world: World, tmp_path
) -> None:
    chunks = adapted(tiny.config(model_type), world)
    export_adapter(chunks, tmp_path, "base")
    whole = tiny.transformer(tiny.config(model_type), 0)
    classes = [(tmp_path, whole)]
    if (tmp_path / "causal_lm").is_dir():
        text = tiny.transformer(tiny.config(f"{model_type}_text"), 0)
        classes.append((tmp_path / "causal_lm", text))
    assert len(classes) == (1 if model_type in ("qwen3_vl", "gemma3") else 2)  # no text class
    for directory, model in classes:
        settings = json.loads((directory / "adapter_config.json").read_text())
        pairs = load_file(directory / "adapter_model.safetensors")
        paths = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in pairs}
        known = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
        assert {path for path in paths if ".experts." not in path} <= known
        mapping = settings.get("auto_mapping") or {"base_model_class": None}
        assert (settings["task_type"] is None) == (model is whole)
        if model is whole:
            assert mapping["base_model_class"] == type(whole).__name__
            assert mapping["parent_library"] == type(whole).__module__


LAYOUT = {"tensor": 2, "pipeline": 2, "expert": 2, "sequence": True}


@pytest.mark.slow
def test_an_adapter_of_any_layout_is_read_on_any_other(tmp_path) -> None:
    run_ranks(1, write_and_read, str(tmp_path), "one", {})
    run_ranks(4, write_and_read, str(tmp_path), "four", LAYOUT)
    one, four = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "four")
    )
    assert one.keys() == four.keys()
    assert all(torch.equal(one[key], four[key]) for key in one)


def write_and_read(rank: int, world_size: int, path: str, name: str, parallel: dict) -> None:
    """Four ranks write what they have read from the files of one."""
    world = start_world(ParallelConfig(**parallel), seed=0)
    if name == "one":
        chunks = adapted(tiny.config("gpt_oss"), world)
    else:
        chunks = build_model(tiny.architecture("gpt_oss"), world)
        adapt(chunks, LoraConfig(rank=4, alpha=8.0))
        load_adapter(chunks, Path(path) / "one", LoraConfig(rank=4, alpha=8.0))
    export_adapter(chunks, Path(path) / name, None)
    stop_world()


@pytest.fixture
def saved(world: World, tmp_path) -> tuple[list[Any], Path]:
    chunks = adapted(tiny.config("qwen3"), world)
    export_adapter(chunks, tmp_path, None)
    return chunks, tmp_path


def test_settings_of_an_adapter_that_are_not_known_are_named(saved) -> None:
    path = saved[1]
    file = path / "adapter_config.json"
    assert unread_settings(path) == {}
    usual = {"qalora_group_size": 16, "megatron_core": "megatron.core", "loftq_config": {}}
    more = usual | {"layers_pattern": None, "new_form": False, "magnitude_cap": 3.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    assert unread_settings(path) == {"magnitude_cap": 3.0}


def test_an_adapter_stays_one_next_to_a_config_of_its_model(saved) -> None:
    (saved[1] / "config.json").write_text("{}")
    assert is_adapter(saved[1])
    (saved[1] / "model.safetensors.index.json").write_text("{}")
    assert not is_adapter(saved[1])


def test_a_value_that_is_not_finite_and_files_that_cannot_be_read_are_refused(saved) -> None:
    chunks, path = saved
    lora, file = LoraConfig(rank=4, alpha=8.0), path / "adapter_model.safetensors"
    pairs = load_file(file)
    some = next(iter(pairs))
    save_file({**pairs, some: torch.full_like(pairs[some], torch.nan)}, file)
    with pytest.raises(UserError, match="holds NaN or infinity"):
        load_adapter(chunks, path, lora)
    file.write_bytes(b"x")
    with pytest.raises(UserError, match="not readable"):
        load_adapter(chunks, path, lora)
    with pytest.raises(UserError, match="no such file; give a directory that PEFT has saved"):
        load_adapter(chunks, path / "absent", lora)
