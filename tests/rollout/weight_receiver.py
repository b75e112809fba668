"""A process that receives weights over SGLang's routes and returns their checksums.

    with receiver(fields) as url: ...

It waits before it copies a bucket, as a server under load does, so the checksums show a sender that
overwrites the bucket too early. Holds tensors in a dict: no SGLang. Texts are sampled greedily from
transformers' model, whose matrices are merged with the adapter that a request names.
On a GPU it takes buckets by CUDA IPC and NCCL and hashes as SGLang does there.
"""

import base64
import contextlib
import hashlib
import io
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from safetensors.torch import load_file
from torch import Tensor

from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.rollout.sglang.checksums import ExpectedChecksums
from stable_opd_mcore.serving.command import VALUES_WRITER
from stable_opd_mcore.serving.launch_server import write_parameter
from tests.parallel.launch import preloaded_context
from tests.serving.http_server import Request, http_server

_LOADING_SECONDS = 0.03  # packing a bucket of these tests takes a hundredth of it
_BODIES = {  # of requests without other contents
    "abort_request": {"rid": "", "abort_all": True},
    "weights_checker": {"action": "checksum", "selector": "target"},
    "begin_weight_update": {"selector": "target"},
}


@contextlib.contextmanager
def receiver(
    fields: dict[str, Any], *, loses: Sequence[str] = (), fault: str = "", device: str = "cpu"
) -> Iterator[str]:
    """Yields its URL.

    Args:
        device: where it receives what a process group broadcasts, and where it hashes.
        loses: tensors that it receives and drops.
        fault: "refuses group" or "refuses broadcast", after joining the group; or
            "keeps cache": it replies that it has flushed the cache, and has not; or
            "leaves slowly": half a second for leaving a group; or
            "forgets adapters": it samples without them; or
        "keeps what it derived": it samples with the matrices of attention that came first, which
            its checksums do not show; or
            "halves": the second value of every `down_proj` that it receives is halved; or
            "hides values": as "halves", and it was started by another program; or
            "dies": killed with the handles of a bucket open, before its reply.
    """
    context = preloaded_context()
    ours, theirs = context.Pipe()
    arguments = (theirs, fields, tuple(loses), fault, device)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(
    pipe: Connection, fields: dict[str, Any], loses: tuple[str, ...], fault: str, device: str
) -> None:
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    state = _State(fields, loses, fault, device)

    def reply(request: Request) -> tuple[int, bytes]:
        route = request.path.strip("/").partition("?")[0].replace("/", "_")
        body = json.loads(request.body or "null")
        if route.startswith("update_weights_from") and "weight_version" in body:
            assert (body["flush_cache"], body["weight_version"]) == (False, "incomplete")
            state.version = body["weight_version"]
        assert body == _BODIES.get(route, body)
        found = getattr(state, route)(body)
        return 200, found.encode() if isinstance(found, str) else json.dumps(found).encode()

    with http_server(reply) as url:
        pipe.send(url)
        threading.Event().wait()


