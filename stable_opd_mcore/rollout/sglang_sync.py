"""From the trainer's shards to the servers' weights, verified: one publish.

Streams whole tensors in buckets (models.convert gathers them over tensor and pipeline ranks), so
that no second copy of the model ever exists. Order within a publish, for a server may die
anywhere: requests aborted, session begun where the release has sessions, buckets, session ended,
cache flushed, checksums read back and compared, and only then the new version stamped. Until then
the server states "incomplete" and its answers are refused. Not here: the ways a bucket travels
(sglang_transports.py), who retries (sglang_engine.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.models.convert import architecture_of, iter_hf_tensors
from stable_opd_mcore.rollout.sglang_checksums import (
    ExpectedChecksums,
    cpu_hash,
    differences,
    gpu_hash,
)
from stable_opd_mcore.rollout.sglang_transports import Bucket, Target, Transport
from stable_opd_mcore.serving.client import RefusedRequest, ServerFailure, SglangClient


@dataclass(frozen=True)
class Outcome:
    """One publish: who has the weights, and why others do not."""

    verified: tuple[str, ...]
    failed: dict[str, str]
    num_bytes: int


def publish_weights(
    chunks: Sequence[Module],
    targets: Sequence[Target],
    transport: Transport | None,
    *,
    version: int,
    label: str,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> Outcome:
    """Give `targets` the weights and the version.

    Collective over the tensor and pipeline ranks of one replica; `transport` is None on all but
    the sender, whose outcome is the one that counts.
    """
    buckets = make_buckets(chunks, dtype, bucket_bytes)
    if transport is None:
        for _ in buckets:
            pass
        return Outcome((), {}, 0)
    expected = {
        size: ExpectedChecksums(architecture_of(chunks), size, _hash_for(chunks))
        for size in {target.tensor for target in targets}
    }
    sessions = begin_all(transport, targets, label)
    num_bytes = 0
    for bucket in buckets:
        transport.send(bucket)
        num_bytes += bucket.flat.numel()
        for checksums in expected.values():
            for name, tensor in bucket.tensors:
                checksums.add(name, tensor)
    transport.close()
    for target in transport.alive:
        try:
            sessions[target.name].finish(expected[target.tensor].per_rank, version)
        except (ServerFailure, RefusedRequest) as error:
            transport.fail(target, str(error))
    verified = tuple(target.name for target in transport.alive)
    return Outcome(verified, dict(transport.failed), num_bytes)


def make_buckets(
    chunks: Sequence[Module], dtype: torch.dtype, bucket_bytes: int
) -> Iterator[Bucket]:
    """Whole tensors cast to `dtype`, packed into one buffer again and again; a larger one travels
    alone.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    pending: list[tuple[str, Tensor]] = []
    used = 0
    for name, tensor in iter_hf_tensors(chunks):
        size = tensor.numel() * dtype.itemsize
        if pending and used + size > len(buffer):
            yield Bucket(buffer[:used], tuple(pending))
            pending, used = [], 0
        if size > len(buffer):  # nothing is pending then
            buffer = torch.empty(max(size, bucket_bytes), dtype=torch.uint8, device=tensor.device)
        view = buffer[used : used + size].view(dtype).view(tensor.shape)
        view.copy_(tensor)
        pending.append((name, view))
        used += size
    if pending:
        yield Bucket(buffer[:used], tuple(pending))


def _hash_for(chunks: Sequence[Module]) -> Any:
    """Servers hash on the device they serve from, which is the trainer's kind of device."""
    return gpu_hash if next(chunks[0].parameters()).is_cuda else cpu_hash


def begin_all(transport: Transport, targets: Sequence[Target], label: str) -> dict[str, _Session]:
    """Begin on every target, then open the transport to those that could."""
    sessions: dict[str, _Session] = {}
    failed: dict[str, str] = {}
    for target in targets:
        try:
            sessions[target.name] = _Session(target.client)
        except (ServerFailure, RefusedRequest) as error:
            failed[target.name] = str(error)
    transport.open([target for target in targets if target.name in sessions], label)
    transport.failed |= failed
    return sessions


class _Session:
    """The requests around an update of one server.

    Releases from 0.5.21 on want updates between begin and end; earlier ones have no such routes.
    """

    def __init__(self, client: SglangClient) -> None:
        """Stop whatever still runs (answers nobody waits for), and begin."""
        self._client = client
        client.call("POST", "/abort_request", {"rid": "", "abort_all": True}, 30.0)
        try:
            self._has_sessions = self._begin()
        except RefusedRequest:  # one that a failed publish left open
            client.call("POST", "/end_weight_update", {}, 60.0)
            self._has_sessions = self._begin()

    def finish(self, expected: Sequence[dict[str, str]], version: int) -> None:
        """
        Raises:
            ServerFailure, RefusedRequest: the server does not hold exactly what was sent.
        """
        if self._has_sessions:
            self._client.call("POST", "/end_weight_update", {}, 120.0)
        retrying = Retrying(  # refused while aborted requests leave
            retry=retry_if_exception_type(RefusedRequest),
            stop=stop_after_attempt(20),
            wait=wait_fixed(0.25),
            reraise=True,
        )
        retrying(self._client.call, "POST", "/flush_cache", {}, 60.0)
        self._verify(expected)
        stamp = {"new_version": str(version), "abort_all_requests": False}
        self._client.call("POST", "/update_weight_version", stamp, 60.0)

    def _begin(self) -> bool:
        try:
            self._client.call("POST", "/begin_weight_update", {}, 120.0)
        except RefusedRequest as refusal:
            if refusal.status not in (404, 405):
                raise
            return False
        return True

    def _verify(self, expected: Sequence[dict[str, str]]) -> None:
        answer = self._client.call("POST", "/weights_checker", {"action": "checksum"}, 600.0)
        try:
            by_rank = {
                rank["parallelism_info"][0]["tp_rank"]: rank["checksums"]
                for rank in answer["ranks"]
            }
        except (KeyError, TypeError, IndexError) as error:
            raise ServerFailure(self._client.url, "garbage", f"not checksums: {error!r}") from error
        if sorted(by_rank) != list(range(len(expected))):
            raise ServerFailure(
                self._client.url,
                "garbage",
                f"checksums of ranks {sorted(by_rank)}, expected {len(expected)}",
            )
        for rank, checksums in enumerate(expected):
            wrong = differences(checksums, by_rank[rank])
            if wrong:
                raise ServerFailure(
                    self._client.url,
                    "garbage",
                    f"after the sync {len(wrong)} of {len(checksums)} parameters of rank {rank} "
                    f"differ from the trainer's, e.g. {', '.join(wrong[:3])}",
                )
