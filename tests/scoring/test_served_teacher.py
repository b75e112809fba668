"""A served teacher's top-K lists, and its absence; tests/integration has real servers."""

from __future__ import annotations

import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig, TeacherConfig
from stable_opd_mcore.losses.definitions import merge_ids
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.scoring.served_teacher import ServedTeacher, TeacherLost, merge_entries
from stable_opd_mcore.serving.process import free_port
from tests.models.tiny import microbatch
from tests.parallel.launch import run_ranks


def test_merged_lists_are_those_of_the_merged_distribution():
    """Of 12 tokens, 3 are stop ids: lists with none, some and all of them among their 6."""
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
    stop_world()


def test_a_lost_teacher_is_raised_on_every_pipeline_stage():
    """All ranks save a checkpoint then; a stage that went on would hang."""
    run_ranks(2, score_with_an_absent_teacher, f"http://127.0.0.1:{free_port('127.0.0.1')}")
