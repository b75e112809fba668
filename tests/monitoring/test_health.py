"""Health metrics of hand-made batches, of the fixtures of docs/method.md §5 and of real output."""

import json
import math
import os
import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.config.evaluation import MonitoringConfig
from stable_opd_mcore.monitoring.health import (
    is_repetitive,
    repetition_rate,
    rollout_metrics,
    sample_metrics,
    tail_characters,
    token_metrics,
)
from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.records import (
    LossOutput,
    MicroBatch,
    Prompt,
    Rollout,
    Sample,
    Scores,
)

DATA = Path(
    os.environ.get("STABLE_OPD_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data")
)
GENERATIONS = DATA / "generations" / "qwen2.5-math-7b-base_greedy.jsonl"


def random_words(characters: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    words = []
    while sum(map(len, words)) + len(words) < characters:
        words.append("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 9))))
    return " ".join(words).ljust(characters)[:characters]


def loop(period: int, characters: int) -> str:
    return (random_words(period, seed=1) * (characters // period + 1))[:characters]


@pytest.mark.parametrize(
    ("text", "ratio", "repetitive"),
    [
        (random_words(12_000), 1.6, False),
        ("a" * 12_000, 294, True),
        (loop(100, 12_000), 73, True),
        (loop(1000, 12_000), 14.4, True),
        (loop(2000, 12_000), 7.8, False),
        (random_words(4_000) + loop(10, 8_000), 7.7, False),
        (random_words(3_000) + loop(10, 9_000), 14.4, True),
    ],
    ids=["none", "period 1", "100", "1000", "2000", "80 % tail", "90 % tail"],
)
def test_fixtures(text, ratio, repetitive):
    tail = text[-10_000:].encode()
    assert len(tail) / len(zlib.compress(tail, 6)) == pytest.approx(ratio, rel=0.05)
    assert is_repetitive(text, 10_000, 10) is repetitive


def test_a_text_of_the_tail_length_is_not_repetitive():
    assert not is_repetitive("a" * 10_000, 10_000, 10)
    assert is_repetitive("a" * 10_001, 10_000, 10)


def test_the_ratio_counts_bytes_of_a_tail_counted_in_characters():
    text = "é" * 101
    bound = 200 / len(zlib.compress(("é" * 100).encode(), 6))
    assert is_repetitive(text, 100, bound - 0.01)
    assert not is_repetitive(text, 100, bound)
    assert is_repetitive("\ud83d" * 101, 100, 2)  # half an emoji, as a decoder may leave it


@pytest.mark.parametrize(
    ("configured", "max_new_tokens", "expected"),
    [(None, 8192, 10_000), (None, 1024, 2560), (None, 1, 2), (64, 8192, 64)],
)
def test_the_tail_must_be_reachable_within_the_budget(configured, max_new_tokens, expected):
    config = MonitoringConfig(repetition_tail_characters=configured)
    assert tail_characters(config, max_new_tokens) == expected


@pytest.mark.skipif(not GENERATIONS.is_file(), reason="needs the real generations")
def test_real_generations():
    rows = [json.loads(line) for line in GENERATIONS.read_text().splitlines()]
    long = [row for row in rows if len(row["response"]) > 2500]
    tight = [row["response"] for row in long if 0 < (row["tail_period_chars"] or 0) <= 500]
    varied = [row["response"] for row in rows if row["rep4"] < 0.3 and not row["tail_period_chars"]]
    assert len(tight) > 50
    assert len(varied) > 50
    assert repetition_rate(tight, 2500, 10).value() > 0.95
    assert repetition_rate(varied, 2500, 10).value() == 0.0


def rollout(length: int, finish: str, reward: float | None = None, text: str = "") -> Rollout:
    prompt = Prompt("p", "problem", (1,))
    return Rollout(prompt, 0, (7,) * length, (-0.5,) * length, finish, 0, text, reward)


def test_rollout_metrics_of_a_batch_by_hand():
    rollouts = [
        rollout(2, "stop", 1.0),
        rollout(4, "stop", 0.0),
        rollout(10, "length", 0.0, "ab" * 100),
        rollout(0, "abort"),
    ]
    config = MonitoringConfig(repetition_tail_characters=64, repetition_ratio=2)
    values = rollout_metrics(rollouts, 10, config).values_by_key()
    require_known(values)
    assert values == {
        "rollout/response_length_mean": 4.0,
        "rollout/response_length_p50": 3.0,
        "rollout/response_length_p95": pytest.approx(9.1),
        "rollout/response_length_max": 10.0,
        "rollout/truncation_rate": 0.25,
        "rollout/abort_rate": 0.25,
        "rollout/repetition_rate": 0.25,
        "rollout/repetition_rate_10k": 0.0,
        "rollout/accuracy": pytest.approx(1 / 3),
    }


def test_the_second_repetition_rate_is_written_only_for_another_tail():
    values = rollout_metrics([rollout(3, "stop")], 8192, MonitoringConfig(), area="eval")
    assert "eval/repetition_rate" in values
    assert "eval/repetition_rate_10k" not in values
    require_known(values)


def test_no_rollouts_leave_everything_undefined():
    values = rollout_metrics([], 10, MonitoringConfig(), area="eval_greedy").values_by_key()
    require_known(values)
    assert set(values.values()) == {None}


def test_share_of_complete_golden_sequences():
    sample = Sample("rollout", "p", (1,), (2, 3), (True, True))
    samples = [sample, sample, sample, replace(sample, source="golden")]
    assert sample_metrics(samples).values_by_key() == {"batch/golden_complete_share": 0.25}


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
    pg_weight_N=torch.tensor([0.1, 0.2, 0.3, 0.0, 0.0, 0.0]),
    kl_weight_N=torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 0.0]),
    sft_weight_N=torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0]),
    rollout_logprob_N=torch.tensor([-1.0, -2.5, -3.0, 0.0, 0.0, 0.0]),
    repetitive_N=torch.tensor([False, True, True, True, False, False]),
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
    "tokens/masked_share": 0.25,
    "tokens/repetitive_share": 0.75,
    "tokens/golden_share": 0.4,
    "kl/teacher": 1.0,
    "kl/reference": 0.5,
    "kl/reference_sampled": 0.0,
    "entropy/student": 2.0,
    "entropy/teacher": 2.0,
    "entropy/gap": pytest.approx(2 / 3),
    "ratio/clip_share": pytest.approx(1 / 3),
}


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


