"""Send a student's low-rank factors once to servers that hold its frozen weights.

A server that lacks the frozen weights gets them first, as sync.py sends weights. Their checksums
are compared before each push, so a server that has started again, or has released its memory, is
found by what it holds. Then, server by server:

1. abort requests, flush the cache, remove the adapters of earlier pushes
2. load the factors, with their checksums, as an adapter whose name no other push has

SGLang copies an adapter to the device when a request first names it, so step 2 does not show that
it can be used: the comparison that follows each push does (agreement.py). What does not fit ends
the server, which is then restarted as after any failure.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.models.files.adapted import missing_shapes
from stable_opd_mcore.models.files.peft_directory import adapter_config, tensor_name
from stable_opd_mcore.models.lora import base_only, config_of, iter_factors
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.world import World, broadcast_object
from stable_opd_mcore.rollout.sglang.checksums import (
    Checksums,
    Difference,
    difference,
    name_on_server,
)
from stable_opd_mcore.rollout.sglang.sync import (
    Outcome,
    abort_all,
    flush,
    reported_checksums,
    send_weights,
)
from stable_opd_mcore.rollout.sglang.transports import Target, Transport, ask_all
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import RefusedRequest, SglangClient

_PREFIX = "stable-opd-"  # begins the name of every adapter that a run loads


@dataclass(frozen=True)
class _Adapter:
    """What every server is sent, and what it must answer."""

    name: str
    body: Mapping[str, Any]  # of the request that loads it, without the tensors
    tensors: str  # the pickled factors in base64
    num_bytes: int  # of the factors


@dataclass(eq=False)
class FactorSender:
    """Sends the factors of these chunks. All ranks of a replica construct it and send together."""

    chunks: Sequence[Module]
    world: World
    dtype: torch.dtype  # the servers'
    bucket_bytes: int
    tolerant: bool = False  # see `send_weights`

    def __post_init__(self) -> None:
        # By a server's number of tensor ranks: the checksums of the frozen weights.
        self._frozen: dict[int, Sequence[Checksums]] = {}
        # An external server may still hold adapters of another run.
        self._run = broadcast_object(secrets.token_hex(4))

    def name_of(self, label: str) -> str:
        """The servers' name of the adapter of a push."""
        return f"{_PREFIX}{self._run}-{label}"

    def send_factors(
        self,
        targets: Sequence[Target],
        transport: Transport | None,
        *,
        label: str,
    ) -> Outcome:
        """Send `targets` the factors, and before them the frozen weights to those that lack them.
        The caller stamps the version.

        Collective over the replica's ranks. The sender's outcome counts.

        Args:
            transport: how frozen weights travel; see `send_weights`.
            label: unique to this push.
        """
        is_sender = transport is not None and transport.is_sender
        lacking, failed = self._lacking(targets) if is_sender else ([], {})
        num_bytes = 0
        different: Mapping[str, Difference] = {}
        if broadcast_object(len(lacking), self.world.model_group):
            with base_only(self.chunks):
                sent = send_weights(
                    self.chunks,
                    lacking,
                    transport,
                    label=label,
                    dtype=self.dtype,
                    bucket_bytes=self.bucket_bytes,
                    tolerant=self.tolerant,
                )
            failed, num_bytes = failed | sent.failed, sent.num_bytes
            different = sent.different
            self._frozen |= sent.checksums
        adapter = self._adapter(self.name_of(label), is_sender)
        if adapter is None:
            return Outcome((), {}, 0)
        alive = [target for target in targets if target.name not in failed]
        loaded, refused = ask_all(alive, lambda t: self._load(t, adapter))
        num_bytes += adapter.num_bytes
        return Outcome(tuple(loaded), failed | refused, num_bytes, different=different)

    def _lacking(self, targets: Sequence[Target]) -> tuple[list[Target], dict[str, str]]:
        """The servers that do not hold the frozen weights, and why others do not answer."""

        def holds_them(target: Target) -> bool:
            frozen = self._frozen.get(target.tensor)
            return frozen is not None and not difference(reported_checksums(target.client), frozen)

        found, failed = ask_all(targets, holds_them)
        return [target for target in targets if found.get(target.name) is False], failed

    def _adapter(self, name: str, is_sender: bool) -> _Adapter | None:
        """The present factors, on the sender. Collective over the replica's ranks."""
        architecture, lora = architecture_of(self.chunks), config_of(self.chunks)
        tensors: dict[str, Tensor] = {}
        for matrix, a_RI, b_OR in iter_factors(self.chunks):
            if is_sender:
                matrix = name_on_server(matrix, architecture)
                tensors[tensor_name(matrix, "A")] = self._on_host(a_RI)
                tensors[tensor_name(matrix, "B")] = self._on_host(b_OR)
        for matrix, (outputs, inputs) in missing_shapes(architecture, lora.matrices).items():
            matrix = name_on_server(matrix, architecture)
            tensors[tensor_name(matrix, "A")] = torch.zeros(lora.rank, inputs, dtype=self.dtype)
            tensors[tensor_name(matrix, "B")] = torch.zeros(outputs, lora.rank, dtype=self.dtype)
        if not is_sender:
            return None
        body = {
            "lora_name": name,
            "config_dict": adapter_config(tensors, lora, None, architecture),
            "expected_checksums": {key: _sha256(tensor) for key, tensor in tensors.items()},
        }
        pickled = base64.b64encode(pickle.dumps(tensors)).decode()
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return _Adapter(name, body, pickled, num_bytes)

    def _on_host(self, factor: Tensor) -> Tensor:
        return factor.to("cpu", self.dtype, copy=True).contiguous()

    def _load(self, target: Target, adapter: _Adapter) -> None:
        """Replace the server's adapter. Raises ServerFailure."""
        client = target.client
        abort_all(client)
        flush(client)
        for old in _loaded_adapters(client):  # no request names one any more
            body = {"lora_name": old}
            client.call("POST", "/unload_lora_adapter", body, timeouts.UPDATE)
        # SGLang's rank i reads entry i only, and cuts whole factors itself.
        copies = {"serialized_named_tensors": [adapter.tensors] * target.tensor}
        try:
            body = {**adapter.body, **copies}
            client.call("POST", "/load_lora_adapter_from_tensors", body, timeouts.BUCKET)
        except RefusedRequest as refusal:
            raise client.garbage(
                f"it does not take the student's adapter: {refusal}; start it by `stable-opd serve`"
                " with this run's student.lora, or set rollout.sglang.lora=merged"
            ) from refusal


def _loaded_adapters(client: SglangClient) -> list[str]:
    """The names of the adapters that runs have loaded, which are listed as models."""
    reply = client.call("GET", "/v1/models", None, timeouts.QUESTION)
    try:
        names = [str(model["id"]) for model in reply["data"]]
    except (KeyError, TypeError) as error:
        raise client.garbage(f"/v1/models: {error!r}") from error
    return [name for name in names if name.startswith(_PREFIX)]


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).hexdigest()
