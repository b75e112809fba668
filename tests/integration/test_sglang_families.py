"""Weights of every family from TP2 x PP2 trainers to SGLang servers of two ranks, bit for bit; and
runs of three steps with the newer families, which resume after the second."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Module

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.layers.routers import Routers
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.sglang import publisher
from stable_opd_mcore.rollout.sglang.build import build_sglang_engine
from stable_opd_mcore.rollout.sglang.server_setup import family_arguments, write_model_config
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.serving.process import ServerOptions, SglangServer
from tests.integration.sglang_tools import (
    PYTHON,
    SERVER_ARGUMENTS,
    VOCABULARY,
    architecture,
    events,
    external,
    needs_sglang,
    rows,
    started,
    train,
)
from tests.models import tiny
from tests.parallel.launch import run_ranks
from tests.shares import weights_of

pytestmark = [needs_sglang, pytest.mark.cluster]

ROUTED = tiny.ROUTED | {  # the widths of experts are padded by the server
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
}
LATENTS = {
    **tiny.DEEPSEEK,
    **ROUTED,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 16,
}
FAMILIES = {  # the student of the other files is an untied qwen2
    "qwen3_vl": {  # served as a qwen3
        "model_type": "qwen3_vl",
        "text_config": architecture(
            "qwen3_vl_text",
            head_dim=16,
            rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]},
        ),
        "tie_word_embeddings": True,
    },
    "llama": architecture("llama", tied=False, intermediate_size=80),  # padded by the server
    "qwen3_moe": architecture(
        "qwen3_moe",
        tied=False,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,  # padded by the server
        norm_topk_prob=True,
    ),
    "gemma3": {  # served as a gemma3_text
        "model_type": "gemma3",
        "text_config": architecture(
            "gemma3_text",
            head_dim=16,
            **tiny.GEMMA3 | {"layer_types": ["sliding_attention", "full_attention"]},
        )
        | {"rope_theta": None},
        "tie_word_embeddings": True,
    },
    "glm4_moe_lite": architecture("glm4_moe_lite", tied=False, **LATENTS),
    "deepseek_v3": architecture("deepseek_v3", tied=False, **LATENTS | tiny.MOONLIGHT),
    "deepseek_v2": architecture(
        "deepseek_v2", tied=False, **LATENTS | tiny.V2_LITE | {"first_k_dense_replace": 1}
    ),
    "glm4_moe": architecture("glm4_moe", tied=False, **ROUTED | tiny.AIR | {"head_dim": 16}),
    "gpt_oss": architecture(
        "gpt_oss",
        tied=False,
        rope_theta=150000.0,
        **tiny.GPT_OSS
        | {"head_dim": 16, "intermediate_size": 48, "layer_types": None},  # padded by the server
    ),
}
ON_DISK = ("llama",)  # the others' weights are broadcast
TRAINED = ("gemma3", "glm4_moe_lite", "deepseek_v3")
DENSE = {"tensor": 2, "pipeline": 2}
EXPERTS = {**DENSE, "expert": 2, "sequence": True}


@pytest.mark.parametrize(
    "names",
    [
        *(("qwen3_vl", "gpt_oss"), ("llama", "qwen3_moe")),
        *(("gemma3", "glm4_moe_lite"), ("deepseek_v3",), ("deepseek_v2", "glm4_moe")),
    ],
    ids="-".join,
)
def test_families_arrive_bit_exactly(tmp_path, names):
    """Two publishes with different weights; one that is not bit-exact fails, or that makes a server
    compute other log-probabilities."""
    servers = [_server(tmp_path / name, FAMILIES[name]) for name in names]
    with started(*servers):
        urls = {name: server.url for name, server in zip(names, servers, strict=True)}
        run_ranks(4, _publish_all, str(tmp_path), urls)
        for name in {*names}.intersection(TRAINED):
            _train_and_resume(tmp_path, name, urls[name])
    for name in names:
        assert [(event["event"], event["detail"]) for event in events(tmp_path / name)] == [
            ("published", "version 0"),
            ("published", "version 1"),
        ]


def _train_and_resume(directory: Path, name: str, url: str) -> None:
    decoder = FAMILIES[name].get("text_config", FAMILIES[name])
    settings = (
        f"student.architecture={json.dumps(decoder)}",
        *external(url),
        f"rollout.sglang.api_key_file={directory / name / 'key'}",
        *("sampling.max_new_tokens=12", "checkpoint.every=1", "optimizer.warmup_steps=0"),
    )
    train(directory, f"{name}_run", "train.steps=2", *settings)
    run = train(directory, f"{name}_run", "train.steps=3", *settings)
    found = rows(run)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert max(row["logprob/rollout_gap_max"] for row in found) < 1e-4
    assert min(row["grad_norm"] for row in found) > 0
    published = [event["detail"] for event in events(run) if event["event"] == "published"]
    assert published == [f"version {version}" for version in (0, 1, 2, 2, 3)]
    assert {event["event"] for event in events(run)} == {"published"}


def _server(directory: Path, fields: dict[str, Any]) -> SglangServer:
    student = read_architecture(fields)
    model = write_model_config(student, directory / "model")
    (directory / "key").touch(0o600)
    (directory / "key").write_text("secret\n")
    arguments = (*SERVER_ARGUMENTS, *family_arguments(student, "cpu", is_student=True))
    if "num_experts_per_tok" in fields:
        arguments += ("--enable-return-routed-experts",)
    options = ServerOptions(
        python=PYTHON, model=str(model), tensor=2, api_key="secret", arguments=arguments
    )
    return SglangServer(options, directory / "server.log")


def _publish_all(rank: int, world_size: int, directory: str, urls: dict[str, str]) -> None:
    for name, url in urls.items():
        world = start_world(ParallelConfig(**_layout(name)), seed=0)
        _publish(world, directory, name, url)
        stop_world()


def _layout(name: str) -> dict[str, Any]:
    return EXPERTS if "num_experts_per_tok" in FAMILIES[name] else DENSE


def _publish(world: World, directory: str, name: str, url: str) -> None:
    config = parse_config(
        {
            "run": {"name": name, "directory": directory},
            "student": {"architecture": FAMILIES[name]},
            "tokenizer": {"path": "synthetic"},
            "data": {"train": {"path": "synthetic:arithmetic"}},
            "parallel": _layout(name),
            "rollout": {
                "engine": "sglang",
                "routing_replay": "num_experts_per_tok" in FAMILIES[name],
                "sglang": {
                    "placement": "external",
                    "urls": [url],
                    "api_key_file": f"{directory}/{name}/key",
                    "sync": "disk" if name in ON_DISK else "distributed",
                },
            },
        },
        origin=name,
    )
    chunks = build_model(
        read_architecture(FAMILIES[name]), world, precision="fp32", trainable=False, seed=1
    )
    publisher.WEIGHT_BUCKET_BYTES = 2**20
    engine = build_sglang_engine(config, world, chunks, None, VOCABULARY)
    engine.publish(0)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.mul_(1.25)
            if parameter.dim() == 1:  # biases were zero; a server holds sinks in bf16
                parameter.add_(torch.arange(len(parameter)).cos(), alpha=0.1)
                parameter.copy_(parameter.bfloat16())
    engine.publish(1)
    prompts = [Prompt(f"test:{i}", "", tuple(range(3 + i, 20 + i))) for i in range(3)]
    rollouts = engine.generate(prompts, Sampling(num_samples=2, max_new_tokens=5), step=0)
    assert [r.prompt.prompt_id for r in rollouts] == [f"test:{i // 2}" for i in range(6)]
    assert {r.weight_version for r in rollouts} == {1}
    engine.close()
    _check_logprobs(world, chunks, rollouts, Path(directory) / f"{name}_gap")


def _check_logprobs(
    world: World, chunks: Sequence[Module], rollouts: Sequence[Rollout], report: Path
) -> None:
    """The server's log-probabilities are those of the trainer, which chooses the same experts."""
    samples = rollout_samples(rollouts)
    experts = architecture_of(chunks).experts
    (batch,) = pack(
        samples,
        weights_of(samples),
        max_tokens=1024,
        routing=experts and (architecture_of(chunks).num_layers, experts.per_token),
        pad_to_multiple=world.token_multiple,
    )
    replaying = partial(Routers(chunks).applying, trains=False, counts=False)
    for around in (lambda _: nullcontext(), replaying):
        scorer = MegatronScorer(chunks, world, vocab_size=VOCABULARY, around=around)
        for scores in scorer.score([batch]):  # last stage only
            assert scores.logprob_N is not None
            gap_N = (scores.logprob_N - batch.rollout_logprob_N).abs()
            with report.open("a") as file:
                file.write(f"{gap_N.mean():.2e} {gap_N.max():.2e}\n")
            assert gap_N.max() < 1e-4
    if architecture_of(chunks).experts is None:
        assert batch.routed_experts_TYX is None
        return
    assert batch.routed_experts_TYX is not None
    assert (batch.routed_experts_TYX >= 0).all(dim=(1, 2)).sum() == sum(
        len(rollout.prompt.token_ids) + len(rollout.token_ids) - 1 for rollout in rollouts
    )
    wrong = replace(batch, routed_experts_TYX=(batch.routed_experts_TYX + 1) % 8)
    scorer = MegatronScorer(chunks, world, vocab_size=VOCABULARY, around=replaying)
    for scores in scorer.score([wrong]):
        assert scores.logprob_N is not None
        assert (scores.logprob_N - batch.rollout_logprob_N).abs().max() > 1e-2