def test_token_metrics_by_hand():
    values = token_metrics([OUTPUT], [MICROBATCH]).values_by_key()
    require_known(values)
    assert values == EXPECTED


@pytest.mark.parametrize("cut", [0, 1, 2, 4, 6])
def test_token_metrics_do_not_depend_on_micro_batching(cut):
    half = replace(OUTPUT, pg=OUTPUT.pg / 2, kl=OUTPUT.kl / 2, sft=OUTPUT.sft / 2)
    outputs = [part(half, slice(0, cut)), part(half, slice(cut, None))]
    microbatches = [part(MICROBATCH, slice(0, cut)), part(MICROBATCH, slice(cut, None))]
    assert token_metrics(outputs, microbatches).values_by_key() == EXPECTED


def test_non_finite_values_of_masked_tokens_are_ignored():
    masked = torch.arange(6) == 3
    spoiled = {
        name: torch.where(masked, math.nan, getattr(OUTPUT, name))
        for name in ("student_logprob_N", "token_logprob_N")
    }
    values = token_metrics([replace(OUTPUT, **spoiled)], [MICROBATCH])
    assert values.values_by_key() == EXPECTED


def test_teacher_metrics_from_the_loss_when_scores_are_hidden_states():
    alone = replace(MICROBATCH, teacher=Scores(None, hidden_NH=torch.zeros(6, 1)))
    output = replace(OUTPUT, teacher_entropy_N=torch.full((6,), 2.0))
    assert token_metrics([output], [alone]).values_by_key() == EXPECTED


def test_without_teacher_and_reference_their_numbers_are_undefined():
    bare = replace(MICROBATCH, teacher=None, reference=None)
    values = token_metrics([OUTPUT], [bare]).values_by_key()
    undefined = {key for key, value in values.items() if value is None}
    assert undefined == {
        "logprob/teacher",
        "logprob/reference",
        "kl/teacher",
        "kl/reference_sampled",
        "entropy/teacher",
        "entropy/gap",
    }


def test_the_engine_gap_is_against_the_behaviour_policy():
    old = torch.tensor([-1.0, -2.5, -7.0, 0.0, 0.0, 0.0])
    of_classes = old + torch.tensor([0, 0, 2.0, 0, 0, 0])
    batch = replace(MICROBATCH, old_logprob_N=of_classes, old_token_logprob_N=old)
    values = token_metrics([OUTPUT], [batch]).values_by_key()
    assert values["logprob/rollout_gap_max"] == 4.0


def test_an_unlisted_metric_is_refused():
    with pytest.raises(ValueError, match=r"unknown metrics loss/totla: describe them in"):
        require_known(["loss/total", "loss/totla"])
