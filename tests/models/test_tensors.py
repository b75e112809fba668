"""The table of tensors: joining the shards of any layout gives the original tensors."""

from itertools import product

import torch

from stable_opd_mcore.models import tensor_cuts, tensors
from stable_opd_mcore.models.description.families import FAMILIES
from tests.models import tiny


def _shard(full, entry, architecture, rank, size):
    by_name = dict(zip(entry.hf_names, full, strict=True))
    own = tensor_cuts.own_parts(entry, architecture, rank, size)
    parts = [by_name[name][part] for name, part in own]
    return tensor_cuts.join_parts(parts, entry.layout, architecture, size)


def test_the_last_of_many_ranks_holds_only_padding() -> None:
    architecture = tiny.architecture("qwen3")
    rows = -(-tiny.VOCAB_SIZE // 40)
    assert rows * 39 > tiny.VOCAB_SIZE
    embedding = tensors.canonical_parameters(architecture)[0]
    shard = _shard([torch.ones(tiny.VOCAB_SIZE, 2)], embedding, architecture, 39, 40)
    assert shard.shape == (rows, 2)
    assert shard.eq(0).all()


def test_unshard_inverts_the_cut() -> None:
    for model_type in FAMILIES:
        architecture = tiny.architecture(model_type, num_hidden_layers=4)
        for entry, size in product(tensors.canonical_parameters(architecture), (1, 2)):
            full = [torch.randn(tensors.hf_shape(name, architecture)) for name in entry.hf_names]
            shards = [_shard(full, entry, architecture, rank, size) for rank in range(size)]
            joined = tensor_cuts.unshard(shards, entry, architecture)
            for name, before, after in zip(entry.hf_names, full, joined, strict=True):
                assert torch.equal(before, after), name
