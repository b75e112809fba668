"""Settings of config.json that nothing computes are named, and those that are read are not."""

import copy

import pytest
from transformers import AutoConfig

from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.description.families import FAMILIES
from stable_opd_mcore.models.description.unread_settings import unread_settings
from tests.models import tiny
from tests.models.description.test_architecture import YARN


@pytest.mark.parametrize("model_type", FAMILIES)
def test_settings_that_switch_something_on_are_named_and_those_of_transformers_are_not(model_type):
    fields = AutoConfig.for_model(**tiny.config(model_type)).to_dict()
    assert unread_settings(read_architecture(fields).source) == {}
    found = {"auto_map": {"AutoModelForCausalLM": "a.B"}, "logits_scaling": 30.0}
    inner = fields.get("text_config", fields)
    found |= {"attention_dropout": 0.1, "use_bias": False, "attention_layers": []}
    inner |= found | {"residual_multiplier": None, "use_mrope": False}
    rotary = inner["rope_parameters"]
    rotary = rotary.get("full_attention", rotary)
    rotary |= {"ext_factor": 1.0, "beta_slow": None, "mscale": rotary.get("mscale")}
    assert unread_settings(fields) == found | {"rope_parameters.ext_factor": 1.0}
    inner["auto_map"] = {"AutoConfig": "a.B", "AutoTokenizer": ["a.B", None]}
    assert "auto_map" not in unread_settings(fields)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_class_of_another_model_is_named(model_type: str) -> None:
    fields = tiny.config(model_type)
    own = type(tiny.transformer(copy.deepcopy(fields), 0)).__name__
    assert unread_settings(fields | {"architectures": [own]}) == {}
    for name in (own.replace("For", "Bi"), own + "Eagle3", "OtherForCausalLM"):
        assert unread_settings(fields | {"architectures": [name]}) == {"architectures": [name]}


def test_a_sliding_window_that_a_llama_does_not_have_is_named() -> None:
    fields = tiny.config("llama", sliding_window=4)
    assert unread_settings(fields) == {"sliding_window": 4}
    assert unread_settings(fields | {"use_sliding_window": False}) == {}


PUBLISHED_ROTARY = {
    "Qwen3": ("qwen3", {"rope_theta": 1e6, "rope_scaling": None}, None),
    "Qwen's YaRN": ("qwen3",
     {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0,
      "original_max_position_embeddings": 32768, "attention_factor": None}}, "yarn"),
    "Llama 3.1": ("llama",
     {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "type": "llama3",
      "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192}}, "llama3"),
    "Qwen2.5-VL, as saved": ("qwen2",
     {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "type": "mrope",
      "mrope_section": [2, 1, 1]}}, None),
    "linear": ("llama", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4}},
               "linear"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_ROTARY)
def test_published_rotary_settings_are_all_read(name: str) -> None:
    model_type, settings, kind = PUBLISHED_ROTARY[name]
    fields = tiny.config(model_type) | {"rope_parameters": None} | settings
    scaling = read_architecture(fields).rotary.scaling
    assert (scaling and scaling.kind) == kind
    assert unread_settings(fields) == {}


UNREAD = [
    ({"rope_type": "default", "factor": 4.0}, {"factor": 4.0}),
    (YARN | {"ext_factor": 0}, {"ext_factor": 0}),
    (YARN | {"mscale": 1.0}, {"mscale": 1.0}),
    (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, {}),
    (YARN | {"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1.1},
     {"mscale": 1, "mscale_all_dim": 1}),
    # DeepSeek-R1-0528-Qwen3-8B's, and what makes it the same model to transformers
    (YARN | {"attn_factor": 0.8782488562869419, "attention_factor": 1.0}, {}),
    ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
    ({"partial_rotary_factor": 1.0}, {}),
]  # rotary, found  # fmt: skip


def test_keys_that_a_rope_type_does_not_read_are_named() -> None:
    for rotary, found in UNREAD:
        fields = tiny.config("qwen3", rope_parameters={"rope_theta": 1e4} | rotary)
        read_architecture(fields)
        assert unread_settings(fields) == {f"rope_parameters.{k}": v for k, v in found.items()}
