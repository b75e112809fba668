"""Low-rank factors on servers that hold the frozen weights; without SGLang."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.layers.factors import factors_of
from stable_opd_mcore.models.lora import adapt
from stable_opd_mcore.rollout.sglang.adapter_sync import FactorSender
from stable_opd_mcore.rollout.sglang.agreement import disagreements
from stable_opd_mcore.rollout.sglang.sync import Outcome
from stable_opd_mcore.rollout.sglang.transports import Target, TensorTransport
from stable_opd_mcore.serving.client import SglangClient
from tests.integration.sglang_tools import architecture
from tests.models import tiny
from tests.rollout.weight_receiver import receiver

pytestmark = pytest.mark.slow

FIELDS = architecture(tied=False)


@pytest.fixture(scope="module")
def sync(world) -> FactorSender:
    fields = read_architecture(FIELDS)
    chunks = build_model(fields, world, precision="fp32", trainable=False, seed=2)
    adapt(chunks, LoraConfig(rank=4, alpha=8.0))
    return FactorSender(chunks, world, torch.float32, 40_000)


def push(sync: FactorSender, urls: Sequence[str], version: int) -> Outcome:
    tiny.redraw_factors(sync.chunks, version)
    targets = [Target(f"receiver_{n}", SglangClient(url), 1) for n, url in enumerate(urls)]
    label = str(version)
    outcome = sync.send_factors(targets, TensorTransport(60.0), label=label)
    arrived = [target for target in targets if target.name in outcome.verified]
    found, failed = disagreements(
        sync.chunks, sync.world, arrived, torch.float32, sync.name_of(label)
    )
    return replace(outcome, failed=outcome.failed | failed | found)


def test_frozen_weights_are_sent_once_in_a_servers_life(sync):
    """The receivers' answers are the trainer's with each version's factors, or a push fails."""
    factors = sum(own.nbytes for each in factors_of(sync.chunks) for own in each.parameters())
    with receiver(FIELDS) as stays:
        first, second = (push(sync, [stays], version) for version in range(2))
        with receiver(FIELDS) as started:
            third = push(sync, [stays, started], 2)
        fourth = push(sync, [stays, started], 3)
    assert [outcome.failed for outcome in (first, second, third)] == [{}] * 3
    assert third.verified == ("receiver_0", "receiver_1")
    assert fourth.failed.keys() == {"receiver_1"}
    frozen = first.num_bytes - factors
    assert frozen > factors
    sent = [outcome.num_bytes for outcome in (first, second, third, fourth)]
    assert sent == [frozen + factors, factors, frozen + factors, factors]


def test_a_rank_that_sends_nothing_reports_nothing(sync):
    assert sync.send_factors([], None, label="4") == Outcome((), {}, 0)


def test_a_server_that_answers_without_the_adapter_is_found(sync):
    with receiver(FIELDS, fault="forgets adapters") as url:
        outcome = push(sync, [url], 4)
    assert "it computes other log-probabilities than the trainer" in outcome.failed["receiver_0"]
