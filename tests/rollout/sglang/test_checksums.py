"""Expected checksums against independent implementations of SGLang's two hashes."""

import hashlib

import numpy as np
import pytest
import torch

from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.tensors import hf_shapes
from stable_opd_mcore.rollout.sglang.checksums import (
    ExpectedChecksums,
    as_held,
    cpu_hash,
    differences,
    gpu_hash,
)
from tests.integration.sglang_tools import architecture
from tests.models import tiny


def kernel_hash(words: np.ndarray, tile: int = 8192) -> str:
    """gpu_tensor_hash.py's kernel in numpy's own wrapping 32- and 64-bit integers."""
    u32 = np.uint32

    def fmix(x):
        x = x ^ (x >> u32(16))
        x = x * u32(0x85EBCA6B)
        x = x ^ (x >> u32(13))
        x = x * u32(0xC2B2AE35)
        return x ^ (x >> u32(16))

    def turn(x, r):
        return (x << u32(r)) | (x >> u32(32 - r))

    seed = 0x243F6A88
    seed_2 = u32(((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for start in range(0, len(words), tile):
            v = words[start : start + tile]
            i = np.arange(start, start + len(v), dtype=np.uint32)
            k1 = fmix(v ^ ((i * u32(0x27D4EB2D) + u32(seed)) ^ turn(i, 15)))
            k2 = fmix(v ^ ((i * u32(0x165667B1) + seed_2) ^ turn(i, 13)))
            size = u32(len(words) * 4 & 0xFFFFFFFF)
            h1 = fmix(np.array([k1.sum(dtype=np.uint32) ^ size]))[0]
            h2 = fmix(np.array([k2.sum(dtype=np.uint32) ^ size]))[0]
            total = total + ((np.uint64(h1) << np.uint64(32)) | np.uint64(h2))
        x = int(total)
    mask = (1 << 64) - 1
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & mask
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & mask
    return f"{x ^ (x >> 31):016x}"


@pytest.mark.parametrize("count", [1, 7, 8192, 8193, 50_001])
def test_gpu_hash_equals_the_kernels_hash(count):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count))
    assert gpu_hash([tensor]) == kernel_hash(tensor.numpy().view(np.uint32))


def test_pieces_hash_like_the_whole_tensor_in_bf16():
    tensor = torch.randn(5, 33).bfloat16()
    whole = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    assert cpu_hash([tensor[:2], tensor[2:]]) == hashlib.sha256(whole).hexdigest()[:16]
    assert gpu_hash([tensor[:2], tensor[2:]]) == gpu_hash([tensor])
    padded = np.frombuffer(whole + b"\0\0", dtype=np.uint32)
    assert gpu_hash([tensor]) == kernel_hash(padded)


def test_layout_over_more_ranks_than_key_value_groups():
    fields = read_architecture(architecture(num_key_value_heads=2, head_dim=16))
    expected = ExpectedChecksums(fields, 4, on_gpu=False)
    query, key, value = torch.randn(64, 64), torch.randn(32, 64), torch.randn(32, 64)
    for name, tensor in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
        expected.add(f"model.layers.0.self_attn.{name}.weight", tensor)
    names = {name for rank in expected.per_rank for name in rank}
    assert names == {"model.layers.0.self_attn.qkv_proj.weight"}
    # ranks 2 and 3 both hold the second group
    last = torch.cat([query[48:], key[16:], value[16:]])
    assert expected.per_rank[3].popitem()[1] == cpu_hash([last])


def test_experts_are_stacked_padded_and_cut_within_each():
    """SGLang on a CPU pads an expert's 48 columns with zeros to 32 of each rank."""
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48}
    fields = read_architecture(architecture("qwen3_moe", head_dim=16, **sizes))
    expected = ExpectedChecksums(fields, 2, on_gpu=False)
    gate, up, down = torch.randn(2, 48, 64), torch.randn(2, 48, 64), torch.randn(2, 64, 48)
    names = ("gate_proj", "up_proj", "down_proj")
    stacked = "model.layers.0.mlp.experts"
    for i in range(2):
        for name, tensor in zip(names, (gate, up, down), strict=True):
            assert not expected.per_rank[0]
            expected.add(f"{stacked}.{i}.{name}.weight", tensor[i])
            if i == 1 and tensor is up:
                first = expected.per_rank[0].pop(f"{stacked}.w13_weight")
    assert first == cpu_hash([torch.cat([gate[:, :32], up[:, :32]], dim=1)])
    padding = torch.zeros(2, 16, 64)
    last = {
        "w13": torch.cat([gate[:, 32:], padding, up[:, 32:], padding], dim=1),
        "w2": torch.cat([down[:, :, 32:], padding.transpose(1, 2)], dim=2),
    }
    assert expected.per_rank[1] == {
        f"{stacked}.{name}_weight": cpu_hash([tensor]) for name, tensor in last.items()
    }


