"""Weights to a real server of the oldest SGLang that a run accepts, by each transport.

It has no update sessions, and states one version per response and one place per rank. `make
sglang-old` installs it.
"""

import os

import pytest
import torch

from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.records import Sample, Sampling
from stable_opd_mcore.rollout.sglang.build import model_config, write_model_config
from stable_opd_mcore.rollout.sglang.group import DistributedTransport
from stable_opd_mcore.rollout.sglang.sync import publish_weights
from stable_opd_mcore.rollout.sglang.transports import (
    DiskTransport,
    Target,
    TensorTransport,
)
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.serving.client import RefusedRequest
from stable_opd_mcore.serving.process import (
    OLDEST_RELEASE,
    ServerOptions,
    SglangServer,
    check_release,
)
from stable_opd_mcore.serving.requests import Completion, Generation
from tests.integration.sglang_tools import (
    ROOT,
    SERVER_ARGUMENTS,
    VOCABULARY,
    architecture,
)
from tests.shares import weights_of

PYTHON = str(ROOT / ".venv-sglang-old/bin/python")
needs_old_sglang = pytest.mark.skipif(
    not os.access(PYTHON, os.X_OK) and os.environ.get("CI") != "true",
    reason=f"no SGLang at {PYTHON}: `make sglang-old` installs it",
)
pytestmark = [needs_old_sglang, pytest.mark.cluster]
RELEASE = ".".join(map(str, OLDEST_RELEASE))
FIELDS = architecture("qwen3", tied=True, head_dim=16, intermediate_size=80)  # padded to 96
PROMPT = tuple(range(3, 20))


@pytest.fixture
def server(tmp_path):
    """Two tensor ranks of random weights."""
    model = write_model_config(read_architecture(FIELDS), tmp_path / "model")
    options = ServerOptions(python=PYTHON, model=str(model), tensor=2, arguments=SERVER_ARGUMENTS)
    server = SglangServer(options, tmp_path / "server.log")
    server.start()
    server.wait_until_healthy()
    yield server
    server.stop()


def test_every_transport_reaches_a_release_without_sessions(tmp_path, world, server):
    """Read back and compared bit by bit; what is drawn then has the trainer's probabilities."""
    client = server.client()
    assert client.release() == RELEASE
    check_release(client.release(), client.url)
    with pytest.raises(RefusedRequest, match="HTTP 404"):
        client.call("POST", "/begin_weight_update", {})

    chunks = build_model(
        read_architecture(FIELDS), world, precision="fp32", trainable=False, seed=1
    )
    by_group = DistributedTransport(60.0, None, "gloo")
    files = DiskTransport(60.0, tmp_path / "weights", model_config(read_architecture(FIELDS)))
    for version, transport in enumerate((by_group, TensorTransport(60.0), files, by_group)):
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.mul_(1.1)
        outcome = publish_weights(
            chunks,
            [Target("old", client, 2)],
            transport,
            version=version,
            label=str(version),
            dtype=torch.float32,
            bucket_bytes=100_000,
        )
        assert (outcome.verified, outcome.failed) == (("old",), {})
        assert client.weight_version() == str(version)
        drawn = client.generate(request())
        assert {completion.weight_versions for completion in drawn} == {(str(version),)}
        (batch,) = packed(drawn)
        (scores,) = MegatronScorer(chunks, world, vocab_size=VOCABULARY).score([batch])
        torch.testing.assert_close(scores.logprob_N, batch.rollout_logprob_N, atol=1e-4, rtol=0)
    by_group.leave()


def request() -> Generation:
    sampling = Sampling(num_samples=3, max_new_tokens=8, stop_token_ids=(2,))
    return Generation(PROMPT, sampling, VOCABULARY)


def packed(drawn: list[Completion]):
    """One micro-batch of all responses; `pack` puts the longest first."""
    samples = []
    for completion in drawn:
        trained = (True,) * len(completion.token_ids)
        tokens, logprobs = completion.token_ids, completion.logprobs
        samples.append(
            Sample("rollout", "old:0", PROMPT, tokens, trained, rollout_logprobs=logprobs)
        )
    return pack(samples, weights_of(samples, 1, 1, 1), max_tokens=256)
