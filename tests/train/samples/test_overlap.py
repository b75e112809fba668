"""Overlap of student and teacher by hand: two responses, of which the second is golden."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.records import MicroBatch, Scores
from stable_opd_mcore.train.samples.overlap import OverlapModel, OverlapPair, overlap_metrics
from tests.shares import sample_of, weights_of

STUDENT_STOPS, TEACHER_STOPS = (11, 12), (13,)
SAMPLES = [
    sample_of("rollout", "s:0", (1, 2), (5, 6, 7), (True, False, True), (-1.0, -1.0, -1.0)),
    sample_of("golden", "s:0", (1, 2), (8, 11), (True, True)),
    sample_of("rollout", "s:1", (1, 2), (9, 10), (True, False), (-1.0, -1.0)),
]


class Listing:
    """A scorer that returns one top-2 list on every row; target t has probability t / 100."""

    head = None

    def __init__(self, ids: Sequence[int], probabilities: Sequence[float]) -> None:
        self.ids, self.probabilities = torch.tensor([ids]), torch.tensor([probabilities])
        self.prompts: list[str] = []

    def score(self, microbatches, samples=()):
        self.prompts = [sample.prompt_id for sample in samples]
        return [self._score(batch.targets_N) for batch in microbatches]

    def _score(self, targets_N):
        shape = len(targets_N), -1
        return Scores(
            logprob_N=(targets_N / 100).log(),
            topk_ids_NK=self.ids.expand(shape),
            topk_logprobs_NK=self.probabilities.log().expand(shape),
        )


def batches_of(max_tokens: int) -> list[MicroBatch]:
    """Rows of masked and golden tokens have no weight."""
    weights = weights_of(SAMPLES, pg=[sample.kind == "rollout" for sample in SAMPLES])
    return pack(SAMPLES, weights, max_tokens=max_tokens)


def pair_of(student: Listing, teacher: Listing) -> OverlapPair:
    return OverlapPair(OverlapModel(student, STUDENT_STOPS), OverlapModel(teacher, TEACHER_STOPS))


@pytest.mark.parametrize("max_tokens", [64, 5])
def test_metrics_are_means_over_trained_rows_of_all_micro_batches(max_tokens):
    student, teacher = Listing([4, 7], [0.5, 0.3]), Listing([7, 9], [0.6, 0.2])
    found = overlap_metrics(pair_of(student, teacher), batches_of(max_tokens), SAMPLES)
    # Three rows are trained. Two are the last of a rollout: token 7, and token 10, which is masked.
    assert found["overlap/ratio"] == Mean(1.5, 3)
    for key, value in (("student_mass", 0.3), ("teacher_mass", 0.6), ("advantage", 0.0)):
        mean = found[f"overlap/{key}"]
        assert mean.count == 3
        assert mean.total == pytest.approx(3 * value)
    for key, stop in (("stop/student_mass", 11), ("stop/teacher_mass", 13)):
        assert found[key].count == 2
        assert found[key].total == pytest.approx(2 * stop / 100)
    assert student.prompts == teacher.prompts == ["s:0", "s:0", "s:1"]


def test_the_advantage_is_over_the_shared_tokens():
    found = overlap_metrics(
        pair_of(Listing([4, 7], [0.6, 0.3]), Listing([7, 4], [0.4, 0.4])), batches_of(64), SAMPLES
    )
    expected = 2 / 3 * math.log(0.5 / (2 / 3)) + 1 / 3 * math.log(0.5 / (1 / 3))
    assert found["overlap/advantage"].total == pytest.approx(3 * expected, rel=1e-5)


def test_a_stage_without_scores_has_no_metrics():
    class NoScores(Listing):
        def score(self, microbatches, samples=()):
            return []

    no_scores = NoScores([4, 7], [0.5, 0.3])
    assert overlap_metrics(pair_of(no_scores, no_scores), batches_of(64), SAMPLES) == Metrics()


def test_golden_solutions_that_carry_the_policy_term_do_not_count():
    samples = [replace(sample, off_policy=True) for sample in SAMPLES]
    (batch,) = pack(samples, weights_of(samples, pg=[True, True, True]), max_tokens=64)
    model = Listing([4, 7], [0.5, 0.3])
    found = overlap_metrics(pair_of(model, model), [batch], samples)
    assert found == overlap_metrics(pair_of(model, model), batches_of(64), SAMPLES)
    (batch,) = pack(samples, weights_of(samples, pg=[False, True, False]), max_tokens=64)
    found = overlap_metrics(pair_of(model, model), [batch], samples)
    for key, mean in found.items():
        assert mean.count == (2 if key.startswith("stop/") else 0)


def test_every_turn_has_a_last_token():
    """A rollout of three tokens in two turns, and one of which a turn has none."""
    samples = [replace(SAMPLES[0], turns=[0, 1, 1]), SAMPLES[1], replace(SAMPLES[2], turns=[1, 3])]
    (batch,) = pack(samples, weights_of(samples, pg=[True, False, True]), max_tokens=64)[:1]
    student, teacher = Listing([4, 7], [0.5, 0.3]), Listing([7, 9], [0.6, 0.2])
    found = overlap_metrics(pair_of(student, teacher), [batch], samples)
    assert found["stop/student_mass"].count == 4
    assert found["stop/student_mass"].total == pytest.approx(4 * 0.11)
    assert found["overlap/ratio"].count == 3
