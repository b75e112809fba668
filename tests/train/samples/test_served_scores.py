"""Scores of a served teacher from the end of a response to the rank that trains on it."""

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.samples import golden_samples, rollout_samples
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.serving.process import free_port
from stable_opd_mcore.serving.requests import Completion, Generation
from stable_opd_mcore.serving.teacher import TeacherLost
from stable_opd_mcore.train.held_out import sample_held_out
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.samples import collecting
from stable_opd_mcore.train.samples.served_scores import begin_scoring
from tests.parallel.launch import run_ranks
from tests.rollout.sglang.abortable_server import talked
from tests.rollout.sglang.test_sglang_engine import engine_of
from tests.serving.fake_teacher import fake_teacher
from tests.serving.test_teacher import served_by
from tests.shares import sample_of, with_gaps


class HeldBack:
    """A rollout server that ends its responses at once, and those of `last` when it may."""

    url, api_key = "http://here", None

    def __init__(self, last: Prompt):
        self._last, self.may_end = last, threading.Event()
        self._samples: Counter[tuple[int, ...]] = Counter()  # prompt -> samples so far
        self._pool = ThreadPoolExecutor(4)  # replies come from another thread

    def submit(
        self, request: Generation, timeout_seconds: float = 0, delay_seconds: float = 0
    ) -> Future[Completion]:
        prompt = tuple(request.token_ids)
        number, self._samples[prompt] = self._samples[prompt], self._samples[prompt] + 1

        def sample() -> Completion:
            if prompt == self._last.token_ids:
                assert self.may_end.wait(30), "no teacher was asked while this response was sampled"
            return Completion(np.array([number, 3]), np.array([-0.5, -0.5]), "length", ("0",), 0)

        return self._pool.submit(sample)

    def is_healthy(self, timeout_seconds: float) -> bool:
        return True

    def close(self) -> None:
        pass


def test_a_served_teacher_is_asked_before_the_last_response_ends(run, tmp_path):
    """The last one ends only when the golden solutions and all other responses were asked for.
    Every request is sent once, with the teacher's prompt. An evaluation asks for nothing."""
    prompts = [
        replace(prompt, teacher_token_ids=(5 + number, *prompt.token_ids))
        for number, prompt in enumerate(run.prompts.select(range(4)))
    ]
    server, asked_before = HeldBack(prompts[-1]), 4 + 3 * 2
    with fake_teacher(lambda _: len(asked) < asked_before or server.may_end.set() or True) as (
        url,
        asked,
    ):
        teacher = served_by(url)
        engine, _ = engine_of(tmp_path, run.world, server, partial=False)
        engine.teacher = teacher
        sampling = replace(run.sampling, max_new_tokens=2, num_samples=2, scored=True)
        served = replace(run, engine=engine, served_teacher=teacher, sampling=sampling)
        own_prompts, mark = (
            lambda *_: prompts,
            lambda _run, samples, _state: [
                replace(sample, off_policy=sample.kind == "golden") for sample in samples
            ],
        )
        with patch.multiple(collecting, own_prompts=own_prompts, mark_samples=mark):
            _, samples = collecting.collect_samples(served, TrainState(), PhaseTimer())
        sequences = [(*s.teacher_prompt_token_ids, *s.token_ids[s.places]) for s in samples]
        assert Counter(asked) == Counter(sequences)
        for sample in samples:
            assert sample.teacher_scores is not None
            assert sample.teacher_scores == teacher.ask(sample, step=0).result(30)
        gaps = with_gaps(samples[0])  # observed tokens are read and have no scores
        assert begin_scoring(served, [replace(gaps, teacher_scores=None)], 0)() == [gaps]

        del asked[:]
        held_out = replace(sampling, scored=False)
        sample_held_out(engine, run.grader, run.world, prompts, held_out)
        assert asked == []
    engine.close()
    teacher.close()


def test_each_context_of_an_episode_is_a_request(run, tmp_path, monkeypatch):
    """The second turn continues the context of the first, the third begins another."""
    monkeypatch.setattr(Interaction, "observe", lambda _, episode, **__: talked(episode))
    prompts = run.prompts.select(range(2))
    server = HeldBack(prompts[-1])
    server.may_end.set()
    with fake_teacher() as (url, asked):
        teacher = served_by(url)
        engine, _ = engine_of(tmp_path, run.world, server, partial=False)
        engine.teacher = teacher
        sampling = replace(run.sampling, max_new_tokens=2, num_samples=2, scored=True)
        samples = rollout_samples(engine.generate(prompts, sampling, step=0))
        assert [len(sample.places) for sample in samples] == [4, 2] * 4
        assert Counter(asked) == Counter(tuple(sample.token_ids.tolist()) for sample in samples)
        for sample in samples:
            assert sample.teacher_scores == teacher.ask(sample, step=0).result(30)
        nothing_sampled = sample_of("rollout", "s:0", (1, 2), ())
        assert not len(teacher.ask(nothing_sampled, step=0).result(30).logprobs_L)
    engine.close()
    teacher.close()


def score_on_two_ranks(rank: int, _world_size: int, url: str, lost: str) -> None:
    """As two replicas with a sample each, of which one's teacher is lost; as one whose first rank
    asks."""
    prompts = [Prompt(f"s:{i}", "", (1, 2 + i), golden_token_ids=(3,)) for i in range(2)]
    rollouts = [Rollout(prompt, 0, (3, 4), (-0.1, -0.2), "length", 0) for prompt in prompts]
    for tensor in (1, 2):
        world = start_world(ParallelConfig(tensor=tensor), seed=0)
        own = rollouts[rank : rank + 1] if tensor == 1 else rollouts
        samples = rollout_samples(own) + golden_samples(prompts)
        teacher = served_by(url)
        run = SimpleNamespace(world=world, served_teacher=teacher)
        found = begin_scoring(run, samples, 0)()
        scored = [one.teacher_scores is not None for one in found]
        assert scored == [True] * len(own) + [False] * 2, "the loss reads none of golden solutions"
        assert begin_scoring(run, found, 0)() == found
        one_lacks = served_by(lost if rank == 1 or tensor == 2 else url, patience_seconds=0.0)
        run = SimpleNamespace(world=world, served_teacher=one_lacks)
        with pytest.raises(TeacherLost, match=f"no teacher answered .*{lost}"):
            begin_scoring(run, samples, 0)()
        teacher.close()
        one_lacks.close()
        stop_world()


def test_one_rank_of_a_replica_asks_and_all_ranks_lose_the_teacher():
    lost = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with fake_teacher() as (url, asked):
        run_ranks(2, score_on_two_ranks, url, lost)
    assert len(asked) == (2 + 1) + 2
    assert len(set(asked)) == 2


def test_without_a_served_teacher_samples_stay_as_they_are(run):
    samples = golden_samples(run.prompts.select(range(2)))
    assert begin_scoring(run, samples, 0)() is samples
