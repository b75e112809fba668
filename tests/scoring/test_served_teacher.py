"""A served teacher: merged top-K lists, early requests, no server. Real ones: tests/integration."""

import contextlib
import itertools
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig, TeacherConfig
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import Sample
from stable_opd_mcore.scoring.early_requests import EarlyRequests
from stable_opd_mcore.scoring.served_teacher import ServedTeacher, TeacherLost, merge_entries
from stable_opd_mcore.serving.process import free_port
from tests.losses.definitions import merge_ids
from tests.models.tiny import microbatch
from tests.parallel.launch import run_ranks
from tests.serving.fake_teacher import fake_teacher
from tests.serving.http_server import http_server
from tests.shares import weights_of

VOCABULARY = 53


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
    assert bool(teacher.idle.idle_share().count) == world.is_last_stage
    stop_world()


def test_every_pipeline_stage_raises_teacher_lost():
    """All ranks then save a checkpoint together; a stage without the error would hang."""
    run_ranks(2, score_with_an_absent_teacher, f"http://127.0.0.1:{free_port('127.0.0.1')}")


def test_a_teacher_that_refuses_a_request_is_lost(world):
    """So the run saves a checkpoint, although asking again cannot help."""
    reply = (400, b"Input length (9 tokens) exceeds 8")
    with http_server(lambda _: reply) as url, pytest.raises(TeacherLost, match=r"400.*exceeds 8"):
        served_by(world, url).score([microbatch([4])])


def test_an_absent_teacher_is_lost_after_its_patience_however_many_requests_wait(world):
    """Ten times as many as are sent at a time, so ten times the patience in turn."""
    teacher = served_by(world, f"http://127.0.0.1:{free_port('127.0.0.1')}", patience_seconds=1.0)
    began = time.monotonic()
    with pytest.raises(TeacherLost, match="no teacher answered for 1 s"):
        teacher.score([microbatch([4])] * 640)
    assert time.monotonic() - began < 10.0


def test_the_first_lost_request_ends_those_that_wait_and_those_that_hang(world):
    """The first one to arrive fails, the server never replies to the others."""
    arrivals, never = itertools.count(), threading.Event()
    with fake_teacher(lambda _: next(arrivals) > 0 and never.wait(30)) as (url, asked):
        teacher = served_by(world, url, patience_seconds=0.0)
        with pytest.raises(TeacherLost, match="HTTP 503"):
            teacher.score([microbatch([4])] * 200)
        assert len(asked) <= 64 + 1  # those in flight, and the one after the failed request
        teacher.close()
        for thread in threading.enumerate():
            if thread.name.startswith("teacher"):
                thread.join(10)
                assert not thread.is_alive()
        never.set()


def test_replicas_that_take_requests_and_never_answer_cost_two_time_outs_however_many(world):
    """One after the other, six would cost six."""
    never = threading.Event()
    with contextlib.ExitStack() as servers:
        servers.callback(never.set)
        silent = [fake_teacher(lambda _: never.wait(30)) for _ in range(6)]
        urls, asked = zip(*(servers.enter_context(one) for one in silent), strict=True)
        settings = TeacherConfig(engine="sglang", urls=urls, request_timeout_seconds=0.5)
        teacher = ServedTeacher(
            settings, world, vocab_size=VOCABULARY, temperature=1.0, patience_seconds=0.0
        )
        began = time.monotonic()
        with pytest.raises(TeacherLost, match="timeout"):
            teacher.score([microbatch([4])])
        assert 0.9 < time.monotonic() - began < 2.5
        assert [len(requests) for requests in asked] == [1] * 6


def test_replicas_that_refuse_at_once_leave_the_others_the_whole_time_out(world):
    absent = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with fake_teacher(lambda _: time.sleep(0.7) or True) as (slow, asked):
        urls = (slow, *[absent] * 5)  # the first is tried last
        settings = TeacherConfig(engine="sglang", urls=urls, request_timeout_seconds=2.0)
        teacher = ServedTeacher(
            settings, world, vocab_size=VOCABULARY, temperature=1.0, patience_seconds=0.0
        )
        assert teacher.score([microbatch([4])])
    assert len(asked) == 1


@pytest.mark.parametrize("merged_ids", [(), (2, 9)])
def test_scores_that_were_asked_for_early_are_the_same_bits(world, merged_ids):
    """Each response is asked for once, golden solutions too; what was not is asked for by score."""
    options = {"stop_ids": (2, 9), "top_k": 3, "merged_ids": merged_ids}
    samples = samples_of(6)
    batches = pack(samples, weights_of(samples), max_tokens=64)
    with fake_teacher() as (url, asked):
        late = served_by(world, url, **options).about(samples).score(batches)
        del asked[:]
        teacher = served_by(world, url, early=EarlyRequests(), **options)
        for sample in samples[1:] + samples[1:]:
            teacher.ask(sample, step=0)
        found = teacher.about(samples).score(batches)
    teacher.close()
    assert Counter(asked) == Counter(sequence(sample) for sample in samples)
    for a, b in zip(late, found, strict=True):
        assert torch.equal(a.logprob_N, b.logprob_N)
        assert torch.equal(a.topk_ids_NK, b.topk_ids_NK)
        assert torch.equal(a.topk_logprobs_NK, b.topk_logprobs_NK)


