"""Adapters of others become what PEFT merges: its own files and merge where it is installed, and
everywhere files that are written by hand, with the arithmetic written out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.files.peft_adapter import PeftAdapter
from stable_opd_mcore.models.files.peft_loading import check_adapter
from stable_opd_mcore.models.tensors import hf_shapes
from tests.models import tiny

SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
Q, V, OUT = (f"layers.1.self_attn.{kind}_proj" for kind in "qvo")
EXPERTS = "layers.0.mlp.experts"


def file_tensors(fields: dict[str, Any]) -> dict[str, Tensor]:
    """Random values for every tensor of the model."""
    generator = torch.Generator().manual_seed(7)
    shapes = hf_shapes(tiny.read_architecture(fields))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(directory: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    (directory / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))


def merged(directory: Path, fields: dict[str, Any], base: dict[str, Tensor]) -> dict[str, Tensor]:
    with PeftAdapter(directory, tiny.read_architecture(fields)) as adapter:
        assert [n for n in base if adapter.changes(n)], "nothing is changed"
        return {name: adapter.merged(name, tensor) for name, tensor in base.items()}


def random_pair(outputs: int, inputs: int, rank: int = 4) -> tuple[Tensor, Tensor]:
    return 0.1 * torch.randn(rank, inputs), 0.1 * torch.randn(outputs, rank)


PREFIXES = [  # family, what stands before "layers" in the adapter
    ("qwen3_5", "model."),  # AutoModelForCausalLM's class of a model with other parts
    ("qwen3_5", "model.language_model."),
    ("qwen3_vl", ""),  # AutoModel's
    ("qwen3_5_moe", "language_model.model."),  # an older full class
    ("qwen3_5_text", "model.language_model."),  # the full class's, on the text model
    ("llama", "_orig_mod.model."),  # torch.compile
]


@pytest.mark.parametrize(("family", "prefix"), PREFIXES)
def test_any_subset_by_any_class(family, prefix, tmp_path) -> None:
    """Two matrices of one layer, by pattern with a rank and an alpha of their own, in rsLoRA."""
    fields, torch_name = tiny.config(family), f"base_model.model.{prefix}"
    base = file_tensors(fields)
    paths = ("layers.3.self_attn.k_proj", "layers.3.self_attn.o_proj")
    names = {path: next(n for n in base if n.endswith(f"{path}.weight")) for path in paths}
    ranks = dict(zip(paths, (4, 6), strict=True))
    pairs = {path: random_pair(*base[names[path]].shape, ranks[path]) for path in paths}
    tensors = {
        f"{torch_name}{path}.lora_{which}.weight": factor
        for path, pair in pairs.items()
        for which, factor in zip("AB", pair, strict=True)
    }
    patterns = {"rank_pattern": {"o_proj": 6}, "alpha_pattern": {r"^.*3\.self_attn\.o_proj": 3.0}}
    write(tmp_path, tensors, use_rslora=True, **patterns)
    found = merged(tmp_path, fields, base)
    for path, scale in zip(paths, (8 / 4**0.5, 3 / 6**0.5), strict=True):
        a, b = pairs[path]
        torch.testing.assert_close(found[names[path]], base[names[path]] + scale * b @ a)
    others = base.keys() - set(names.values())
    assert all(torch.equal(found[name], base[name]) for name in others)


def dora(base: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    weight = base[f"model.{OUT}.weight"]
    (a, b), lengths = random_pair(*weight.shape), torch.rand(weight.shape[0])
    long = weight + 2 * b @ a
    parts = {"lora_A.weight": a, "lora_B.weight": b, "lora_magnitude_vector": lengths}
    expected = lengths[:, None] * long / long.square().sum(1, keepdim=True).sqrt()
    tensors = {f"base_model.model.model.{OUT}.{end}": each for end, each in parts.items()}
    return tensors, {"use_dora": True}, {f"model.{OUT}.weight": expected}


def biases(base: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """bias="lora_only" on v, a bias of B on q."""
    a, b = random_pair(*base[f"model.{Q}.weight"].shape)
    own, added = (torch.randn_like(base[f"model.{each}.bias"]) for each in (V, Q))
    tensors = {
        f"base_model.model.model.{V}.base_layer.bias": own,
        f"base_model.model.model.{Q}.lora_A.weight": a,
        f"base_model.model.model.{Q}.lora_B.weight": b,
        f"base_model.model.model.{Q}.lora_B.bias": added,
    }
    expected = {
        f"model.{V}.bias": own,
        f"model.{Q}.bias": base[f"model.{Q}.bias"] + 2 * added,
        f"model.{Q}.weight": base[f"model.{Q}.weight"] + 2 * b @ a,
    }
    return tensors, {"bias": "lora_only", "lora_bias": True}, expected


def whole(base: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """modules_to_save: a head, a norm, and an embedding that also has a pair."""
    embedding, norm = "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"
    new = {name: torch.randn_like(base[name]) for name in ("lm_head.weight", norm, embedding)}
    a, b = torch.randn(4, base[embedding].shape[0]), torch.randn(base[embedding].shape[1], 4)
    tensors = {
        "base_model.model.lm_head.weight": new["lm_head.weight"],
        f"base_model.model.{norm}": new[norm],
        "base_model.model.model.embed_tokens.base_layer.weight": new[embedding],
        "base_model.model.model.embed_tokens.lora_embedding_A": a,
        "base_model.model.model.embed_tokens.lora_embedding_B": b,
    }
    expected = new | {embedding: new[embedding] + 2 * (b @ a).T}
    return tensors, {"modules_to_save": ["lm_head", "input_layernorm"]}, expected


def rows(base: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    embedding = "model.embed_tokens.weight"
    expected, values = base[embedding].clone(), torch.randn(2, base[embedding].shape[1])
    expected[[7, 3]] = values
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    return {name: values}, {"trainable_token_indices": [7, 3]}, {embedding: expected}


@pytest.mark.parametrize(
    ("family", "make"), [("qwen3", dora), ("qwen2", biases), ("mistral", whole), ("llama", rows)]
)
def test_what_else_an_adapter_may_change(family, make, tmp_path) -> None:
    torch.manual_seed(0)
    fields = tiny.config(family)
    base = file_tensors(fields)
    tensors, settings, expected = make(base)
    write(tmp_path, tensors, **settings)
    found = merged(tmp_path, fields, base)
    for name, tensor in base.items():
        torch.testing.assert_close(found[name], expected.get(name, tensor), msg=name)
    architecture = tiny.read_architecture(fields)
    with pytest.raises(UserError, match=r"no factor of a matrix .*run `stable-opd convert .*"):
        check_adapter(tmp_path, architecture, LoraConfig(rank=4, alpha=8.0))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe"])
@pytest.mark.parametrize("is_old", [False, True])
def test_stacked_experts(family, is_old, tmp_path) -> None:
    """Pairs of both stacks of a layer; releases of PEFT before 0.18 took out for in."""
    if is_old and family == "gpt_oss":
        return  # its stacks are transposed, and so read rightly
    fields = tiny.config(family)
    base, number = file_tensors(fields), 8
    prefix = next(n for n in base if EXPERTS in n).split("layers.")[0]
    tensors, expected = {}, {}
    for place, kinds in (("", ["down"]), (".base_layer", ["gate", "up"])):
        each = [base[f"{prefix}{EXPERTS}.0.{kind}_proj.weight"] for kind in kinds]
        outputs, inputs = sum(len(w) for w in each), each[0].shape[1]
        if is_old:
            outputs, inputs = inputs, outputs
        a, b = torch.randn(number * 4, inputs), torch.randn(outputs, 4 * number)
        for which, factor in (("A", a), ("B", b)):
            tensors[f"base_model.model.{prefix}{EXPERTS}{place}.lora_{which}.weight"] = factor
        for e in range(number):
            product = 2 * b[:, e::number] @ a[4 * e : 4 * e + 4]
            product = product.T if is_old else product
            is_interleaved = family == "gpt_oss" and len(kinds) == 2
            parts = (product[::2], product[1::2]) if is_interleaved else product.chunk(len(kinds))
            for kind, part in zip(kinds, parts, strict=True):
                name = f"{prefix}{EXPERTS}.{e}.{kind}_proj.weight"
                expected[name] = base[name] + part
    stacks = ["experts.down_proj", "mlp.experts.gate_up_proj"]
    write(tmp_path, tensors, target_parameters=stacks)
    found = merged(tmp_path, fields, base)
    assert len(expected) == 3 * number
    for name, tensor in base.items():
        torch.testing.assert_close(found[name], expected.get(name, tensor), msg=name)


def test_a_tied_head_changes_with_its_embedding_or_not_at_all(tmp_path) -> None:
    fields = tiny.config("qwen2", tie_word_embeddings=True)
    base, new = file_tensors(fields), torch.randn(tiny.VOCAB_SIZE, 32)
    both = {"model.embed_tokens.weight": new, "lm_head.weight": new}
    of_one = {"model.embed_tokens.weight": new}
    for tensors, settings in ((both, {}), (of_one, {"ensure_weight_tying": True})):
        write(
            tmp_path, {f"base_model.model.{n}": t.clone() for n, t in tensors.items()}, **settings
        )
        found = merged(tmp_path, fields, base)
        assert torch.equal(found["model.embed_tokens.weight"], new)
    for alone in both:
        write(tmp_path, {f"base_model.model.{alone}": new})
        with pytest.raises(UserError, match=r"tie_word_embeddings=true\); merge the adapter with"):
            merged(tmp_path, fields, base)


# ---- PEFT itself, where it is installed

LINEAR: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
BY_PEFT: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", LINEAR),
    ("qwen2", {"target_modules": "all-linear", "bias": "all", "use_rslora": True}),
    ("qwen2", {**LINEAR, "lora_bias": True, "bias": "lora_only"}),
    ("llama", {**LINEAR, "use_dora": True, "alpha_pattern": {"v_proj": 3}}),
    ("llama", {**LINEAR, "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2}}),
    ("mistral", {**LINEAR, "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    ("qwen3", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    ("qwen3", {**LINEAR, "trainable_token_indices": [5, 2, 9]}),
    ("qwen3_5_text", {"target_modules": "all-linear"}),
    ("qwen3_vl", {"target_modules": "all-linear"}),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
    (
        "qwen3_moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.down_proj", "experts.gate_up_proj", "gate.weight"],
            "rank_pattern": {"experts.gate_up_proj": 8},
        },
    ),
    (
        "gpt_oss",
        {
            "target_modules": ["k_proj"],
            "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
        },
    ),
]


@pytest.mark.parametrize(("family", "settings"), BY_PEFT)
def test_the_merge_is_pefts(family, settings, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    fields = tiny.config(family)
    model = tiny.transformer(fields, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    wrapped.save_pretrained(tmp_path)
    expected = wrapped.merge_and_unload().state_dict()
    changed = 0
    with PeftAdapter(tmp_path, tiny.read_architecture(fields)) as adapter:
        for name, weight in before.items():
            if re.search(r"\.experts\.(gate_up|down)_proj$", name):
                changed += check_stack(adapter, name, weight, expected[name], family)
                continue
            torch.testing.assert_close(adapter.merged(name, weight), expected[name], msg=name)
            changed += not torch.equal(weight, expected[name])
    assert changed >= len(load_file(tmp_path / "adapter_model.safetensors")) / 4


def check_stack(
    adapter: PeftAdapter, name: str, before: Tensor, after: Tensor, family: str
) -> bool:
    """Compare each expert's part of a stack."""
    for expert in range(len(before)):
        old, new = (each[expert] for each in (before, after))
        old, new = (old.T, new.T) if family == "gpt_oss" else (old, new)
        kinds = ("gate", "up") if "gate_up" in name else ("down",)
        stem = f"{name.rpartition('.')[0]}.{expert}."
        for number, kind in enumerate(kinds):
            if family == "gpt_oss":
                part = slice(number, None, len(kinds))
            else:
                width = len(old) // len(kinds)
                part = slice(number * width, (number + 1) * width)
            found = adapter.merged(f"{stem}{kind}_proj.weight", old[part])
            torch.testing.assert_close(found, new[part], msg=f"{stem}{kind}")
    return not torch.equal(before, after)
