"""Health metrics of hand-made samples and micro-batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from stable_opd_mcore.monitoring.health import (
    SPLIT_KEYS,
    EpisodeLimits,
    sample_metrics,
    token_metrics,
)
from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.records import (
    LossOutput,
    MicroBatch,
    Scores,
)
from tests.shares import facts_of, sample_of


def test_masked_tokens_are_those_that_a_mask_takes_from_rollouts_with_the_policy_term():
    whole = sample_of("rollout", "p", (1,), (2, 3, 4, 5), (True,) * 4)
    half = replace(whole, trained=(True, False, True, False))
    golden = replace(whole, kind="golden")
    # Neither a prompt of gkd that trains on its golden solution nor that solution is masked.
    off_policy = [replace(one, off_policy=True) for one in (half, golden)]
    for samples, share in (
        ([whole, golden, *off_policy], 0.0),
        ([whole, half, golden, *off_policy], 0.25),
        ([golden], None),
    ):
        assert sample_metrics(facts_of(samples))["tokens/masked_share"].value() == share
    found = sample_metrics(facts_of([whole, whole, half, golden]))
    assert found["batch/golden_complete_share"].value() == 0.25


# Six tokens: four of rollouts (the fourth masked out of the loss), two golden.
STUDENT = [-1.0, -2.0, -3.0, -50.0, -0.25, -0.75]
MICROBATCH = MicroBatch(
    tokens_T=torch.arange(8),
    positions_T=torch.arange(8),
    cu_seqlens=torch.tensor([0, 8], dtype=torch.int32),
    max_seqlen=8,
    rows_N=torch.arange(6),
    targets_N=torch.arange(6),
    sample_index_N=torch.zeros(6, dtype=torch.int64),
    token_index_N=torch.arange(6),
    turn_N=torch.zeros(6, dtype=torch.int64),
    index_in_turn_N=torch.arange(6),
    golden_N=torch.tensor([False] * 4 + [True] * 2),
    pg_weight_N=torch.tensor([0.1, 0.2, 0.3, 0.0, 0.0, 0.0]),
    kl_weight_N=torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 0.0]),
    sft_weight_N=torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0]),
    rollout_logprob_N=torch.tensor([-1.0, -2.5, -3.0, 0.0, 0.0, 0.0]),
    repetitive_N=torch.tensor([False, True, True, True, False, False]),
    truncated_N=torch.tensor([False, False, True, True, False, False]),
    golden_rows_G=torch.tensor([4, 5]),
    teacher=Scores(
        torch.tensor([-1.5, -1.5, -6.0, -9.0, -9.0, -9.0]), entropy_N=torch.full((6,), 2.0)
    ),
    reference=Scores(None, hidden_NH=torch.zeros(6, 1)),
)
OUTPUT = LossOutput(
    loss=torch.tensor(99.0),
    pg=torch.tensor(1.0),
    kl=torch.tensor(0.5),
    sft=torch.tensor(0.25),
    # the third token is a stop token, whose class is more probable than itself
    student_logprob_N=torch.tensor(STUDENT) + torch.tensor([0, 0, 0.75, 0, 0, 0]),
    token_logprob_N=torch.tensor(STUDENT),
    entropy_N=torch.tensor([1.0, 2.0, 3.0, 9.0, 9.0, 9.0]),
    advantage_N=torch.tensor([-0.5, 0.5, -3.0, 0.0, 0.0, 0.0]),
    ratio_clipped_N=torch.tensor([True, False, False, True, True, True]),
    kl_reference_N=torch.tensor([0.25, 0.75, 7.0, 7.0, 7.0, 7.0]),
    kl_teacher_N=torch.tensor([0.5, -0.5, 3.0, 7.0, 7.0, 7.0]),
    reference_logprob_N=torch.tensor([-2.0, -2.0, -2.0, -9.0, -9.0, -9.0]),
    teacher_logprob_N=torch.tensor([-1.5, -1.5, -6.0, -9.0, -9.0, -9.0]),
    teacher_entropy_N=torch.zeros(6),
)
EXPECTED = {
    "loss/total": 1.75,
    "loss/pg": 1.0,
    "loss/kl": 0.5,
    "loss/sft": 0.25,
    "logprob/student": -1.75,
    "logprob/teacher": -3.0,
    "logprob/reference": -2.0,
    "logprob/golden": -0.5,
    "logprob/rollout_gap_mean": pytest.approx(0.5 / 3),
    "logprob/rollout_gap_max": 0.5,
    "advantage/mean": -1.0,
    "advantage/repetitive": -1.25,
    "advantage/regular": -0.5,
    "advantage/abs_sum_repetitive": 3.5,
    "advantage/abs_sum_regular": 0.5,
    "advantage/abs_share_repetitive": 0.875,
    "tokens/trained": 5.0,
    "tokens/rollout": 4.0,
    "tokens/repetitive_share": 0.75,
    "tokens/golden_share": 0.4,
    "kl/teacher": 1.0,
    "kl/reference": 0.5,
    "kl/reference_sampled": 0.0,
    "entropy/student": 2.0,
    "entropy/teacher": 2.0,
    "entropy/gap": pytest.approx(2 / 3),
    "ratio/clip_share": pytest.approx(1 / 3),
    "advantage/mean_finished": 0.0,
    "advantage/mean_truncated": -3.0,
    "kl/teacher_finished": 0.0,
    "kl/teacher_truncated": 3.0,
    "entropy/student_finished": 1.5,
    "entropy/student_truncated": 3.0,
    # Quarters of two tokens: the golden tokens are in the third.
    "advantage/mean_q1": 0.0,
    "advantage/mean_q2": -3.0,
    "kl/teacher_q1": 0.0,
    "kl/teacher_q2": 3.0,
    "entropy/student_q1": 1.5,
    "entropy/student_q2": 3.0,
    **{f"{key}_q{n}": None for key in SPLIT_KEYS for n in (3, 4)},
}
BUDGET = 8


def part(record, rows: slice):
    """The rows of a record's per-token vectors, nested scores included."""
    changes = {
        name: value[rows]
        for name, value in vars(record).items()
        if name.endswith("_N") and value is not None
    }
    for name in ("teacher", "reference"):
        if getattr(record, name, None) is not None:
            changes[name] = part(getattr(record, name), rows)
    return replace(record, **changes)


