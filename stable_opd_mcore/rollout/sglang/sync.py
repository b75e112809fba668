"""Send the trainer's weights to the servers once, and verify them there.

Whole tensors are sent in buckets (models.weights gathers them over tensor and pipeline ranks), so
no second copy of the model exists. The order matters, because a server may die at any point:

1. abort requests, begin the update
2. send the buckets; from the first one on the server states the version "incomplete"
3. end the update, flush the cache and verify that it is empty, compare the checksums
4. only then stamp the new version: Publisher does it, after agreement.py's comparison

The expected checksums are computed in a second pass over the weights while the servers compute
theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.models.files.expert_stacks import file_shapes, place
from stable_opd_mcore.models.weights import architecture_of, iter_hf_tensors
from stable_opd_mcore.rollout.sglang.checksums import (
    SENT_TOGETHER,
    Checksums,
    Difference,
    ExpectedChecksums,
    as_held,
    difference,
    dtype_sent,
    name_on_server,
)
from stable_opd_mcore.rollout.sglang.group import in_daemon
from stable_opd_mcore.rollout.sglang.transports import (
    NOT_THE_DRAFT,
    Bucket,
    Buffers,
    Target,
    Transport,
    ask_all,
)
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import ATTEMPTS, RefusedRequest, SglangClient

_PROBE_TOKENS = 160  # more than a page of any cache


@dataclass(frozen=True)
class Outcome:
    """The result of one push."""

    verified: tuple[str, ...]  # servers that have the weights
    failed: dict[str, str]  # the other servers, and why
    num_bytes: int
    # by a server's number of tensor ranks: the checksums that each rank must report
    checksums: Mapping[int, Sequence[Checksums]] = field(default_factory=dict)
    different: Mapping[str, Difference] = field(default_factory=dict)  # by server


def send_weights(
    chunks: Sequence[Module],
    targets: Sequence[Target],
    transport: Transport | None,
    *,
    label: str,
    dtype: torch.dtype,
    bucket_bytes: int,
    tolerant: bool = False,
) -> Outcome:
    """Send `targets` the weights. The caller stamps the version (`stamp`).

    Collective over the tensor and pipeline ranks of one replica, and over those that hold other
    experts of the same layers (World.coupled_replicas).

    Args:
        transport: None on ranks that only take part in gathering the weights. The sender's outcome
            counts.
        label: unique to this push.
        tolerant: count a server whose checksums differ as verified (rollout.sglang.verify=warn).
    """
    if transport is None:
        take_part(chunks)  # the sender sends
        take_part(chunks)  # the sender verifies
        return Outcome((), {}, 0)
    sessions: dict[str, _UpdateSession] = {}
    unreachable: dict[str, str] = {}
    if transport.is_sender:
        probe = [0] * min(_PROBE_TOKENS, architecture_of(chunks).max_positions - 1)
        sessions, unreachable = ask_all(targets, lambda t: _UpdateSession(t.client, probe))
        targets = [target for target in targets if target.name in sessions]
    transport.open(targets, label)
    transport.failed |= unreachable
    num_bytes = 0
    for bucket in make_buckets(chunks, dtype, bucket_bytes, transport.buffers):
        transport.send(bucket)
        num_bytes += bucket.flat.numel()
    if not transport.is_sender:
        take_part(chunks)  # the sender verifies
        return Outcome((), {}, 0)
    transport.close()
    checksums, different = _verify_all(transport, sessions, chunks, dtype, tolerant)
    transport.clean_up()
    verified = tuple(target.name for target in transport.alive)
    return Outcome(verified, dict(transport.failed), num_bytes, checksums, different)


def take_part(chunks: Sequence[Module]) -> None:
    """Take part in gathering all tensors on the ranks that need them."""
    for _ in iter_hf_tensors(chunks):
        pass


def make_buckets(
    chunks: Sequence[Module], dtype: torch.dtype, bucket_bytes: int, buffers: Buffers
) -> Iterator[Bucket]:
    """Whole tensors cast to the types in which they are sent, packed into two buffers in turn; a
    large one by itself. Where files stack the experts of a layer, a stack is one tensor. Two that
    SGLang joins are in one bucket."""
    architecture = architecture_of(chunks)
    is_stacked = architecture.family.stacked_experts
    shapes = {
        name_on_server(name, architecture): shape
        for name, shape in file_shapes(architecture, is_stacked).items()
    }
    dtypes = {name: dtype_sent(name, dtype) for name in shapes}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    # What must fit into a bucket together, from its first tensor on
    needed = sizes | {
        name: sizes[name] + sizes[partner]
        for name in sizes
        if (partner := name.replace(*SENT_TOGETHER)) != name and partner in sizes
    }
    bucket_bytes = min(bucket_bytes, sum(sizes.values()))
    buffer = torch.empty(0, dtype=torch.uint8)
    pending: dict[str, Tensor] = {}
    used = 0
    for name, tensor in iter_hf_tensors(chunks):
        found = place(name, architecture, is_stacked)
        sent = name_on_server(name if found is None else found.stack, architecture)
        if sent not in pending:
            is_aligned = used % dtypes[sent].itemsize == 0
            if pending and (used + needed[sent] > len(buffer) or not is_aligned):
                yield Bucket(buffer[:used], tuple(pending.items()))
                pending, used = {}, 0
            if not pending:
                buffer = buffers.take(max(needed[sent], bucket_bytes), tensor.device)
            view = buffer[used : used + sizes[sent]].view(dtypes[sent])
            pending[sent] = view.view(shapes[sent])
            used += sizes[sent]
        (pending[sent] if found is None else found.of(pending[sent])).copy_(tensor)
    yield Bucket(buffer[:used], tuple(pending.items()))


def _verify_all(
    transport: Transport,
    sessions: dict[str, _UpdateSession],
    chunks: Sequence[Module],
    dtype: torch.dtype,
    tolerant: bool,
) -> tuple[dict[int, list[Checksums]], dict[str, Difference]]:
    """End every session and compare checksums. Returns the checksums and the differences: see
    `Outcome`."""
    alive = transport.alive
    on_gpu = next(chunks[0].parameters()).is_cuda  # servers run on the trainer's kind of device
    expected = {
        size: ExpectedChecksums(architecture_of(chunks), size, on_gpu=on_gpu)
        for size in {target.tensor for target in alive}
    }
    finish = in_daemon(lambda: ask_all(alive, lambda t: sessions[t.name].finish()), "verify")
    for name, tensor in iter_hf_tensors(chunks):
        for checksums in expected.values():
            checksums.add(name, as_held(name, tensor, dtype, architecture_of(chunks)))
    answers, failed = finish.result()
    different: dict[str, Difference] = {}

    def accept(target: Target) -> None:
        found = difference(answers[target.name], expected[target.tensor].per_rank)
        if found is not None and found.rank is not None:
            different[target.name] = found
        if found is not None and not (tolerant and found.rank is not None):
            raise target.client.garbage(f"after the sync {found.reason}")

    _, unverified = ask_all([target for target in alive if target.name in answers], accept)
    transport.failed |= failed | unverified
    return {size: checksums.per_rank for size, checksums in expected.items()}, different


class _UpdateSession:
    """The requests around an update of one server, which takes it between begin and end only."""

    def __init__(self, client: SglangClient, probe: Sequence[int]) -> None:
        """Abort the requests that still run, whose replies nothing reads, and begin.

        All methods raise ServerFailure or RefusedRequest.

        Args:
            probe: a prompt that is put into the cache now; after the flush it must be gone.
        """
        self._client = client
        self._probe = probe
        abort_all(client)
        client.cached_tokens(probe)
        begin_update(client)

    def finish(self) -> Any:
        """End the update, flush the cache and verify that it is empty; returns the server's reply
        with its checksums."""
        end_update(self._client)
        flush(self._client)
        if cached := self._client.cached_tokens(self._probe):  # keys of the old weights
            detail = f"{cached} tokens of the probe are cached after /flush_cache"
            raise self._client.garbage(detail)
        return reported_checksums(self._client)


# ---- requests before and after a server's weights change


def begin_update(client: SglangClient) -> None:
    try:
        client.call("POST", "/begin_weight_update", NOT_THE_DRAFT, timeouts.UPDATE)
    except RefusedRequest:  # a failed push left its session open
        end_update(client)
        client.call("POST", "/begin_weight_update", NOT_THE_DRAFT, timeouts.UPDATE)


def end_update(client: SglangClient) -> None:
    client.call("POST", "/end_weight_update", {}, timeouts.UPDATE)


# ---- requests that may be repeated; they raise ServerFailure or RefusedRequest


def abort_all(client: SglangClient) -> None:
    _repeat(client, "/abort_request", {"rid": "", "abort_all": True})


def flush(client: SglangClient) -> None:
    """Empty the cache, once the aborted requests have ended, for which the server waits 5 s."""
    reply = _repeat(client, "/flush_cache?timeout=5", {})
    if not str(reply).startswith("Cache flushed"):
        raise client.garbage(f"/flush_cache: {reply!r}")


def reported_checksums(client: SglangClient) -> Any:
    """The server's reply with the checksums of its weights, for `difference`."""
    return _repeat(
        client, "/weights_checker", {"action": "checksum", **NOT_THE_DRAFT}, timeouts.CHECKSUMS
    )


def stamp(client: SglangClient, version: int) -> None:
    """Have the server state the version from now on."""
    body = {"new_version": str(version), "abort_all_requests": False}
    _repeat(client, "/update_weight_version", body)


def _repeat(
    client: SglangClient, path: str, body: dict[str, Any], seconds: float = timeouts.QUESTION
) -> Any:
    return client.call("POST", path, body, seconds, attempts=ATTEMPTS)