class _State:
    """One method per route."""

    def __init__(
        self, fields: dict[str, Any], loses: tuple[str, ...], fault: str, device: str
    ) -> None:
        self._architecture = read_architecture(fields)
        self._device = device
        self._loses = loses
        self._fault = fault
        self.version = "default"
        self._tensors: dict[str, Tensor] = {}
        self._derived: dict[str, Tensor] = {}  # what it samples with in place of tensors
        self._group: dist.ProcessGroup | None = None
        self._in_session = False
        self._cached: list[int] = []  # the newest prompt
        self._adapters: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        cached, self._cached = self._cached, body["input_ids"]
        meta: dict[str, Any] = {"cached_tokens": len(cached) if cached == self._cached else 0}
        if not (num_tokens := body["sampling_params"]["max_new_tokens"]):
            return {"meta_info": meta}
        from tests.models import tiny  # here, because it takes seconds and few receivers sample

        model = tiny.transformer(dict(self._architecture.source), seed=0)
        model.load_state_dict({**self._tensors, **self._derived})  # in fp32
        if body["lora_path"] is not None and self._fault != "forgets adapters":
            settings, factors = self._adapters[body["lora_path"]]
            tiny.add_adapter(model, {n: own.float() for n, own in factors.items()}, settings)
        tokens: list[int] = []
        logprobs: list[list[Any]] = []
        for _ in range(num_tokens):
            with torch.no_grad():
                logits_V = model(torch.tensor([[*body["input_ids"], *tokens]])).logits[0, -1]
            tokens.append(int(logits_V.argmax()))
            logprobs.append([float(logits_V.log_softmax(0)[tokens[-1]]), tokens[-1], None])
        meta |= {"output_token_logprobs": logprobs, "finish_reason": {"type": "length"}}
        meta |= {"weight_version": self.version}
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def v1_models(self, _: None) -> dict[str, Any]:
        return {"data": [{"id": name} for name in ("model", *self._adapters)]}

    def unload_lora_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        del self._adapters[body["lora_name"]]
        return {"success": True}

    def load_lora_adapter_from_tensors(self, body: dict[str, Any]) -> dict[str, Any]:
        (payload,) = body["serialized_named_tensors"]
        tensors = pickle.loads(base64.b64decode(payload))
        assert not self._adapters, "the pool of a server has one place"
        assert body["expected_checksums"] == {
            name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
        }
        self._adapters[body["lora_name"]] = body["config_dict"], tensors
        return {"success": True}

    def abort_request(self, body: dict[str, Any]) -> None:
        pass

    def begin_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        self._in_session = True
        return {"success": True}

    def init_weights_update_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._fault == "refuses group":
            return {"success": False, "message": "refused"}
        torch_c10d: Any = dist
        new_group: Any = c10d._new_process_group_helper
        size, name, timeout = body["world_size"], body["group_name"], timedelta(seconds=60)
        address = body["master_address"], body["master_port"]
        store = torch_c10d.TCPStore(*address, size, is_master=False, timeout=timeout)
        store = torch_c10d.PrefixStore(name, store)
        backend = dist.Backend(body["backend"])
        rank = body["rank_offset"]
        group, _ = new_group(size, rank, [], backend, store, group_name=name, timeout=timeout)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self._group = group
        return {"success": True}

    def destroy_weights_update_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._fault == "leaves slowly":
            time.sleep(0.5)
        if self._group is None:
            return {"success": False, "message": "no such group"}
        self._group = None
        return {"success": True}

    def update_weights_from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._group is not None
        assert body["selector"] == "target"  # SGLang would load them into a draft, too
        assert body["load_format"] == "flattened_bucket"
        if self._fault == "refuses broadcast":
            return {"success": False, "message": "refused"}
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        described = list(zip(body["names"], dtypes, body["shapes"], strict=True))
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in described]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        dist.broadcast(flat, src=0, group=self._group)
        parts = zip(described, flat.split(sizes), strict=True)
        return self._load((name, part.view(d).view(shape)) for (name, d, shape), part in parts)

    def server_info(self, _: None) -> dict[str, Any]:
        hides = self._fault == "hides values"
        return {"custom_weight_loader": None if hides else [VALUES_WRITER]}

    def update_weights_from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["selector"] == "target"
        if body["load_format"] == VALUES_WRITER:
            (names,) = (pickle.loads(base64.b64decode(x)) for x in body["serialized_named_tensors"])
            write_parameter(_Held(self._tensors), names)
            return {"success": self._in_session}
        assert body["load_format"] == "flattened_bucket"
        (handle,) = body["serialized_named_tensors"]
        tensors = read_handle(handle)
        if self._fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return self._load(tensors)

    def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self._load(load_file(file).items())
        return {"success": True}

    def end_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        self._in_session = False
        return {"success": True}

    def flush_cache(self, body: dict[str, Any]) -> str:
        if self._fault != "keeps cache":
            self._cached = []
        return "Cache flushed.\n"

    def weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        on_cpu = self._device == "cpu"
        checksums = ExpectedChecksums(self._architecture, 1, on_gpu=not on_cpu)
        for name, tensor in self._tensors.items():
            checksums.add(name, tensor)
        found = checksums.per_rank[0]
        return {"ranks": [{"parallelism_info": [{"tp_rank": 0}], "checksums": found}]}

    def update_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body == {"new_version": body["new_version"], "abort_all_requests": False}
        self.version = body["new_version"]
        return {"success": True}

    def model_info(self, _: None) -> dict[str, Any]:
        return {"weight_version": self.version}

    def _load(self, tensors) -> dict[str, Any]:
        if not self._in_session:
            return {"success": False, "message": "no update is begun"}
        time.sleep(_LOADING_SECONDS)
        for name, tensor in tensors:
            if name not in self._loses:
                self._tensors[name] = tensor.clone()
                if self._fault in ("halves", "hides values") and "down_proj" in name:
                    self._tensors[name][0, 1] /= 2
                if self._fault == "keeps what it derived" and "o_proj" in name:
                    self._derived.setdefault(name, self._tensors[name])
        if self._device != "cpu":
            torch.cuda.synchronize()  # the sender overwrites the bucket after the reply
        return {"success": True}


class _Held:
    """A model as SGLang's loaders of weights see it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.named_parameters, self.named_buffers = tensors.items, dict[str, Tensor]().items


def read_handle(handle: str) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, from memory that this process shares with the sender."""
    bucket = _HandleReader(io.BytesIO(base64.b64decode(handle))).load()
    flat = bucket["flattened_tensor"]
    return [
        (place.name, flat[place.start_idx : place.end_idx].view(place.dtype).view(place.shape))
        for place in bucket["metadata"]
    ]


class _HandleReader(pickle.Unpickler):
    """Finds a GPU by the UUID that stands where torch has its index, as SGLang does."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name != "rebuild_cuda_tensor":
            return found

        def rebuild(*arguments: Any) -> Tensor:
            gpus = range(torch.cuda.device_count())
            indices = {str(torch.cuda.get_device_properties(gpu).uuid): gpu for gpu in gpus}
            return found(*(indices.get(a, a) if isinstance(a, str) else a for a in arguments))

        return rebuild
