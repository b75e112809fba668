"""Tiny models of random settings agree with transformers, or are refused by name.

The test tries a few of each family; `python -m tests.models.test_random_configs 200 glm4_moe ...`
tries more and prints what was refused.
"""

import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import load_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.parallel.world import World, start_world
from tests.models import tiny

Fields = dict[str, Any]


def rotary(rng: Random, *, latents: bool = False) -> Fields:
    kinds = ["default", "yarn"] * 5 if latents else ["default"]  # the others are refused there
    kind = rng.choice([*kinds, "linear", "yarn", "llama3"])
    fields: Fields = {"rope_type": kind, "rope_theta": rng.choice([1e4, 5e4, 1e6])}
    if kind != "default":
        fields["factor"] = rng.choice([2.0, 8.0])
    if kind in ("yarn", "llama3"):
        fields["original_max_position_embeddings"] = rng.choice([16, 32])
    if kind == "llama3":
        fields |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        optional = {"mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 1.2}
        both = ("mscale", "mscale_all_dim") if latents and rng.random() < 0.8 else ()
        given = both or [key for key in optional if rng.random() < 0.4]
        fields |= {key: optional[key] for key in given}
        fields |= {"truncate": False} if rng.random() < 0.3 else {}
    return fields


def base(rng: Random, family: str) -> Fields:
    heads = rng.choice([1, 2, 3, 4])
    return {
        "model_type": family,
        "num_hidden_layers": rng.randint(1, 4),
        "hidden_size": heads * rng.choice([4, 8, 12]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([k for k in (1, 2, 3, 4) if heads % k == 0]),
        "head_dim": rng.choice([4, 16, 32]),
        "vocab_size": rng.randint(20, 60),
        "intermediate_size": rng.randint(8, 40),
        "max_position_embeddings": 64,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "initializer_range": 0.2,
        "tie_word_embeddings": rng.random() < 0.3,
        "attention_bias": rng.random() < 0.05,
        "pad_token_id": None,  # transformers does not train the row of this one
    }


def gemma3_text(rng: Random) -> Fields:
    fields = base(rng, "gemma3_text") | {
        "max_position_embeddings": rng.choice([6, 64, 128]),
        "sliding_window": rng.choice([1, 2, 5, 100]),
        "query_pre_attn_scalar": rng.choice([4, 8, 11, 256]),
        "hidden_activation": rng.choice(["gelu_pytorch_tanh"] * 19 + ["silu"]),
        "use_bidirectional_attention": rng.random() < 0.05,
        "final_logit_softcapping": rng.choice([None] * 9 + [30.0]),
    }
    if rng.random() < 0.3:
        fields["sliding_window_pattern"] = rng.choice([1, 2, 3])
    else:
        kinds = ["full_attention", "sliding_attention"]
        fields["layer_types"] = rng.choices(kinds, k=fields["num_hidden_layers"])
    of_windows = {"rope_type": "default", "rope_theta": 1e4}
    if rng.random() < 0.1:
        of_windows |= {"rope_type": "linear", "factor": 2.0}
    rope = rotary(rng)
    if rng.random() < 0.5:
        both = {"full_attention": rope, "sliding_attention": of_windows}
        return fields | {"rope_parameters": both}
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_local_base_freq": 2e4}
    return fields | {"rope_scaling": None if rope["rope_type"] == "default" else rope}


def with_experts(rng: Random, fields: Fields) -> Fields:
    number, groups = rng.choice([4, 6, 8, 12]), rng.choice([1, 1, 2, 4])
    fields |= {
        "n_routed_experts": number,
        "num_experts_per_tok": rng.choice([2, 3, 4] * 5 + [1]),
        "n_shared_experts": rng.choice([1, 2]),
        "moe_intermediate_size": 4 * rng.randint(1, 5),
        "routed_scaling_factor": rng.choice([1.0, 1.8, 2.5]),
        "first_k_dense_replace": rng.randrange(fields["num_hidden_layers"] + (rng.random() < 0.1)),
        "rope_parameters": rotary(rng, latents=fields["model_type"] != "glm4_moe"),
    }
    if fields["model_type"] == "deepseek_v2":
        other = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
        return fields | {"norm_topk_prob": False} | (other if rng.random() < 0.1 else {})
    groups = groups if number % groups == 0 else 1
    chosen = {"n_group": groups, "topk_group": rng.randint(min(2, groups), groups)}
    return fields | chosen | {"norm_topk_prob": rng.random() < 0.8}


def latents(rng: Random, family: str) -> Fields:
    fields = with_experts(rng, base(rng, family))
    fields |= {
        "num_key_value_heads": fields["num_attention_heads"],
        "q_lora_rank": rng.choice([None, 6, 8]),
        "kv_lora_rank": 2 * rng.randint(1, 5),
        "qk_nope_head_dim": 2 * rng.randint(1, 4),
        "qk_rope_head_dim": (rotated := rng.choice([2, 4, 8])),
        "head_dim": rotated,
        "v_head_dim": rng.randint(1, 9),
    }
    if family == "deepseek_v3" and rng.random() < 0.1:
        fields["rope_interleave"] = False
    if family == "glm4_moe_lite" and rng.random() < 0.6:
        dense = fields["first_k_dense_replace"]
        types = ["dense"] * dense + ["sparse"] * (fields["num_hidden_layers"] - dense)
        fields["mlp_layer_types"] = types if rng.random() < 0.9 else types[::-1]
    return fields


def glm4_moe(rng: Random) -> Fields:
    fields = with_experts(rng, base(rng, "glm4_moe"))
    fields["rope_parameters"] |= {"partial_rotary_factor": rng.choice([0.5, 0.5, 1.0])}
    return fields | {"attention_bias": rng.random() < 0.5, "use_qk_norm": rng.random() < 0.05}


def drawn(family: str, seed: int) -> Fields:
    rng = Random(f"{family} {seed}")
    if family in ("gemma3_text", "glm4_moe"):
        return gemma3_text(rng) if family == "gemma3_text" else glm4_moe(rng)
    return latents(rng, family)


FAMILIES = ("gemma3_text", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v2")


def compare(family: str, seed: int, world: World, directory: Path) -> float | str:
    """The largest difference of logits, as a share of the largest; or why it was refused."""
    fields = drawn(family, seed)
    try:
        read_architecture(fields)
    except UserError as error:
        return str(error)
    model = tiny.transformer(dict(fields), seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and "rotary" not in name:  # norms were 1, biases 0
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    model.save_pretrained(directory)
    architecture = read_architecture(directory)
    chunks = build_model(architecture, world, seed=None, trainable=False)
    load_hf(chunks, directory)
    lengths = [min(length, architecture.max_positions) for length in (9, 1, 5)]
    batch = tiny.microbatch(lengths, seed)
    batch = replace(batch, tokens_T=batch.tokens_T % architecture.vocab_size)
    head = output_head(chunks)
    assert head is not None
    with torch.no_grad():
        found = forward_hidden(chunks[0], batch) @ head.weight_VH.T
        sequences = batch.tokens_T.split(lengths)
        expected = torch.cat([model(sequence[None]).logits[0] for sequence in sequences])
    error = (found[:, : architecture.vocab_size] - expected).abs().max()
    return float(error / expected.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_agree_with_transformers_or_are_refused_by_name(family, world, tmp_path):
    found = [compare(family, seed, world, tmp_path / str(seed)) for seed in range(6)]
    errors = [one for one in found if isinstance(one, float)]
    assert len(errors) >= 2
    assert max(errors) < 1e-5


def main(number: int, families: list[str]) -> None:
    world = start_world(ParallelConfig(), seed=0)
    for family in families:
        refused, errors = Counter(), {}
        for seed in range(number):
            with tempfile.TemporaryDirectory() as directory:
                found = compare(family, seed, world, Path(directory))
            if isinstance(found, str):
                refused[found.partition(": ")[2][:40]] += 1
            else:
                errors[seed] = found
        worst = max(errors, key=errors.__getitem__)
        print(f"{family}: {len(errors)} agree to {errors[worst]:.1e} (seed {worst})")
        print(
            f"  refused {refused.total()}:",
            *(f"{n} {why}" for why, n in refused.items()),
            sep="\n    ",
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or list(FAMILIES))
