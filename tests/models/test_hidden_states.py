"""From packed tokens to hidden states and head: one rank, two tensor ranks, two stages."""

import pytest
import torch
import torch.distributed as dist

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head, unwrap
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from tests.models import tiny
from tests.parallel.launch import run_ranks


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_the_models_own_parameter(world: World, tied: bool) -> None:
    architecture = tiny.architecture("qwen2", tie_word_embeddings=tied)
    chunks = build_model(architecture, world)
    head = output_head(chunks)
    assert head is not None
    embedding = unwrap(chunks[0]).embedding.word_embeddings.weight
    assert (head.weight_VH is embedding) == tied
    assert any(head.weight_VH is parameter for parameter in chunks[0].parameters())
    assert (head.vocab_start, head.vocab_size, head.group) == (0, tiny.VOCAB_SIZE, None)
    common = output_head(chunks, vocab_size=40)
    assert common is not None
    assert common.num_columns == 40


def check_layouts(rank: int, world_size: int) -> None:
    architecture = tiny.architecture("qwen2")
    world = start_world(ParallelConfig(tensor=2, sequence=True), seed=0)
    chunks = build_model(architecture, world)
    head = output_head(chunks)
    assert head is not None
    rows = len(head.weight_VH)
    assert (head.vocab_start, head.group) == (rank * rows, world.tensor_group)
    assert rows >= tiny.VOCAB_SIZE / 2
    hidden = forward_hidden(chunks[0], tiny.microbatch([5, 3]))
    assert hidden.shape == (8, 32)
    of_ranks = [torch.empty_like(hidden) for _ in range(2)]
    dist.all_gather(of_ranks, hidden.detach())
    assert torch.equal(*of_ranks)
    with pytest.raises(ValueError, match=r"of 7 tokens cannot be cut over 2 .* a multiple of 2"):
        forward_hidden(chunks[0], tiny.microbatch([5, 2]))
    stop_world()

    world = start_world(ParallelConfig(pipeline=2), seed=0)
    chunks = build_model(architecture, world)
    assert (output_head(chunks) is None) == (rank == 0)
    if rank == 0:  # the tensor for the next stage is not squeezed and not normalised
        passed_on = forward_hidden(chunks[0], tiny.microbatch([5, 3]))
        assert passed_on.shape == (8, 1, 32)
        assert (passed_on.square().mean(2) - 1).abs().max() > 0.1
    stop_world()


def test_tensor_ranks_hold_all_hidden_states_and_a_shard_of_the_head() -> None:
    run_ranks(2, check_layouts)
