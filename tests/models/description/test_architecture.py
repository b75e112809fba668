"""Architectures are read from config.json; a wrong one is refused with the file and the key."""

import copy
import json
import re
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.description.families import FAMILIES
from stable_opd_mcore.models.description.layer_types import FULL, SLIDING
from stable_opd_mcore.models.description.unread_settings import unread_settings
from stable_opd_mcore.models.files.small_files import write_config
from tests.models import tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


BAD_VALUES = [
    ({"model_type": "gpt2"},
     f"model_type 'gpt2' is not supported; .*: {', '.join(sorted(FAMILIES))}"),
    ({"model_type": ["qwen3"]}, r"model_type \['qwen3'\] is not supported"),
    ({"hidden_size": None}, "hidden_size=null should be a positive whole number"),
    ({"vocab_size": "many"}, "vocab_size='many' should be a positive whole number"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type 'longrope'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
     "no original_max_position_embeddings, which rope_type 'yarn' needs"),
    ({"rope_scaling": {"type": "default"}},
     r"rope_parameters={.*} and rope_scaling={'type': 'default'} differ"),
    ({"rope_scaling": {"type": "default", "rope_theta": 5e5}},
     r"rope_parameters={.*} and rope_scaling={.*} differ"),
    ({"use_sliding_window": "yes"}, "use_sliding_window='yes' should be true or false"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* not supported"),
    ({"num_key_value_heads": 3},
     "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps='small' should be a positive number"),
    ({"initializer_range": float("inf")}, "initializer_range=inf should be a positive number"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True should be a positive whole number"),
    *(
        (
            {key: 10**30},
            f"{key}=10{{30}} should be a positive whole number, at most 100,000,000",
        )
        for key in (
            *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
        )
    ),
    ({"rms_norm_eps": 10**400}, r"rms_norm_eps=10{59}\.* should be a positive number, at most"),
    ({"rope_parameters": [1]}, r"rope_parameters=\[1\] should be an object"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x' should be a positive number"),
    ({"rope_scaling": "yarn"}, "rope_scaling='yarn' should be an object"),
    (
        {
            "rope_parameters": YARN | {"rope_theta": 1e4},
            "original_max_position_embeddings": 64,  # with which transformers computes
        },
        "original_max_position_embeddings=64, but 32 in rope_parameters",
    ),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": ["yarn"]}},
     r"rope_type \['yarn'\] is not supported"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
     "rope_parameters.full_attention={.* is not supported; expected one setting"),
    ({"rope_parameters": YARN | {"rope_theta": 1e4, "truncate": "no"}},
     "truncate='no' should be true or false"),
    ({"rope_parameters": YARN | {"rope_theta": 1e4, "apply_yarn_scaling": False}},
     r"{'apply_yarn_scaling': False} of YaRN, which servers read"),
    ({"rope_parameters": YARN | {"rope_theta": 1e4, "extrapolation_factor": 0.5}},
     "extrapolation_factor=0.5 is not supported; expected 1"),
    ({"rope_parameters": YARN | {"rope_type": "llama3", "rope_theta": 1e4}
      | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
     "low_freq_factor=4 should be below high_freq_factor=1"),
    ({"rope_parameters": YARN | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor=0.5 with rope_type 'yarn' is not supported for qwen3"),
    ({"head_dim": "8"}, "head_dim='8' should be a positive whole number"),
    ({"head_dim": 7}, "partial_rotary_factor=1.0 of head_dim=7 rotates 7 elements"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' should be true or false"),
    ({"layer_types": 4}, "layer_types=4 should be a list"),
    ({"is_causal": False}, "is_causal=False is not supported for qwen3; expected True"),
    ({"text_config": "x"}, "text_config='x' should be an object"),
    ({"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta=1 should be above 1"),
]  # changes, message  # fmt: skip


def test_bad_values_in_config_json_are_refused(tmp_path: Path) -> None:
    for changes, message in BAD_VALUES:
        (tmp_path / "config.json").write_text(json.dumps(tiny.config("qwen3") | changes))
        with pytest.raises(ValueError, match=f"config.json: {message}"):
            read_architecture(tmp_path)


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "plain"])
def test_window_and_rope_theta_replace_those_of_config_json(form: str) -> None:
    fields = {k: v for k, v in tiny.config("qwen2").items() if not k.startswith("rope")}
    given = {"rope_type": "default", "rope_theta": 1e4}
    fields |= {"rope_theta": 1e4} if form == "plain" else {form: given}
    changed = read_architecture(fields, window=999, rope_theta=4e4)
    assert (changed.max_positions, changed.rotary.theta) == (999, 4e4)
    assert read_architecture(fields).rotary.theta == given["rope_theta"] == 1e4
    # The exported config.json has them too, and transformers reads the same there.
    assert read_architecture(changed.source) == changed
    own = AutoConfig.for_model(**changed.source)
    assert (own.max_position_embeddings, own.rope_parameters["rope_theta"]) == (999, 4e4)


TWO_VALUES = [
    ("gpt_oss", {"num_experts": 4}, "num_experts=4 and num_local_experts=8 differ"),
    ("gpt_oss", {"experts_per_token": 2}, "num_experts_per_tok=3 and experts_per_token=2"),
    ("gpt_oss", {"initial_context_length": 8}, "original_max_position_embeddings=64 and"),
    ("qwen3_5", {"rms_norm_eps": 1e-3}, "text_config.rms_norm_eps=1e-06 and rms_norm_eps=0.00"),
    ("qwen3_5", {"full_attention_interval": 2}, "text_config.full_attention_interval=.absent. a"),
    ("qwen3_5", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={"),
    ("qwen3_moe", {"num_local_experts": 8}, None),
    ("gpt_oss", {"experts_per_token": 3, "initial_context_length": 64}, None),
    ("qwen3_5", {"rms_norm_eps": 1e-6, "initializer_range": 0.5}, None),
]  # model_type, changes, message  # fmt: skip


def test_two_values_of_one_setting_are_refused() -> None:
    for model_type, changes, message in TWO_VALUES:
        fields = tiny.config(model_type) | changes
        fields.get("text_config", fields).setdefault("quantization_config", None)
        if message is None:
            assert read_architecture(fields) == tiny.architecture(model_type)
            assert unread_settings(fields) == {}
        else:
            with pytest.raises(ValueError, match=message):
                read_architecture(fields)


def test_heads_of_models_with_other_parts_are_tied_as_by_transformers() -> None:
    for inside in [True, False, None]:
        for outside in [True, False, None]:
            fields, key = tiny.config("qwen3_5"), "tie_word_embeddings"
            for each, value in ((fields, outside), (fields["text_config"], inside)):
                each.pop(key)
                each |= {} if value is None else {key: value}
            tied = read_architecture(fields).tied
            model = tiny.transformer(copy.deepcopy(fields), 0)
            assert tied == (
                model.get_output_embeddings().weight is model.get_input_embeddings().weight
            )
            listed = {} if inside in (None, tied) else {f"text_config.{key}": inside}
            assert unread_settings(fields) == listed


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next"])
def test_no_layers_with_one_dense_mlp_may_be_null(model_type: str) -> None:
    fields = tiny.config(model_type, mlp_only_layers=None)
    assert read_architecture(fields) == tiny.architecture(model_type)
    assert AutoConfig.for_model(**fields).mlp_only_layers == []


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_exported_config_says_what_a_missing_key_meant(model_type: str) -> None:
    fields = tiny.config(model_type)
    inner = fields.get("text_config", fields)
    usual = AutoConfig.for_model(model_type).get_text_config()
    for key in ("head_dim", "num_key_value_heads", "rms_norm_eps"):
        inner.pop(key, None)
    read = read_architecture(fields)
    own = AutoConfig.for_model(**read.source).get_text_config()
    assert own.num_key_value_heads == read.num_key_value_heads == read.num_attention_heads
    usual_size = read.family.defaults.get("head_dim", read.hidden_size // read.num_attention_heads)
    if read.latent is None:
        assert own.head_dim == read.head_dim == usual_size
    assert own.rms_norm_eps == read.rms_norm_eps == usual.rms_norm_eps


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_an_exported_config_names_one_type_and_the_class(
    keys: tuple[str, ...], tmp_path: Path
) -> None:
    for model_type, name in (
        ("qwen3", "Qwen3ForCausalLM"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ):
        fields = tiny.config(model_type) | {"architectures": None}
        for each in (fields, fields.get("text_config", fields)):
            each |= dict.fromkeys(keys, "bfloat16")
        write_config(read_architecture(fields), torch.float32, tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["architectures"] == [name]
        for each in (written, written.get("text_config", written)):
            assert {each.get(key) for key in keys or ("dtype",)} == {"float32"}


REFUSED = [  # family, changes of a tiny config, words of the refusal
    ("gemma3",
     {"rope_parameters": {FULL: YARN | {"rope_theta": 1e6}, SLIDING: {"rope_type": "default"}}},
     "rope_type 'yarn' of full_attention"),
    ("gemma3", {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}},
     "rope_type 'linear' of sliding_attention"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("deepseek_v3", {"first_k_dense_replace": 4}, "4 of 4 layers have a dense MLP"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "expected num_attention_heads=4"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "expected 'greedy'"),
    ("glm4_moe_lite", {"first_k_dense_replace": 3}, "first_k_dense_replace=3"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2}, "'dense' and then 'sparse'"),
    ("glm4_moe", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported for gpt_oss"),
    ("gpt_oss", {"layer_types": ["linear_attention"] * 4}, "layer_types=['linear_attention'] is"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window=null should be a positive whole number"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={"),
    ("gpt_oss", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
    ("gpt_oss", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not"),
    ("qwen3_5_moe", {"layer_types": ["linear_attention"] * 4}, "4 layers, 0 of them full_att"),
    ("qwen3_5_moe", {"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
    ("qwen3_5_moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types=['sliding_att"),
    ("qwen3_5_moe", {"linear_num_key_heads": None}, "linear_num_key_heads=null should"),
    ("qwen3_5_moe", {"attn_output_gate": False}, "attn_output_gate=False is not supported"),
    ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
    ("qwen3_5_moe", {"shared_expert_intermediate_size": None},
     "shared_expert_intermediate_size=null should"),
]  # fmt: skip


def test_what_is_not_computed_is_refused_by_name() -> None:
    for model_type, changes, words in REFUSED:
        with pytest.raises(ValueError, match=re.escape(words)):
            read_architecture(tiny.config(model_type, **changes))


THETA = {"rope_theta": 1e4}
LINEAR = THETA | {"rope_type": "linear"}
SCALED = YARN | THETA
LLAMA3 = SCALED | {"rope_type": "llama3"}
FREQUENCIES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SERVED = {"attn_factor": 0.8782488562869419}
BOTH_BASES = {FULL: SCALED, SLIDING: THETA}
WITH_REMEDY = [  # family, changes of a tiny config, the refusal, changes that follow its remedy
    ("qwen3", {"rope_parameters": LINEAR}, "no factor, which rope_type .linear. needs; add it",
     [{"rope_parameters": LINEAR | {"factor": 2.0}}]),
    ("qwen3", {"rope_parameters": LLAMA3 | {"high_freq_factor": 4.0}},
     "no low_freq_factor, which rope_type .llama3. needs; add it",
     [{"rope_parameters": LLAMA3 | FREQUENCIES}]),
    ("qwen3", {"rope_scaling": SCALED},
     "rope_scaling={'rope_type': 'yarn.* differ; keep the right one",
     [{"rope_scaling": None}, {"rope_scaling": SCALED, "rope_parameters": None}]),
    ("qwen3", {"rope_parameters": None}, "no rope_theta, nor one in rope_parameters.*; add it",
     [{"rope_parameters": None} | THETA, {"rope_parameters": THETA}]),
    ("qwen3", {"head_dim": None, "hidden_size": 34},
     "hidden_size=34 is not a multiple of .*: set head_dim", [{"head_dim": 8}]),
    ("qwen3", {"rope_theta": 4e4}, "=40000.0, but 10000.0 in rope_parameters.*; keep the right one",
     [THETA, {"rope_theta": 4e4, "rope_parameters": {"rope_theta": 4e4}}]),
    ("qwen3", {"rope_parameters": THETA | {"factor": 4.0}},
     "{'factor': 4.0} without rope_type, which has no effect.*; add it, or remove these",
     [{"rope_parameters": LINEAR | {"factor": 4.0}}, {"rope_parameters": THETA}]),
    ("qwen3", {"rope_parameters": SCALED | {"type": "default"}},
     "rope_type='yarn' and type='default' differ; keep the right one",
     [{"rope_parameters": SCALED}, {"rope_parameters": THETA | {"type": "default"}}]),
    ("qwen3", {"rope_parameters": SCALED | SERVED},
     "{'attn_factor': 0.87.* by 1, it by 1.13863; expected .* add attention_factor=1.0 if the "
     "servers are right, or remove these keys",
     [{"rope_parameters": SCALED | SERVED | {"attention_factor": 1.0}},
      {"rope_parameters": SCALED}]),
    ("qwen3", {"text_config": {"text_config": {}}},
     "text_config has a text_config of its own.*; remove that", [{"text_config": "absent"}]),
    ("qwen3", {"text_config": {"hidden_size": 8}},
     "which a qwen3 config does not have; remove it, or correct model_type",
     [{"text_config": "absent"}]),
    ("qwen3", {"quantization_config": {"bits": 4}},
     "quantization_config={'bits': 4} is not supported .*correct it if",
     [{"quantization_config": "absent"}]),
    ("qwen3_moe", {"num_local_experts": 4},
     "num_experts=8 and num_local_experts=4 differ; keep the right one, or make them equal",
     [{"num_local_experts": "absent"}, {"num_local_experts": 8}]),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "correct it", [{"num_experts_per_tok": 8}]),
    ("gpt_oss", {"rope_parameters": None} | THETA,
     "nor rope_scaling, which transformers then invents for a gpt_oss.*; add the model's",
     [{"rope_parameters": SCALED}, {"rope_parameters": None, "rope_scaling": YARN} | THETA]),
    ("gpt_oss", {"layer_types": [SLIDING] * 4},
     "layer_types has 4 layers, 0 of them full_att.*correct it", [{"layer_types": None}]),
    ("glm4_moe_lite", {"head_dim": 10}, "head_dim=10 and qk_rope_head_dim=4.*; remove head_dim",
     [{"head_dim": "absent"}]),
    ("gemma3_text", {"rope_parameters": BOTH_BASES}, "remove the scaling",
     [{"rope_parameters": {FULL: THETA, SLIDING: THETA}}]),
    ("gemma3_text", {"rope_parameters": THETA}, "an object for each of .*correct it",
     [{"rope_parameters": {FULL: THETA, SLIDING: THETA}}]),
    ("deepseek_v3", {"rope_parameters": tiny.YARN_OF_LATENTS | {"mscale": 0}},
     "mscale=0.*correct it", [{"rope_parameters": tiny.YARN_OF_LATENTS}]),
    ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3},
     "n_group=4 and topk_group=1.*correct it",
     [{"topk_group": 2, "num_experts_per_tok": 3}]),
    ("qwen3_5", {"linear_num_value_heads": 3},
     "linear_num_value_heads=3 is not a multiple of.*correct it",
     [{"linear_num_value_heads": 4}]),
    ("qwen3_5", {"rope_parameters": THETA | {"partial_rotary_factor": 0.2}},
     "=0.2 of head_dim=16 rotates 3 elements.*correct it",
     [{"rope_parameters": THETA | {"partial_rotary_factor": 0.25}}]),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "changes", "words", "remedies"), WITH_REMEDY)
def test_a_config_that_follows_the_remedy_is_read(model_type, changes, words, remedies) -> None:
    with pytest.raises(UserError, match=f"{words}[^;]*$"):
        read_architecture(tiny.config(model_type, **changes))
    for remedy in remedies:
        fields = tiny.config(model_type, **changes | remedy)
        fields = {key: value for key, value in fields.items() if value != "absent"}
        read_architecture(fields)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_next"])
def test_the_gate_of_a_delta_net_may_be_named(model_type: str) -> None:
    fields = tiny.config(model_type)
    inner = fields.get("text_config", fields)
    plain = read_architecture(fields)
    for name in ("silu", "swish"):  # 3.6 and 3.8 say swish, 3.5 says nothing
        inner["output_gate_type"] = name
        named = read_architecture(fields)
        assert named == plain
        assert named.source.get("text_config", named.source)["output_gate_type"] == name
    inner["output_gate_type"] = "sigmoid"
    with pytest.raises(ValueError, match="output_gate_type='sigmoid' is not supported"):
        read_architecture(fields)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_keys_mean_the_same_to_transformers(model_type: str) -> None:
    """A key may be left out where transformers' default is the implemented value."""
    defaults = AutoConfig.for_model(model_type).get_text_config()
    for key, implemented in FAMILIES[model_type].supported.items():
        assert getattr(defaults, key, implemented) == implemented, key
        fields = tiny.config(model_type)
        fields.get("text_config", fields).pop(key, None)
        read_architecture(fields)
    fields = tiny.config(model_type)
    fields.get("text_config", fields).pop("norm_topk_prob", None)
    if (experts := read_architecture(fields).experts) is not None:
        assert experts.normalised == getattr(defaults, "norm_topk_prob", True)


def test_a_config_without_its_nested_one_is_refused() -> None:
    with pytest.raises(ValueError, match="no text_config, which a qwen3_5 config needs"):
        read_architecture({"model_type": "qwen3_5"})


def test_layers_and_rotated_share_have_the_defaults_of_transformers() -> None:
    fields = tiny.config("qwen3_5", num_hidden_layers=8, rope_parameters={"rope_theta": 1e4})
    del fields["text_config"]["layer_types"]
    architecture = read_architecture(fields)
    assert architecture.delta_layers == (0, 1, 2, 4, 5, 6)
    assert architecture.rotary.size == 4
    fields = {k: v for k, v in tiny.config("gpt_oss").items() if k != "layer_types"}
    assert read_architecture(fields).sliding_layers == (0, 2)
    assert AutoConfig.for_model(**fields).layer_types[:2] == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_sliding_windows_are_those_of_transformers_or_refused(model_type: str) -> None:
    """Over all combinations of the settings, given or left out. A window that no position leaves
    has no effect."""
    mixed, every = ["full_attention", "sliding_attention"] * 2, ["sliding_attention"] * 4
    choices: dict[str, list[Any]] = {
        "sliding_window": [None, 5, 128, "absent"],
        "use_sliding_window": [True, False, "absent"],
        "max_window_layers": [0, 3, 9, "absent"],
        "layer_types": [None, mixed, every],
    }
    seen = set()
    for values in product(*choices.values()):
        fields = tiny.config(model_type, **dict(zip(choices, values, strict=True)))
        fields = {key: value for key, value in fields.items() if value != "absent"}
        theirs = AutoConfig.for_model(**fields)
        window, listed = theirs.sliding_window, fields["layer_types"]
        if model_type == "mistral":
            types, is_refused = (
                [FULL if window is None else SLIDING] * 4,
                listed not in (None, every),
            )
            is_refused = is_refused or (listed == every and window is None)
            is_refused = is_refused or fields.get("use_sliding_window") is True
        else:
            types, is_refused = theirs.layer_types, listed is not None and window is None
        with pytest.raises(UserError) if is_refused else nullcontext():
            found = read_architecture(fields)
            has_effect = window is not None and window < 128
            sliding = tuple(i for i, kind in enumerate(types) if kind == SLIDING and has_effect)
            assert found.sliding_layers == sliding, fields
            assert found.sliding_window == (window if sliding else None)
            seen.add(sliding)
    assert len(seen) == (2 if model_type == "mistral" else 4)


def test_settings_of_a_nested_config_are_changed_where_they_are_read() -> None:
    changed = read_architecture(tiny.config("qwen3_5"), window=999, rope_theta=4e4)
    assert (changed.max_positions, changed.rotary.theta) == (999, 4e4)
    assert "max_position_embeddings" not in changed.source
    own = AutoConfig.for_model(**changed.source).get_text_config()
    assert (own.max_position_embeddings, own.rope_parameters["rope_theta"]) == (999, 4e4)


def test_missing_or_malformed_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_architecture(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"model\.safetensors: a file; give a directory with"):
        read_architecture(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{\n"model_type": }')
    with pytest.raises(ValueError, match=r"not valid JSON: .* line 2"):
        read_architecture(tmp_path)


def test_older_rope_settings_are_read() -> None:
    """transformers before 5 wrote rope_theta and rope_scaling side by side."""
    old = tiny.config("llama") | {"rope_parameters": None, "rope_theta": 5e5}
    assert read_architecture(old).rotary.theta == 5e5
    old["rope_scaling"] = {"type": "linear", "factor": 2.0}
    scaling = read_architecture(old).rotary.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)
