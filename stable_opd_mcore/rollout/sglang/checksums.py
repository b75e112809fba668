"""The checksums that a server must report after a sync, computed from the trainer's tensors.

SGLang's /weights_checker gives one 64-bit hash per parameter and tensor rank, of the bytes as its
layers hold them: q, k and v fused, gate and up fused, four input projections of a gated delta net
fused to two, the experts of a layer stacked, cut by rows or columns, the vocabulary padded. Where
files stack a layer's experts, an expert's rows of gate and up alternate.
`ExpectedChecksums` lays out the trainer's Hugging Face tensors in the same way, one at a time, and
hashes the pieces. Equal hashes mean equal bits. Unquantised weights only.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.expert_stacks import EXPERT

Checksums = dict[str, str]  # of one tensor rank: by SGLang's name of a parameter
_FUSED = {  # part of our name -> (part of SGLang's name, the fused parts in order)
    part: (fused, parts)
    for fused, parts in {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }.items()
    for part in parts
}
# SGLang makes one matrix of the products that give latents, but only of two tensors that come in
# one message. Without a latent of queries the second is a matrix of its own.
SENT_TOGETHER = ("q_a_proj", "kv_a_proj_with_mqa")
_FP32_ROUTERS = (
    "glm4_moe",
    "glm4_moe_lite",
)  # model types whose router's matrix a server holds in fp32
_COLUMNS = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
_ROWS = (
    "q_proj",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "in_proj_qkvz.weight",
    "in_proj_ba.weight",
    "linear_attn.A_log",
    "linear_attn.dt_bias",
    "self_attn.sinks",
    "self_attn.q_proj.weight",  # of a latent attention, as are the next two
    "q_b_proj.weight",
    "kv_b_proj.weight",
)
_DELTA_CHANNELS = ("in_proj_qkv", "conv1d.weight")  # rows of q, k and v, each cut by itself
_UNTRAINED = "visual."  # a server's parameters for which the trainer has no tensor
_EMBEDDING = "model.embed_tokens.weight"  # whole on every rank where its outputs are scaled
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
# SGLang pads these with zeros to a multiple
_VOCABULARY_MULTIPLE = 64  # the vocabulary's rows
CPU_MLP_MULTIPLE = 32  # each rank's width of an MLP and of an expert, on a CPU


def name_on_server(name: str, architecture: Architecture) -> str:
    """The name under which a server gets a tensor, that of a text model by itself. SGLang's classes
    of models with other parts take it, too."""
    return name.replace(architecture.family.prefix, "model.", 1)


def dtype_sent(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type in which a server of precision `dtype` is sent a tensor."""
    is_fp32 = name.endswith((".A_log", ".e_score_correction_bias"))
    return torch.float32 if is_fp32 else dtype


def as_held(name: str, tensor: Tensor, dtype: torch.dtype, architecture: Architecture) -> Tensor:
    """A tensor in the type in which a server of precision `dtype` holds it."""
    sent = tensor.to(dtype_sent(name, dtype))
    if name.endswith(".mlp.gate.weight") and architecture.model_type in _FP32_ROUTERS:
        return sent.float()
    if name.endswith(".sinks"):
        return sent.bfloat16()
    return sent.float() if ".experts." in name and name.endswith(".bias") else sent


