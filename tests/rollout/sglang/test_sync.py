"""Each transport delivers buckets exactly while the next one is packed; without SGLang."""

import itertools
import math
import os
import threading
import time

import pytest
import torch

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.layers.factors import factors_of
from stable_opd_mcore.models.lora import adapt
from stable_opd_mcore.models.weights import iter_hf_tensors
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.rollout.sglang import group
from stable_opd_mcore.rollout.sglang.checksums import SENT_TOGETHER
from stable_opd_mcore.rollout.sglang.group import (
    DistributedTransport,
    join_group,
    prepare_nccl,
)
from stable_opd_mcore.rollout.sglang.sync import make_buckets, send_weights, stamp
from stable_opd_mcore.rollout.sglang.transports import (
    Buffers,
    DiskTransport,
    Target,
    TensorTransport,
)
from stable_opd_mcore.serving.client import SglangClient
from tests.integration.sglang_tools import architecture
from tests.models import tiny
from tests.parallel.launch import run_ranks
from tests.rollout.weight_receiver import receiver
from tests.train.runs import tiny_config

pytestmark = pytest.mark.slow

FIELDS = architecture(tied=False)
BUCKET = 40_000  # bytes: some tensors are larger, most are smaller


@pytest.fixture(scope="module")
def chunks(world):
    return build_model(read_architecture(FIELDS), world, precision="fp32", trainable=False, seed=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_every_tensor_once_in_two_buffers(chunks, dtype):
    buffers = Buffers()
    packed, addresses, sizes = {}, [], []
    for bucket in make_buckets(chunks, dtype, BUCKET, buffers):
        assert bucket.flat.numel() <= BUCKET or len(bucket.tensors) == 1
        assert bucket.flat.numel() == sum(tensor.nbytes for _, tensor in bucket.tensors)
        packed |= {name: tensor.clone() for name, tensor in bucket.tensors}
        addresses.append(bucket.flat.data_ptr())
        sizes.append(bucket.flat.numel())
    expected = {name: tensor.to(dtype) for name, tensor in iter_hf_tensors(chunks)}
    assert packed.keys() == expected.keys()
    assert all(torch.equal(packed[name], expected[name]) for name in expected)
    assert len(sizes) >= math.ceil(sum(sizes) / BUCKET) > 3
    assert all(a != b for a, b in itertools.pairwise(addresses))

    again = [b.flat.data_ptr() for b in make_buckets(chunks, dtype, BUCKET, buffers)]
    assert len(set(again)) == 2, "a second publish reuses the memory of the first"


def test_decay_rates_travel_in_fp32_to_servers_in_bf16(world):
    """Odd sizes before them would put them at places that no view in fp32 can begin at."""
    fields = tiny.architecture("qwen3_5", linear_num_value_heads=6, linear_value_head_dim=3)
    chunks = build_model(fields, world, precision="bf16", trainable=False, seed=2)
    packed = {
        name: tensor.clone()
        for bucket in make_buckets(chunks, torch.bfloat16, BUCKET, Buffers())
        for name, tensor in bucket.tensors
    }
    for name, tensor in iter_hf_tensors(chunks):
        in_fp32 = name.endswith(".A_log")
        found = packed[name.replace("model.language_model.", "model.")]
        assert found.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
        assert torch.equal(found, tensor.to(found.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_products_that_sglang_joins_never_travel_in_two_buckets(world, dtype):
    """At bucket sizes below a pair's, and at those that end between its two tensors."""
    fields = tiny.architecture("glm4_moe_lite")
    chunks = build_model(fields, world, precision="fp32", trainable=False, seed=2)
    expected = {name: tensor.to(dtype) for name, tensor in iter_hf_tensors(chunks)}
    kinds = [f".self_attn.{kind}.weight" for kind in SENT_TOGETHER]
    pair = sum(expected[f"model.layers.0{kind}"].nbytes for kind in kinds)
    most = 0
    for size in range(pair // 4, 12 * pair, pair // 8):
        buckets = [dict(bucket.tensors) for bucket in make_buckets(chunks, dtype, size, Buffers())]
        for held in buckets:
            layers = [{name.removesuffix(k) for name in held if name.endswith(k)} for k in kinds]
            assert layers[0] == layers[1], size
        names = [name for held in buckets for name in held]
        assert names == list(expected)
        most = max(most, *map(len, buckets))
    assert most > 9  # the largest buckets have room for several pairs


def test_biases_of_the_choice_of_experts_travel_in_fp32(world):
    fields = tiny.architecture("glm4_moe_lite")
    chunks = build_model(fields, world, precision="bf16", trainable=False, seed=2)
    expected = dict(iter_hf_tensors(chunks))
    buckets = []
    for bucket in make_buckets(chunks, torch.bfloat16, 1500, Buffers()):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in bucket.tensors)
        buckets.append({name: tensor.dtype for name, tensor in bucket.tensors})
    in_fp32 = [name for each in buckets for name, dtype in each.items() if dtype == torch.float32]
    assert in_fp32 == [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_experts_travel_as_in_the_files(world, dtype):
    fields = tiny.architecture("gpt_oss")
    chunks = build_model(fields, world, precision="fp32", trainable=False, seed=2)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.normal_()  # biases were zero
    names, size = [], 8 * 32 * 40 * dtype.itemsize  # all experts' gate and up
    expected = dict(tiny.file_tensors(chunks))
    for bucket in make_buckets(chunks, dtype, size, Buffers()):
        assert bucket.flat.numel() <= size
        for name, tensor in bucket.tensors:
            assert torch.equal(tensor, expected[name].to(dtype))
            names.append(name)
    assert names == list(expected)


def test_a_small_models_bucket_is_as_large_as_the_model(chunks):
    (bucket,) = make_buckets(chunks, torch.float32, 2**40, Buffers())
    assert bucket.flat.untyped_storage().nbytes() == bucket.flat.numel()


def transport_of(method: str, tmp_path):
    if method == "distributed":
        return DistributedTransport(60.0, "gloo")
    return TensorTransport(60.0) if method == "tensor" else DiskTransport(60.0, tmp_path, {})


def publish(chunks, transport, urls, version, clients=None, *, tensor=1, tolerant=False):
    """To receivers at `urls`, by new clients unless these are given."""
    clients = clients or [SglangClient(url) for url in urls]
    targets = [Target(f"receiver_{i}", client, tensor) for i, client in enumerate(clients)]
    outcome = send_weights(
        chunks,
        targets,
        transport,
        label=str(version),
        dtype=torch.bfloat16,
        bucket_bytes=BUCKET,
        tolerant=tolerant,
    )
    for target in targets:
        if target.name in outcome.verified:
            stamp(target.client, version)
    return outcome


@pytest.mark.parametrize("method", ["distributed", "tensor", "disk"])
def test_each_transport_is_exact_with_slow_receivers(chunks, tmp_path, method):
    transport = transport_of(method, tmp_path)
    with receiver(FIELDS) as first, receiver(FIELDS) as second:
        urls = [first, second]
        for version in range(3):
            outcome = publish(chunks, transport, urls, version)
            assert (outcome.verified, outcome.failed) == (("receiver_0", "receiver_1"), {})
            assert [SglangClient(url).weight_version() for url in urls] == [str(version)] * 2
            with torch.no_grad():
                for weight in chunks[0].parameters():
                    weight.mul_(1.25)
    assert not list(tmp_path.iterdir())


def test_servers_receive_the_matrices_merged_with_their_factors(world):
    low = build_model(read_architecture(FIELDS), world, precision="bf16", seed=2)
    expected = {name: tensor.clone() for name, tensor in iter_hf_tensors(low)}
    adapt(low, LoraConfig(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(0)
    for factors in factors_of(low):
        for name, a_RI, b_OR in zip(factors.entry.hf_names, factors.A, factors.B, strict=True):
            with torch.no_grad():
                b_OR.copy_(0.1 * torch.randn(b_OR.shape, generator=generator))
            product = 8.0 / 4 * b_OR.detach().float() @ a_RI.detach().float()
            expected[name] = (expected[name].float() + product).bfloat16()
    for bucket in make_buckets(low, torch.bfloat16, BUCKET, Buffers()):
        for name, tensor in bucket.tensors:
            torch.testing.assert_close(tensor, expected[name], rtol=2**-7, atol=0)
    with receiver(FIELDS) as url:
        outcome = publish(low, TensorTransport(60.0), [url], 1)
    assert (outcome.verified, outcome.failed) == (("receiver_0",), {})


def publish_from_two_ranks(rank: int, world_size: int, urls: list[str]) -> None:
    world = start_world(ParallelConfig(tensor=world_size), seed=0)
    model = build_model(read_architecture(FIELDS), world, precision="fp32", trainable=False, seed=2)
    sources = {"receiver_0": [0], "receiver_1": [1]}
    transport = TensorTransport(60.0, world.model_group, sources)
    for version in range(2):
        outcome = publish(model, transport, urls, version)
        sent = ("receiver_0", "receiver_1") if rank == 0 else ()
        assert (outcome.verified, outcome.failed) == (sent, {})
    outcome = publish(model, transport, [urls[0], "http://127.0.0.1:9"], 3)
    assert outcome.verified == (("receiver_0",) if rank == 0 else ())
    stop_world()


def test_each_server_reads_the_memory_of_the_rank_on_its_gpu():
    """Rank 1 never talks to a server, but the second server reads its buckets."""
    with receiver(FIELDS) as first, receiver(FIELDS) as second:
        run_ranks(2, publish_from_two_ranks, [first, second])


def test_a_server_that_dies_with_a_handle_costs_no_other_its_weights(chunks, tmp_path):
    transport = transport_of("tensor", tmp_path)
    with receiver(FIELDS) as stays, receiver(FIELDS, fault="dies") as dies:
        outcome = publish(chunks, transport, [stays, dies], 0)
        assert (outcome.verified, outcome.failed.keys()) == (("receiver_0",), {"receiver_1"})
        with receiver(FIELDS) as started:
            outcome = publish(chunks, transport, [stays, started], 1)
    assert outcome.verified == ("receiver_0", "receiver_1"), outcome.failed


def test_a_missing_tensor_is_named_and_the_version_is_not_stamped(chunks, tmp_path):
    lost = "model.layers.1.mlp.down_proj.weight"
    with receiver(FIELDS, loses=[lost]) as url:
        outcome = publish(chunks, transport_of("tensor", tmp_path), [url], 0)
        assert SglangClient(url).weight_version() == "incomplete"
        assert outcome.verified == ()
        assert f"differ from the trainer's, e.g. {lost}" in outcome.failed["receiver_0"]
        tolerated, other_ranks = (  # verify=warn accepts other checksums, but no other reply
            publish(chunks, transport_of("disk", tmp_path), [url], n, tensor=n, tolerant=True)
            for n in (1, 2)
        )
    assert (tolerated.verified, tolerated.different["receiver_0"].rank) == (("receiver_0",), 0)
    assert other_ranks.verified == ()
    assert "there are checksums of ranks [0], expected 2" in other_ranks.failed["receiver_0"]


@pytest.mark.parametrize("step", ["group", "broadcast"])
def test_the_sender_does_not_wait_for_a_server_that_refused(chunks, monkeypatch, step):
    """All members' time-outs are ten minutes; the one that joins the group is free again at once.

    The refusal of a group arrives before the sender's own thread has begun to join.
    """

    def join_late(*arguments):
        time.sleep(0.2)
        return join_group(*arguments)

    monkeypatch.setattr(group, "join_group", join_late)
    transport = DistributedTransport(600.0, "gloo")
    with receiver(FIELDS) as receives, receiver(FIELDS, fault=f"refuses {step}") as refuses:
        began = time.monotonic()
        outcome = publish(chunks, transport, [receives, refuses], 0)
        assert time.monotonic() - began < 400
        assert outcome.failed["receiver_1"].endswith("refused")
        assert outcome.verified == ()
        assert publish(chunks, transport, [receives], 1).verified == ("receiver_0",)


@pytest.mark.parametrize("call", ["join_group", "_broadcast"])
def test_a_call_that_blocks_in_nccl_is_abandoned_at_the_deadline(chunks, monkeypatch, call):
    """As ncclCommInitRank does without one of its members. The next group is another one."""
    monkeypatch.setattr(group, call, lambda *_: threading.Event().wait())
    monkeypatch.setattr(group, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(group, "_CONNECT_SECONDS", 0.1)
    transport = DistributedTransport(1.0, "gloo")
    with receiver(FIELDS) as waits, receiver(FIELDS) as later:
        outcome = publish(chunks, transport, [waits], 0)
        assert outcome.verified == ()
        assert outcome.failed.keys() == {"receiver_0"}
        monkeypatch.undo()
        transport.timeout = 60.0
        assert publish(chunks, transport, [later], 1).verified == ("receiver_0",)
    stuck = [thread for thread in threading.enumerate() if thread.name == "weight-group"]
    assert stuck
    assert all(thread.daemon for thread in stuck), "the process could not end"


@pytest.mark.parametrize(
    ("sglang", "value"), [({}, "0"), ({"placement": "colocated"}, None), ({"sync": "disk"}, None)]
)
def test_nccl_is_prepared_where_weights_travel_through_it(monkeypatch, tmp_path, sglang, value):
    monkeypatch.setattr(os, "environ", {})
    prepare_nccl(tiny_config(tmp_path, "run", rollout={"engine": "sglang", "sglang": sglang}))
    assert os.environ.get("NCCL_CUMEM_ENABLE") == value
    os.environ["NCCL_CUMEM_ENABLE"] = "1"  # the user's own
    prepare_nccl(tiny_config(tmp_path, "run", rollout={"engine": "sglang", "sglang": sglang}))
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"


def test_a_started_again_member_costs_no_other_member_its_weights(chunks):
    """The other one needs a while to leave the old group; its client stays open meanwhile."""
    transport = DistributedTransport(60.0, "gloo")
    with receiver(FIELDS, fault="leaves slowly") as url:
        stays = SglangClient(url)
        for version in range(2):
            with receiver(FIELDS) as started:  # another process, another client
                clients = [stays, SglangClient(started)]
                outcome = publish(chunks, transport, [], version, clients)
            assert outcome.verified == ("receiver_0", "receiver_1"), outcome.failed


def test_a_cache_that_was_not_flushed_fails_the_publish(chunks, tmp_path):
    with receiver(FIELDS, fault="keeps cache") as url:
        outcome = publish(chunks, transport_of("tensor", tmp_path), [url], 0)
    assert outcome.verified == ()
    assert "160 tokens of the probe are cached after /flush_cache" in outcome.failed["receiver_0"]
