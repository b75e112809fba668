"""A real server with a frozen draft of random weights: publishes leave the draft as it is, and
log-probabilities are the student's. It takes the likeliest tokens (tools/sglang_cpu/drafts.py)."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.weights import random_weights
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.rollout.given_texts import logprobs_of
from stable_opd_mcore.rollout.sglang.agreement import disagreements
from stable_opd_mcore.rollout.sglang.server_setup import write_model_config
from stable_opd_mcore.rollout.sglang.sync import send_weights
from stable_opd_mcore.rollout.sglang.transports import Target, TensorTransport
from stable_opd_mcore.serving.process import ServerOptions, SglangServer
from stable_opd_mcore.serving.requests import Completion, Generation
from tests.integration.sglang_tools import (
    PYTHON,
    SERVER_ARGUMENTS,
    VOCABULARY,
    architecture,
    needs_sglang,
    started,
)

pytestmark = [needs_sglang, pytest.mark.cluster]
FIELDS = architecture("qwen2", tied=False, num_hidden_layers=4)


def write_draft(directory: Path) -> Path:
    """An EAGLE-3 model of random weights, with a shorter window than the student's."""
    hidden, wide, vocabulary = 64, 128, VOCABULARY
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (hidden // 2, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (hidden // 2, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) / 10 for name, shape in shapes.items()}
    tensors["d2t"] = torch.zeros(vocabulary, dtype=torch.long)  # each token is its own
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[SglangServer]:
    home = tmp_path_factory.mktemp("drafted")
    options = ServerOptions(
        python=PYTHON,
        model=str(write_model_config(read_architecture(FIELDS), home / "model")),
        arguments=(
            *(*SERVER_ARGUMENTS, "--speculative-draft-attention-backend", "intel_amx"),
            *("--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", str(write_draft(home / "draft"))),
            *("--speculative-draft-load-format", "auto", "--speculative-num-steps", "1"),
            *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
        ),
    )
    server = SglangServer(options, home / "server.log")
    with started(server):
        yield server


def checksums(server: SglangServer, role: str) -> Any:
    body = {"action": "checksum", "selector": role}
    (rank,) = server.client().call("POST", "/weights_checker", body)["ranks"]
    return rank["checksums"]


def assert_logprobs(chunks: Any, world: Any, prompt: tuple[int, ...], text: Completion) -> None:
    """They are the trainer's."""
    (expected,) = logprobs_of(chunks, world, prompt, [text.token_ids])
    np.testing.assert_allclose(text.logprobs, expected, atol=1e-4, rtol=0)


def test_two_publishes_reach_the_student_and_not_its_draft(world, server):
    """Tokens are judged with a draft; the trainer gives them the same log-probabilities. The second
    publish interrupts a response, which continues with the new weights."""
    prompt, client = tuple(range(3, 12)), server.client()
    begun: Future[Completion] | None = None
    chunks = build_model(read_architecture(FIELDS), world, trainable=False, seed=5)
    target = Target("server", server.client(), 1)
    draft = checksums(server, "draft")
    own = {name: value for name, value in draft.items() if "embed" not in name}
    assert len(own) > 5
    for version in (1, 2):
        if version == 2:
            begun = client.submit(Generation(prompt, Sampling(max_new_tokens=240), VOCABULARY))
            short = Generation(prompt[:5], Sampling(max_new_tokens=8), VOCABULARY)
            client.submit(short).result()  # so that the other one has begun, too
        random_weights(chunks, seed=version)
        sent = send_weights(
            *(chunks, [target], TensorTransport(60.0)),
            label=str(version),
            dtype=torch.float32,
            bucket_bytes=2**18,
        )
        assert sent.verified == ("server",), sent.failed
        assert {name: checksums(server, "draft")[name] for name in own} == own
        assert disagreements(chunks, world, [target], torch.float32) == ({}, {})
    assert begun is not None
    cut = begun.result()
    assert cut.finish_reason == "open"
    assert 0 < len(cut.token_ids) < 240
    prompts = [tuple(range(40, 49)), tuple(range(70, 79)), (*prompt, *cut.token_ids.tolist())]
    sampling = Sampling(max_new_tokens=8, top_p=0.9)
    requests = [Generation(each, sampling, VOCABULARY) for each in prompts]
    for given, reply in zip(prompts, [client.submit(each) for each in requests], strict=True):
        text = reply.result()
        assert text.judgements + text.accepted_tokens in (7, 8)  # the first comes with the prompt
        assert_logprobs(chunks, world, given, text)
    random_weights(chunks, seed=1)
    assert_logprobs(chunks, world, prompt, cut)