class ExpectedChecksums:
    """After `add` of every tensor, `per_rank` holds each tensor rank's checksums by name."""

    def __init__(self, architecture: Architecture, tensor_size: int, *, on_gpu: bool) -> None:
        self._architecture = architecture
        self._size = tensor_size
        self._hash = gpu_hash if on_gpu else cpu_hash
        self._mlp_multiple = 1 if on_gpu else CPU_MLP_MULTIPLE * tensor_size
        self._parts: dict[str, dict[str, Tensor]] = {}  # incomplete fused parameters
        self._fused = dict(_FUSED)
        if (latent := architecture.latent) is not None:
            del self._fused["q_proj"]
            if latent.query_rank is not None:
                fused = "fused_qkv_a_proj_with_mqa", SENT_TOGETHER
                self._fused |= dict.fromkeys(SENT_TOGETHER, fused)
        self.per_rank: list[Checksums] = [{} for _ in range(tensor_size)]

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor `as_held`; keep it as it is until its partners are added."""
        name = self._parameter_name(name)
        if expert := EXPERT.fullmatch(name):
            self._add_expert(expert[1], int(expert[2]), expert[3], expert[4], tensor)
            return
        part = name.split(".")[-2] if "." in name else name
        if part not in self._fused:
            self._enter(name, [[self._shard(name, tensor, rank)] for rank in range(self._size)])
            return
        fused, order = self._fused[part]
        fused_name = name.replace(part, fused)
        parts = self._parts.setdefault(fused_name, {})
        parts[part] = tensor
        if len(parts) == len(order):
            del self._parts[fused_name]
            pieces = [[self._shard(key, parts[key], r) for key in order] for r in range(self._size)]
            self._enter(fused_name, pieces)

    def _parameter_name(self, name: str) -> str:
        """What SGLang's model class calls a tensor before it fuses some."""
        name = name_on_server(name, self._architecture)
        return name.replace(".self_attn.", ".") if self._architecture.family.delta_nets else name

    def _add_expert(self, layer: str, index: int, kind: str, end: str, tensor: Tensor) -> None:
        """One matrix or bias of an expert. A layer's experts come in order, gate before up."""
        assert self._architecture.experts is not None
        is_down = kind == "down_proj"
        stacked = f"{layer}.{'w2' if is_down else 'w13'}_weight{'_bias' if end == 'bias' else ''}"
        parts = self._parts.setdefault(stacked, {})
        parts[f"{index}.{kind}.{end}" if is_down else f"{index}.{kind}"] = tensor
        if kind == "up_proj" and self._architecture.family.stacked_experts:
            gate, up = (parts.pop(f"{index}.{each}") for each in ("gate_proj", "up_proj"))
            parts[f"{index}.gate_up_proj"] = torch.stack((gate, up), dim=1).flatten(0, 1)
        if index + 1 == self._architecture.experts.number and kind != "gate_proj":
            del self._parts[stacked]
            pieces = [
                [self._shard(name.partition(".")[2], part, rank) for name, part in parts.items()]
                for rank in range(self._size)
            ]
            self._enter(stacked, pieces)

    def _enter(self, name: str, pieces: Iterable[Sequence[Tensor]]) -> None:
        for checksums, shards in zip(self.per_rank, pieces, strict=True):
            checksums[name] = self._hash(shards)

    def _shard(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """Tensor rank `rank`'s piece of one tensor."""
        size = self._size
        if name in ("k_proj", "v_proj"):  # ranks share a group if there are fewer groups
            groups = self._architecture.num_key_value_heads
            copies = max(1, size // groups)
            return tensor.chunk(size // copies)[rank // copies]
        if name in ("gate_proj", "up_proj"):
            return self._cut(tensor, rank, 0, self._mlp_multiple)
        if name == "gate_up_proj":
            return self._cut(tensor, rank, 0, 2 * self._mlp_multiple)
        if name == "down_proj.bias" and rank:  # the ranks' outputs are added up
            return torch.zeros_like(tensor)
        if name.endswith(_ROWS):
            return self._cut(tensor, rank, 0)
        if name.endswith(_DELTA_CHANNELS):
            net = self._architecture.delta_net
            assert net is not None
            parts = tensor.split((net.keys, net.keys, net.values))
            return torch.cat([self._cut(part, rank, 0) for part in parts])
        if name.endswith(_COLUMNS):
            is_mlp = name.endswith("down_proj.weight")
            return self._cut(tensor, rank, 1, self._mlp_multiple if is_mlp else 1)
        is_whole = name == _EMBEDDING and self._architecture.family.scaled_embedding
        if name.endswith(_VOCABULARY) and not is_whole:
            return self._cut(tensor, rank, 0, _VOCABULARY_MULTIPLE)
        return tensor

    def _cut(self, tensor: Tensor, rank: int, dim: int, multiple: int = 1) -> Tensor:
        """The rank's share of a tensor that is padded with zeros to a multiple along `dim`."""
        length = tensor.shape[dim]
        share = -(-length // multiple) * multiple // self._size
        start = min(rank * share, length)
        piece = tensor.narrow(dim, start, min(share, length - start))
        if piece.shape[dim] == share:
            return piece
        inner = (0, 0) * (tensor.dim() - 1 - dim)  # torch counts dimensions from the last
        return torch.nn.functional.pad(piece, (*inner, 0, share - piece.shape[dim]))


@dataclass(frozen=True)
class Difference:
    """How a server's checksums differ from those that its ranks must have."""

    reason: str
    rank: int | None = None  # the first tensor rank that differs; None: the reply is not checksums
    parameter: str = ""  # the first that differs there


def difference(answer: Any, expected: Sequence[Checksums]) -> Difference | None:
    """How the checksums of a server's reply differ from those of each rank; None: they do not."""
    try:
        by_rank = {
            rank["parallelism_info"][0]["tp_rank"]: rank["checksums"] for rank in answer["ranks"]
        }
    except (KeyError, TypeError, IndexError) as error:
        return Difference(f"its reply is not checksums: {error!r}")
    if sorted(by_rank) != list(range(len(expected))):
        found = f"there are checksums of ranks {sorted(by_rank)}, expected {len(expected)}"
        return Difference(found)
    for rank, checksums in enumerate(expected):
        if names := differences(checksums, by_rank[rank]):
            ours, theirs = (values.get(names[0], "none") for values in (checksums, by_rank[rank]))
            return Difference(
                f"{len(names)} of {len(checksums)} parameters of rank {rank} differ from the "
                f"trainer's, e.g. {', '.join(names[:3])}; the first has the checksum {ours} in the "
                f"trainer and {theirs} in the server",
                rank,
                names[0],
            )
    return None


def differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Names whose checksums differ or that one side lacks."""
    trained = {name for name in actual if not name.startswith(_UNTRAINED)}
    names = sorted(expected.keys() | trained)
    return [name for name in names if expected.get(name) != actual.get(name)]


def cpu_hash(pieces: Sequence[Tensor]) -> str:
    """SGLang's hash of a CPU tensor, given in consecutive pieces: 64 bits of SHA-256."""
    digest = hashlib.sha256()
    for piece in pieces:
        flat = piece.detach().cpu().contiguous().view(-1).view(torch.uint8)
        # flat.numpy() would mark the weights' storage as one that cannot be resized (offloaded)
        digest.update((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()))
    return digest.digest()[:8].hex()


_WORD = 0xFFFFFFFF
_SEED_1 = 0x243F6A88
_SEED_2 = ((_SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD
_TILE_WORDS = 8192
_TILES_AT_ONCE = 512  # 4 Mi words: a few hundred MiB of int64 temporaries


def gpu_hash(pieces: Sequence[Tensor]) -> str:
    """SGLang's hash of a CUDA tensor (sglang/kernels/ops/memory/gpu_tensor_hash.py).

    Each 32-bit word is mixed with its position in two ways and summed over tiles of 8,192 words;
    the tiles' 64-bit results are summed and mixed again. Computed in int64.
    """
    flat = torch.cat([piece.detach().contiguous().view(-1).view(torch.uint8) for piece in pieces])
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    words = flat.view(torch.int32)
    total = 0
    step = _TILE_WORDS * _TILES_AT_ONCE
    for start in range(0, words.numel(), step):
        total += _tiles_hash(words[start : start + step], start, words.numel())
    return f"{_splitmix64(total & 0xFFFFFFFFFFFFFFFF):016x}"


def _tiles_hash(words: Tensor, start: int, num_words: int) -> int:
    position = torch.arange(start, start + words.numel(), device=words.device) & _WORD
    word = words.to(torch.int64) & _WORD
    total = 0
    for multiplier, seed, turn, shift in (
        (0x27D4EB2D, _SEED_1, 15, 32),
        (0x165667B1, _SEED_2, 13, 0),
    ):
        rotated = ((position << turn) | (position >> (32 - turn))) & _WORD
        mixed = _fmix32(word ^ ((position * multiplier + seed) & _WORD) ^ rotated)
        mixed = torch.nn.functional.pad(mixed, (0, -mixed.numel() % _TILE_WORDS))
        tiles = mixed.view(-1, _TILE_WORDS).sum(1) & _WORD
        tiles = _fmix32(tiles ^ (num_words * 4 & _WORD))
        total += sum(value << shift for value in tiles.tolist())
    return total


def _fmix32(values: Tensor) -> Tensor:
    """MurmurHash3's finaliser in int64: products wrap, but their low 32 bits are right."""
    values = values ^ (values >> 16)
    values = (values * 0x85EBCA6B) & _WORD
    values = values ^ (values >> 13)
    values = (values * 0xC2B2AE35) & _WORD
    return values ^ (values >> 16)


def _splitmix64(value: int) -> int:
    mask = 0xFFFFFFFFFFFFFFFF
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & mask
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)