def test_experts_with_gate_and_up_in_turn_have_biases_of_which_one_rank_adds_the_last():
    """As SGLang's gpt_oss loads the stacks of the files; on a CPU padded to 32 of each rank."""
    fields = tiny.architecture("gpt_oss", num_local_experts=2, num_experts_per_tok=2)
    layer = "model.layers.1."
    full = {name: torch.randn(shape) for name, shape in hf_shapes(fields).items() if layer in name}
    expected = ExpectedChecksums(fields, 2, on_gpu=False)
    for name, tensor in full.items():
        expected.add(name, as_held(name, tensor, torch.float32, fields))

    experts = f"{layer}mlp.experts."

    def stack(kind: str) -> torch.Tensor:
        return torch.stack([full[f"{experts}{i}.{kind}"] for i in range(2)])

    w13, b13, w2 = torch.zeros(2, 128, 32), torch.zeros(2, 128), torch.zeros(2, 32, 64)
    w13[:, 0:40:2], w13[:, 1:40:2] = stack("gate_proj.weight"), stack("up_proj.weight")
    b13[:, 0:40:2], b13[:, 1:40:2] = stack("gate_proj.bias"), stack("up_proj.bias")
    w2[..., :20] = stack("down_proj.weight")
    for rank, found in enumerate(expected.per_rank):
        b2 = torch.zeros(2, 32) if rank else stack("down_proj.bias")
        wanted = {
            f"{experts}w13_weight": w13.chunk(2, dim=1)[rank],
            f"{experts}w13_weight_bias": b13.chunk(2, dim=1)[rank],
            f"{experts}w2_weight": w2.chunk(2, dim=2)[rank],
            f"{experts}w2_weight_bias": b2,
            f"{layer}self_attn.sinks": full[f"{layer}self_attn.sinks"].bfloat16().chunk(2)[rank],
            f"{layer}self_attn.o_proj.bias": full[f"{layer}self_attn.o_proj.bias"],
            f"{layer}mlp.router.bias": full[f"{layer}mlp.router.bias"],
        }
        assert {name: found[name] for name in wanted} == {
            name: cpu_hash([tensor]) for name, tensor in wanted.items()
        }
    biased = f"{experts}0.up_proj.bias"
    assert as_held(biased, full[biased], torch.bfloat16, fields).dtype == torch.float32


@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v3"])
def test_products_that_give_latents_are_whole_on_every_rank(family):
    """With a latent of queries they are one matrix. GLM's router is held in fp32."""
    fields = tiny.architecture(family)
    layer, has_latent = "model.layers.1.", fields.latent.query_rank is not None
    full = {name: torch.randn(shape) for name, shape in hf_shapes(fields).items() if layer in name}
    expected = ExpectedChecksums(fields, 2, on_gpu=True)
    for name, tensor in full.items():
        expected.add(name, as_held(name, tensor, torch.bfloat16, fields))
    parts = {name.removeprefix(f"{layer}self_attn."): x.bfloat16() for name, x in full.items()}
    down = parts["kv_a_proj_with_mqa.weight"]
    wanted = {"kv_a_proj_with_mqa.weight": [down, down]}
    if has_latent:
        both = torch.cat((parts["q_a_proj.weight"], down))
        wanted = {"fused_qkv_a_proj_with_mqa.weight": [both, both]}
    queries = "q_b_proj.weight" if has_latent else "q_proj.weight"
    wanted |= {name: parts[name].chunk(2) for name in (queries, "kv_b_proj.weight")}
    wanted["o_proj.weight"] = parts["o_proj.weight"].chunk(2, dim=1)
    for rank, found in enumerate(expected.per_rank):
        for name, each in wanted.items():
            assert found[f"{layer}self_attn.{name}"] == gpu_hash([each[rank]]), name
        router, bias = (f"{layer}mlp.gate.{x}" for x in ("weight", "e_score_correction_bias"))
        held = full[router].bfloat16()
        assert found[router] == gpu_hash([held.float() if has_latent else held])
        assert found[bias] == gpu_hash([full[bias]])
        assert not any(".q_a_proj" in name for name in found)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_projections_of_a_gated_delta_net_are_fused_and_each_part_is_cut_by_itself(family):
    """Qwen3-Next's files have them fused, by key heads, as its servers do."""
    fields = tiny.architecture(family)
    net = fields.delta_net
    assert net is not None
    expected = ExpectedChecksums(fields, 2, on_gpu=False)
    layer = f"{fields.family.prefix}layers.0.linear_attn."
    full = {
        name: torch.randn(shape)
        for name, shape in hf_shapes(fields).items()
        if name.startswith(layer)
    }
    for name, tensor in full.items():
        expected.add(name, tensor)
    for rank, found in enumerate(expected.per_rank):

        def half(kind: str, *widths: int, rank: int = rank) -> torch.Tensor:
            tensor = full[layer + kind]
            parts = tensor.split(widths) if widths else (tensor,)
            return torch.cat([part.chunk(2)[rank] for part in parts])

        of_qkv = (net.keys, net.keys, net.values)
        if family == "qwen3_5":
            of_qkvz = half("in_proj_qkv.weight", *of_qkv), half("in_proj_z.weight")
            of_ba = half("in_proj_b.weight"), half("in_proj_a.weight")
        else:
            of_qkvz, of_ba = [half("in_proj_qkvz.weight")], [half("in_proj_ba.weight")]
        wanted = {
            "in_proj_qkvz.weight": torch.cat(of_qkvz),
            "in_proj_ba.weight": torch.cat(of_ba),
            "conv1d.weight": half("conv1d.weight", *of_qkv),
            "A_log": half("A_log"),
            "dt_bias": half("dt_bias"),
            "norm.weight": full[layer + "norm.weight"],
            "out_proj.weight": full[layer + "out_proj.weight"].chunk(2, dim=1)[rank],
        }
        names = {f"model.layers.0.linear_attn.{kind}": wanted[kind] for kind in wanted}
        assert found == {name: cpu_hash([tensor]) for name, tensor in names.items()}
    assert differences({}, {"visual.norm.weight": "untrained"}) == []


def test_vocabulary_is_padded_to_a_multiple_of_64():
    expected = ExpectedChecksums(read_architecture(architecture()), 2, on_gpu=False)
    table = torch.randn(100, 8)
    expected.add("model.embed_tokens.weight", table)
    second = torch.cat([table[64:], torch.zeros(28, 8)])
    assert expected.per_rank[1]["model.embed_tokens.weight"] == cpu_hash([second])
