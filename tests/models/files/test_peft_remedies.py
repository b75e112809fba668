"""The remedy that a refusal of an adapter names, applied to the adapter that caused it: it is then
merged, or training starts from it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.files.adapted import adapted_shapes
from stable_opd_mcore.models.files.peft_adapter import PeftAdapter
from stable_opd_mcore.models.files.peft_loading import adapter_form, check_adapter
from stable_opd_mcore.models.tensors import hf_shapes
from tests.models import tiny

Shapes = dict[str, tuple[int, ...]]
SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
Q = "model.layers.1.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"
EMBEDDING = "model.embed_tokens"


def pair(module: str, outputs: int, inputs: int, rank: int = 4) -> Shapes:
    return {f"{module}.lora_A.weight": (rank, inputs), f"{module}.lora_B.weight": (outputs, rank)}


def write(directory: Path, tensors: Shapes | None, settings: dict[str, Any] | None) -> None:
    """An adapter; without `tensors` only its settings, without `settings` only its tensors."""
    for file in directory.iterdir():
        file.unlink()
    if tensors is not None:
        ones = {f"base_model.model.{name}": torch.ones(shape) for name, shape in tensors.items()}
        save_file(ones, directory / "adapter_model.safetensors")
    if settings is not None:
        known = {key: value for key, value in (SETTINGS | settings).items() if value != "absent"}
        (directory / "adapter_config.json").write_text(json.dumps(known))


def merge(directory: Path, architecture: Architecture) -> None:
    shapes = hf_shapes(architecture).items()
    with PeftAdapter(directory, architecture) as adapter:
        assert sum(adapter.changes(name) for name, _ in shapes)
        assert all(adapter.merged(name, torch.ones(shape)).shape == shape for name, shape in shapes)


GOOD = pair(Q, 32, 32)
HEAD = {"lm_head.weight": (53, 32)}
TOKENS = {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": (2, 32)}
STACK = pair(EXPERTS, 32, 20, 8 * 4)
COPY = "copy or download (it|the file) again"
BASE = "set base_model_name_or_path in adapter_config.json to the model"
TARGETS = {"target_parameters": ["experts.down_proj"]}
LORA = "train an adapter of LoRA"
IN_PEFTS = "write the adapter in PEFT's form"
MERGED = [  # family, tensors, settings; the remedy; tensors, settings and model that follow it
    ("qwen3", None, {}, COPY, (GOOD, {}, {})),
    ("qwen3", GOOD, None, "give a directory that PEFT has saved", (GOOD, {}, {})),
    ("qwen3", {f"{Q}.lora_A.weight": (4, 32)}, {}, COPY, (GOOD, {}, {})),
    ("qwen3", {f"{Q}.lora_B.weight": (32, 4)}, {}, COPY, (GOOD, {}, {})),
    ("qwen3", GOOD, {"r": "x"}, COPY, (GOOD, {}, {})),
    ("qwen3", GOOD, {"r": "absent", "peft_type": "absent"}, IN_PEFTS, (GOOD, {}, {})),
    ("qwen3", pair("model.unembed_tokens", 9, 9), {}, IN_PEFTS, (pair("lm_head", 53, 32), {}, {})),
    *(
        ("qwen3", pair(name, 9, 9), {}, f"{IN_PEFTS} with {writer}", (GOOD, {}, {}))
        for name, writer in [
            ("layers.0.self_attention.linear_qkv", "Megatron-Bridge's"),
            ("lora_te_layers_0.lora_down", "the program that trained it"),
            ("layers.0.self_attn.q_proj.lora_a", "the program that trained it"),
        ]
    ),
    ("qwen3", GOOD, {"rank_pattern": {"q": "x"}}, COPY, (GOOD, {}, {})),
    ("qwen3", pair(Q, 32, 32, 6), {}, "copy both files again", (GOOD, {}, {})),
    ("qwen3", TOKENS, {}, "copy both again", (TOKENS, {"trainable_token_indices": [7, 3]}, {})),
    ("qwen3_moe", STACK, {}, "copy both files again", (STACK, TARGETS, {})),
    ("qwen3", {**HEAD, "model.lm_head.weight": (53, 32)}, {},
     "save one adapter by itself with PEFT", (HEAD, {}, {})),
    ("qwen3", {**GOOD, "score.weight": (2, 32)}, {"modules_to_save": ["score"]},
     "remove it from the file and from modules_to_save", (GOOD, {"modules_to_save": None}, {})),
    ("qwen3", {**GOOD, "v_head.summary.bias": (1,)}, {}, "remove it from the", (GOOD, {}, {})),
    ("qwen3", pair("model.layers.9.mlp.up_proj", 48, 32), {}, BASE,
     (pair("model.layers.9.mlp.up_proj", 48, 32), {}, {"num_hidden_layers": 10})),
    ("qwen3", pair(Q, 32, 16), {}, BASE, (pair(Q, 32, 16), {}, {"hidden_size": 16})),
    ("qwen3", {"lm_head.weight": (53, 16)}, {}, BASE,
     ({"lm_head.weight": (53, 16)}, {}, {"hidden_size": 16})),
    *(
        ("qwen3", tensors, {}, r"resize_token_embeddings\(60\), save .*, and " + BASE,
         (tensors, {}, {"vocab_size": 60}))
        for tensors in [
            {"lm_head.weight": (60, 32)}, {f"{EMBEDDING}.weight": (60, 32)}, pair("lm_head", 60, 32)
        ]
    ),
    ("qwen2", HEAD, {}, r"into a model whose config\.json says false, and give that",
     (HEAD, {}, {"tie_word_embeddings": False})),
    ("qwen3", GOOD, {"peft_type": "PREFIX_TUNING"}, LORA, (GOOD, {}, {})),
    ("qwen3", GOOD, {"alora_invocation_tokens": [1]}, LORA, (GOOD, {}, {})),
]  # fmt: skip


@pytest.mark.parametrize(("family", "tensors", "settings", "words", "then"), MERGED)
def test_an_adapter_that_follows_the_remedy_is_merged(
    family, tensors, settings, words, then, tmp_path
) -> None:
    is_tied = family == "qwen2"
    fields = tiny.config(family, tie_word_embeddings=is_tied)
    write(tmp_path, tensors, settings)
    with pytest.raises(UserError, match=words):
        merge(tmp_path, tiny.read_architecture(fields))
    write(tmp_path, *then[:2])
    merge(tmp_path, tiny.read_architecture({**fields, **then[2]}))


EMBEDDING_DORA = {
    f"{EMBEDDING}.lora_embedding_A": (4, 53),
    f"{EMBEDDING}.lora_embedding_B": (32, 4),
    f"{EMBEDDING}.lora_magnitude_vector": (32,),
}


@pytest.mark.parametrize(
    ("family", "tensors", "settings"),
    [
        ("qwen3", GOOD, {"init_lora_weights": "pissa"}),
        ("qwen3", GOOD, {"peft_type": "IA3"}),
        ("qwen3", EMBEDDING_DORA, {"use_dora": True}),
        ("gpt_oss", pair(EXPERTS, 32, 8, 32), {"target_parameters": ["experts.down_proj_bias"]}),
    ],
)
def test_what_only_peft_merges_says_so(family, tensors, settings, tmp_path) -> None:
    """The merged model is a model as any other."""
    write(tmp_path, tensors, settings)
    with pytest.raises(UserError, match=r"merge_and_unload\), and give the merged model$"):
        merge(tmp_path, tiny.architecture(family))


def test_files_that_are_saved_again_are_merged(tmp_path) -> None:
    write(tmp_path, GOOD, {})
    file, architecture = tmp_path / "adapter_model.safetensors", tiny.architecture("qwen3")
    own = file.name
    for name, words in (
        ("adapter_model.bin", "load the adapter with PEFT and save it again"),
        ("adapters.safetensors", f"there is adapters.safetensors, not of PEFT: {IN_PEFTS}"),
    ):
        file = file.rename(tmp_path / name)
        with pytest.raises(UserError, match=words):
            merge(tmp_path, architecture)
    file.rename(tmp_path / own)
    merge(tmp_path, architecture)
    inside = tmp_path / "run" / "default"
    inside.mkdir(parents=True)
    write(inside, GOOD, {})
    with pytest.raises(UserError, match=rf"PEFT has saved, such as {inside}$"):
        merge(inside.parent, architecture)


def layer_pairs(matrices: tuple[str, ...] | None, rank: int = 4) -> Shapes:
    architecture, found = tiny.architecture("qwen3"), {}
    for name, shape in adapted_shapes(architecture, matrices).items():
        found |= pair(name.removesuffix(".weight"), *shape, rank)
    return found


ALL = layer_pairs(None)
TRAINED = [  # tensors, settings, student.lora
    (ALL, {}, {"rank": 8, "alpha": 8.0}),
    (ALL, {"lora_alpha": 16}, {"rank": 4, "alpha": 8.0}),
    (ALL, {"use_rslora": True}, {"rank": 4, "alpha": 8.0}),
    (ALL, {"lora_alpha": 3}, {"rank": 16, "alpha": 1.0, "rslora": True}),
    (ALL, {}, {"rank": 4, "alpha": 8.0, "matrices": ("q_proj",)}),
    (layer_pairs(("q_proj", "v_proj")), {}, {"rank": 2, "alpha": 8.0}),
    (layer_pairs(("mlp.up_proj", "o_proj")), {}, {"rank": 4, "matrices": ("mlp.down_proj",)}),
]


def refused(directory: Path, lora: LoraConfig) -> str | None:
    try:
        check_adapter(directory, tiny.architecture("qwen3"), lora)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("tensors", "settings", "lora"), TRAINED)
def test_settings_that_follow_the_remedy_train_on(tensors, settings, lora, tmp_path) -> None:
    write(tmp_path, tensors, settings)
    refusals = 0
    while (refusal := refused(tmp_path, LoraConfig(**lora))) is not None and refusals < 4:
        refusals += 1
        found = re.search(r"set student\.lora\.(\w+)=(\S+)$", refusal)
        assert found is not None, refusal
        lora = lora | {found[1]: yaml.safe_load(found[2])}
    assert 1 <= refusals < 4
    architecture = tiny.architecture("qwen3")
    check_adapter(tmp_path, architecture, adapter_form(tmp_path, architecture, "code"))


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        ({**ALL, **HEAD}, {}),
        (GOOD, {}),  # of one layer
        (ALL, {"alpha_pattern": {"v_proj": 9}}),
        ({**ALL, **pair(Q, 32, 32, 2)}, {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2}}),
    ],
)
def test_what_has_to_be_merged_first_is_merged(tensors, settings, tmp_path) -> None:
    architecture = tiny.architecture("qwen3")
    write(tmp_path, tensors, settings)
    with pytest.raises(UserError, match=r"run `stable-opd convert .* MERGED`, and set student\.pa"):
        check_adapter(tmp_path, architecture, LoraConfig(rank=4, alpha=8.0))
    with pytest.raises(UserError, match=r"MERGED`, and set teacher\.models\.code\.path=MERGED in"):
        adapter_form(tmp_path, architecture, "code")
    merge(tmp_path, architecture)


def test_the_student_that_the_adapter_was_trained_on_trains_on(tmp_path) -> None:
    lora, fields = LoraConfig(rank=4, alpha=8.0), tiny.config("qwen3")
    write(tmp_path, ALL, {})
    (tmp_path / "trained.json").write_text(json.dumps({"run": "r", "rope_theta": 5e5}))
    with pytest.raises(UserError, match=r"set student\.rope_theta=500000\.0$"):
        check_adapter(tmp_path, tiny.read_architecture(fields), lora)
    check_adapter(tmp_path, read_architecture(fields, rope_theta=5e5), lora)
    (tmp_path / "trained.json").write_text(json.dumps({"run": "r", "rope_theta": "x"}))
    with pytest.raises(UserError, match="should be numbers; restore the file"):
        check_adapter(tmp_path, tiny.read_architecture(fields), lora)
    write(tmp_path, ALL, {})
    with pytest.raises(UserError, match=r"set student\.path to the model that the adapter was tr"):
        check_adapter(tmp_path, tiny.architecture("qwen3", num_hidden_layers=2), lora)
    check_adapter(tmp_path, tiny.read_architecture(fields), lora)
