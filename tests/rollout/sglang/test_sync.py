"""A publish without a server: what buckets hold, and that each way carries them exactly while the
next one is packed.
"""

import itertools
import math
import time

import pytest
import torch
from safetensors.torch import load_file

from stable_opd_mcore.models.build import build_model
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.models.weights import iter_hf_tensors
from stable_opd_mcore.rollout.sglang.group import listen
from stable_opd_mcore.rollout.sglang.sync import make_buckets, publish_weights
from stable_opd_mcore.rollout.sglang.transports import (
    Buffers,
    DiskTransport,
    DistributedTransport,
    Target,
    TensorTransport,
    write_safetensors,
)
from stable_opd_mcore.serving.client import SglangClient
from tests.integration.sglang_tools import architecture
from tests.rollout.weight_receiver import receiver

FIELDS = architecture(tied=False)
BUCKET = 40_000  # bytes: some tensors are larger, most are smaller


@pytest.fixture(scope="module")
def chunks(world):
    return build_model(read_architecture(FIELDS), world, precision="fp32", trainable=False, seed=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_every_tensor_once_in_two_buffers(chunks, dtype):
    buffers = Buffers()
    found, addresses, sizes = {}, [], []
    for bucket in make_buckets(chunks, dtype, BUCKET, buffers):
        assert bucket.flat.numel() <= BUCKET or len(bucket.tensors) == 1
        assert bucket.flat.numel() == sum(tensor.nbytes for _, tensor in bucket.tensors)
        found |= {name: tensor.clone() for name, tensor in bucket.tensors}
        addresses.append(bucket.flat.data_ptr())
        sizes.append(bucket.flat.numel())
    expected = {name: tensor.to(dtype) for name, tensor in iter_hf_tensors(chunks)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(sizes) >= math.ceil(sum(sizes) / BUCKET) > 3
    assert all(a != b for a, b in itertools.pairwise(addresses))

    again = [b.flat.data_ptr() for b in make_buckets(chunks, dtype, BUCKET, buffers)]
    assert len(set(again)) == 2, "a second publish has to do with the memory of the first"


def test_a_small_model_takes_no_more_than_its_size(chunks):
    (bucket,) = make_buckets(chunks, torch.float32, 2**40, Buffers())
    assert bucket.flat.untyped_storage().nbytes() == bucket.flat.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_is_a_safetensors_file(chunks, tmp_path, dtype):
    bucket = next(make_buckets(chunks, dtype, 400_000, Buffers()))
    write_safetensors(tmp_path / "bucket.safetensors", bucket)
    found = load_file(tmp_path / "bucket.safetensors")
    assert len(found) == len(bucket.tensors) > 3
    assert all(torch.equal(found[name], tensor) for name, tensor in bucket.tensors)


def transport_of(method: str, tmp_path):
    if method == "distributed":
        return DistributedTransport(60.0, "127.0.0.1", "gloo")
    return TensorTransport(60.0) if method == "tensor" else DiskTransport(60.0, tmp_path, {})


def publish(chunks, transport, urls: list[str], version: int):
    return publish_weights(
        chunks,
        [Target(f"receiver_{i}", SglangClient(url), 1) for i, url in enumerate(urls)],
        transport,
        version=version,
        label=str(version),
        dtype=torch.bfloat16,
        bucket_bytes=BUCKET,
    )


@pytest.mark.parametrize("method", ["distributed", "tensor", "disk"])
def test_each_way_is_exact_while_the_receivers_take_their_time(chunks, tmp_path, method):
    transport = transport_of(method, tmp_path)
    with receiver(FIELDS) as first, receiver(FIELDS) as second:
        for version in range(3):
            outcome = publish(chunks, transport, [first, second], version)
            assert (outcome.verified, outcome.failed) == (("receiver_0", "receiver_1"), {})
            with torch.no_grad():
                for weight in chunks[0].parameters():
                    weight.mul_(1.25)
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_did_not_arrive_is_named(chunks, tmp_path):
    lost = "model.layers.1.mlp.down_proj.weight"
    with receiver(FIELDS, loses=[lost]) as url:
        outcome = publish(chunks, transport_of("tensor", tmp_path), [url], 0)
    assert outcome.verified == ()
    assert f"differ from the trainer's, e.g. {lost}" in outcome.failed["receiver_0"]


def test_a_member_that_no_broadcast_reaches_is_not_waited_for(chunks):
    """gloo's timeout is 60 s here: a sender that waits until it passes takes longer."""
    transport = DistributedTransport(60.0, None, "gloo")
    with receiver(FIELDS) as hears, receiver(FIELDS, deaf=True) as deaf:
        began = time.monotonic()
        outcome = publish(chunks, transport, [hears, deaf], 0)
        assert time.monotonic() - began < 40
        assert outcome.verified == ()
        assert outcome.failed["receiver_1"].endswith("deaf")
        assert publish(chunks, transport, [hears], 1).verified == ("receiver_0",)


def test_the_trainer_listens_where_the_servers_can_reach_it():
    with listen(None, ["http://localhost:1"]) as found:
        assert found.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ValueError, match=r"sync_host=192.0.2.1: .* own address as the servers see"):
        listen("192.0.2.1", [])  # RFC 5737: nobody's