MASKED = torch.arange(6) == 3
SPOILED = {
    name: torch.where(MASKED, math.nan, getattr(OUTPUT, name))
    for name in ("student_logprob_N", "token_logprob_N")
}
HIDDEN = {"teacher": Scores(None, hidden_NH=torch.zeros(6, 1))}  # scores come from the loss


@pytest.mark.parametrize(
    ("output", "microbatch"),
    [
        (OUTPUT, MICROBATCH),
        (replace(OUTPUT, **SPOILED), MICROBATCH),
        (replace(OUTPUT, teacher_entropy_N=torch.full((6,), 2.0)), replace(MICROBATCH, **HIDDEN)),
    ],
)
def test_token_metrics_by_hand(output, microbatch):
    values = token_metrics([output], [microbatch], BUDGET)().values_by_key()
    require_known(values)
    assert values == EXPECTED


@pytest.mark.parametrize("cut", [0, 1, 2, 4, 6])
def test_token_metrics_do_not_depend_on_micro_batching(cut):
    half = replace(OUTPUT, pg=OUTPUT.pg / 2, kl=OUTPUT.kl / 2, sft=OUTPUT.sft / 2)
    outputs = [part(half, slice(0, cut)), part(half, slice(cut, None))]
    microbatches = [part(MICROBATCH, slice(0, cut)), part(MICROBATCH, slice(cut, None))]
    assert token_metrics(outputs, microbatches, BUDGET)().values_by_key() == EXPECTED
    assert token_metrics([], microbatches, BUDGET)().values_by_key() == {}  # an earlier stage


@pytest.mark.parametrize(("pg", "sft"), [(0.0, 0.0), (0.7, 0.0), (0.7, 1.0)])
def test_golden_tokens_are_told_by_their_source_not_by_their_weights(pg, sft):
    """lambda 0, and off-policy prompts of gkd, whose policy term is on golden tokens."""
    golden_N = MICROBATCH.golden_N
    pg_N = MICROBATCH.pg_weight_N.masked_fill(golden_N, pg)
    sft_N = MICROBATCH.sft_weight_N.masked_fill(golden_N, sft)
    batch = replace(MICROBATCH, pg_weight_N=pg_N, sft_weight_N=sft_N)
    counted = {"tokens/trained": 3.0, "tokens/golden_share": 0.0} if pg == 0 else {}
    assert token_metrics([OUTPUT], [batch], BUDGET)().values_by_key() == EXPECTED | counted


