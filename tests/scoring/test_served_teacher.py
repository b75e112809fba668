"""A served teacher: merged top-K lists, and no server. Real servers: tests/integration."""

from __future__ import annotations

import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig, TeacherConfig
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.scoring.served_teacher import ServedTeacher, TeacherLost, merge_entries
from stable_opd_mcore.serving.process import free_port
from tests.losses.definitions import merge_ids
from tests.models.tiny import microbatch
from tests.parallel.launch import run_ranks


def test_merged_lists_are_those_of_the_merged_distribution():
    """3 of 12 tokens are stop ids; the lists of 6 tokens hold 0, 1, 2 or 3 of them."""
    draw = torch.Generator().manual_seed(0)
    log_p_NV = (2 * torch.randn(500, 12, generator=draw)).log_softmax(1)
    stops = torch.tensor([2, 5, 9])
    listed = log_p_NV.topk(6, dim=1)
    assert torch.isin(listed.indices, stops).sum(1).unique().tolist() == [0, 1, 2, 3]
    ids_NK, logprobs_NK = merge_entries(
        listed.indices, listed.values, stops, log_p_NV[:, stops].logsumexp(1)
    )
    expected = merge_ids(log_p_NV, stops.tolist()).topk(4, dim=1)
    assert torch.equal(ids_NK, expected.indices)
    torch.testing.assert_close(logprobs_NK, expected.values)


def score_with_an_absent_teacher(rank: int, world_size: int, url: str) -> None:
    world = start_world(ParallelConfig(pipeline=2), seed=0)
    settings = TeacherConfig(engine="sglang", urls=(url,))
    teacher = ServedTeacher(settings, world, vocab_size=99, temperature=1.0, patience_seconds=0)
    with pytest.raises(TeacherLost, match=f"no teacher answered .* {url}"):
        teacher.score([microbatch([4])])
    asked = [span.what for span in teacher.take_activity()[url]]
    assert asked == (["scores"] if world.is_last_stage else [])
    stop_world()


def test_every_pipeline_stage_raises_teacher_lost():
    """All ranks then save a checkpoint together; a stage without the error would hang."""
    run_ranks(2, score_with_an_absent_teacher, f"http://127.0.0.1:{free_port('127.0.0.1')}")