def test_an_early_request_that_fails_is_asked_for_again_by_score(world):
    """At the replicas in turn, once each; a source without a route is reported by `about`."""
    fails = True
    samples = samples_of(3)
    batches = pack(samples, weights_of(samples), max_tokens=64)
    with fake_teacher(lambda _: not fails) as (url, asked), fake_teacher() as (other, asked_other):
        teacher = served_by(world, url, early=EarlyRequests())
        for sample in samples:
            teacher.ask(sample, step=0)
        for request in list(teacher.early._asked.values()):
            with pytest.raises(TeacherLost, match="HTTP 503"):
                request.reply.result(30)
        assert len(asked) == 3
        fails = False
        assert len(teacher.about(samples).score(batches)) == len(batches)
        assert len(asked) == 6
        teacher.close()

        fails = True
        teacher = served_by(world, other, url, early=EarlyRequests())  # the last is tried first
        teacher.ask(samples[0], step=0)
        (request,) = teacher.early._asked.values()
        assert len(request.reply.result(30).logprobs_L) == len(samples[0].response_token_ids)
        assert (len(asked), asked_other) == (7, [sequence(samples[0])])
        teacher.close()
    routed = TeacherConfig(engine="sglang", routes={"math": (url,)})
    teacher = ServedTeacher(
        routed, world, vocab_size=VOCABULARY, temperature=1.0, early=EarlyRequests()
    )
    teacher.ask(samples[0], step=0)
    assert not teacher.early._asked
    with pytest.raises(ValueError, match="no teacher is routed for its source 's'"):
        teacher.about(samples)


def test_two_teachers_are_asked_about_the_same_tokens(world):
    (sample,) = samples_of(1)
    samples = [replace(sample, prompt_id=f"{route}:0") for route in "ab"]
    batches = pack(samples, weights_of(samples), max_tokens=64)
    with fake_teacher() as (first, asked), fake_teacher() as (second, asked_second):
        routes = {"a": (first,), "b": (second,)}
        settings = TeacherConfig(engine="sglang", routes=routes)
        teacher = ServedTeacher(
            settings, world, vocab_size=VOCABULARY, temperature=1.0, early=EarlyRequests()
        )
        for sample in samples:
            teacher.ask(sample, step=0)
        assert teacher.about(samples).score(batches)
        assert asked == asked_second == [sequence(sample)]
        teacher.close()


def score_where_others_drew(rank: int, world_size: int, url: str, lost: str, out: str) -> None:
    """As two replicas, of which each trains on what the other drew; then as the two stages of one:
    the first draws, the last scores."""
    samples = samples_of(4)
    for number, parallel in enumerate((ParallelConfig(), ParallelConfig(pipeline=2))):
        world = start_world(parallel, seed=0)
        early = EarlyRequests()
        teacher = served_by(world, url, early=early)
        drawn = samples[2 * rank : 2 * rank + 2] if number == 0 else [] if rank else samples
        for sample in drawn:
            teacher.ask(sample, step=number)
        for request in list(early._asked.values()):
            request.reply.result(30)
        trained = samples[::-1][2 * rank : 2 * rank + 2] if number == 0 else samples
        batches = pack(trained, weights_of(trained), max_tokens=64)
        found = teacher.about(trained).score(batches)
        alone = served_by(world, lost, patience_seconds=0, early=EarlyRequests())
        if drawn:
            alone.ask(samples[0], step=number)
        with pytest.raises(TeacherLost, match="no teacher answered"):
            alone.about(trained).score(batches)
        counts = early.take_metrics()
        torch.save((number, trained, batches, found, counts), f"{out}/{number}_{rank}.pt")
        assert not early._asked
        teacher.close()
        alone.close()
        stop_world()


def test_replies_travel_to_the_rank_that_trains_on_the_response(tmp_path, world):
    samples = samples_of(4)
    lost = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with fake_teacher() as (url, asked):
        run_ranks(2, score_where_others_drew, url, lost, str(tmp_path))
        assert Counter(asked) == Counter(2 * [sequence(sample) for sample in samples])
        shares = {}
        for file in sorted(tmp_path.glob("*.pt")):
            number, trained, batches, found, counts = torch.load(file, weights_only=False)
            shares[file.stem] = counts
            if number == 1 and file.stem.endswith("_0"):
                assert found == []
                continue
            expected = served_by(world, url).about(trained).score(batches)
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a.logprob_N, b.logprob_N)
    early = {"perf/scored_early": Mean(2, 2)}
    assert shares["0_0"] == shares["0_1"] == Metrics(early)
    assert shares["1_0"] == Metrics()
    assert shares["1_1"] == Metrics({"perf/scored_early": Mean(4, 4)})


def samples_of(number: int) -> list[Sample]:
    draw = np.random.default_rng(1)
    return [
        Sample(
            source="golden" if index == 1 else "rollout",
            prompt_id=f"s:{index}",
            prompt_token_ids=draw.integers(0, VOCABULARY, 3 + index),
            response_token_ids=(*draw.integers(0, VOCABULARY, 2 * index), 2),
            trained=np.ones(2 * index + 1, np.bool_),
        )
        for index in range(number)
    ]


def sequence(sample: Sample) -> tuple[int, ...]:
    return (*sample.prompt_token_ids.tolist(), *sample.response_token_ids.tolist())


def served_by(world: World, *urls: str, **options: Any) -> ServedTeacher:
    settings = TeacherConfig(engine="sglang", urls=urls)
    return ServedTeacher(settings, world, vocab_size=VOCABULARY, temperature=1.0, **options)