def test_without_teacher_and_reference_their_numbers_are_undefined():
    bare = replace(MICROBATCH, teacher=None, reference=None)
    values = token_metrics([OUTPUT], [bare], BUDGET)().values_by_key()
    logprobs = ("logprob/teacher", "logprob/reference")
    others = ("kl/teacher", "kl/reference_sampled", "entropy/teacher", "entropy/gap")
    undefined = [key for key in EXPECTED if key.startswith((*logprobs, *others))]
    assert values == EXPECTED | dict.fromkeys(undefined)


def test_without_advantages_their_means_are_undefined():
    """As with gkd, lsm and student_topk, and with an own function that returns only the loss."""
    bare = replace(OUTPUT, advantage_N=None, ratio_clipped_N=None)
    values = token_metrics([bare], [MICROBATCH], BUDGET)().values_by_key()
    advantages = {key: value for key, value in EXPECTED.items() if key.startswith("advantage/")}
    undefined = {**dict.fromkeys(advantages), "ratio/clip_share": None}
    sums = {f"advantage/abs_sum_{where}": 0.0 for where in ("repetitive", "regular")}
    assert values == EXPECTED | undefined | sums


def test_the_engine_gap_is_against_the_behaviour_policy():
    old = torch.tensor([-1.0, -2.5, -7.0, 0.0, 0.0, 0.0])
    of_classes = old + torch.tensor([0, 0, 2.0, 0, 0, 0])
    batch = replace(MICROBATCH, old_logprob_N=of_classes, old_token_logprob_N=old)
    values = token_metrics([OUTPUT], [batch], BUDGET)().values_by_key()
    assert values["logprob/rollout_gap_max"] == 4.0


def test_tokens_beyond_the_budget_are_in_its_last_quarter():
    batch = replace(MICROBATCH, index_in_turn_N=torch.tensor([0, 1, 9, 3, 4, 5]))
    values = token_metrics([OUTPUT], [batch], 4)().values_by_key()
    advantages = [values[f"advantage/mean_q{n}"] for n in (1, 2, 3, 4)]
    assert advantages == [-0.5, 0.5, None, -3.0]


def test_quarters_are_of_all_turns_of_an_episode():
    """Four turns of four tokens: each is a quarter, however many tokens it has."""
    turn_N, index_N = torch.tensor([0, 1, 3, 3, 0, 0]), torch.tensor([3, 0, 0, 1, 0, 1])
    batch = replace(MICROBATCH, turn_N=turn_N, index_in_turn_N=index_N)
    values = token_metrics([OUTPUT], [batch], 4, max_turns=4)().values_by_key()
    advantages = [values[f"advantage/mean_q{n}"] for n in (1, 2, 3, 4)]
    assert advantages == [-0.5, 0.5, None, -3.0]
    assert [values[f"kl/teacher_turn_{part}"] for part in ("1", "2", "3_4")] == [0.5, -0.5, 3.0]
    assert "kl/teacher_turn_5_8" not in values


def test_samples_without_an_environment_have_no_part_by_turn_and_quarters_of_one_turn():
    turn_N, index_N = torch.tensor([0, 1, 0, 0, 0, 0]), torch.tensor([3, 0, 1, 2, 0, 1])
    of_sample = {"sample_index_N": torch.tensor([0, 0, 1, 1, 2, 2])}
    batch = replace(MICROBATCH, turn_N=turn_N, index_in_turn_N=index_N, **of_sample)
    limits_B = EpisodeLimits(np.array([4, 1, 1]), np.array([4, 8, 4]))
    values = token_metrics([OUTPUT], [batch], 8, {}, 4, limits_B)().values_by_key()
    require_known(values)
    assert [values[f"advantage/mean_{part}"] for part in ("turn_1", "turn_2")] == [-0.5, 0.5]
    advantages = [values[f"advantage/mean_q{n}"] for n in (1, 2, 3, 4)]
    assert advantages == [-1.75, 0.5, None, None]
