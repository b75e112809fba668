"""The tail loop against a brute-force reading of its definition; the paper's compression rate."""

import json
import random
import time
import zlib

import numpy as np
import pytest

from stable_opd_mcore.data.repetition import (
    TailLoop,
    is_repetitive,
    tail_loop,
    tail_loop_of_text,
)
from tests.data.real_tokenizers import MATH, real_tokenizer
from tests.real_data import real_data


def brute_force(tokens, max_period, min_repeats, min_length):
    best = TailLoop()
    for period in range(1, max_period + 1):
        for length in range(max(min_length, min_repeats * period), len(tokens) + 1):
            suffix = tokens[len(tokens) - length :]
            periodic = all(suffix[k] == suffix[k - period] for k in range(period, length))
            if periodic and length > best.length:
                best = TailLoop(length, period)
    return best


def test_random_sequences_over_small_alphabets_match_brute_force():
    rng = random.Random(0)
    found = 0
    for _ in range(600):
        alphabet = rng.choice([1, 2, 3])
        unit = [rng.randrange(alphabet) for _ in range(rng.randint(1, 9))]
        tokens = [rng.randrange(alphabet) for _ in range(rng.randint(0, 12))]
        tokens += unit * rng.randint(0, 6) + unit[: rng.randint(0, len(unit))]
        limits = rng.choice([3, 8, 1024]), rng.choice([2, 3]), rng.choice([0, 5, 20])
        expected = brute_force(tokens, *limits)
        assert tail_loop(tokens, *limits) == expected, (tokens, limits)
        assert tail_loop(np.array(tokens, dtype=np.int64), *limits) == expected
        found += expected.length > 0
    assert 150 < found < 500


@pytest.mark.parametrize("period", [1, 17, 40, 1000, 1024])
def test_long_loops_are_found_whole_with_an_incomplete_last_repeat(period):
    rng = random.Random(period)
    unit = [rng.randrange(1000) for _ in range(period)]
    tokens = [2000 + k for k in range(50)] + unit * 40 + unit[: period // 2]
    assert tail_loop(tokens) == TailLoop(40 * period + period // 2, period)


def test_the_limits_of_period_repeats_and_length():
    unit = list(range(30))
    assert tail_loop(unit * 3, max_period=29) == TailLoop()
    assert tail_loop(unit * 3, max_period=30) == TailLoop(90, 30)
    assert tail_loop(unit * 2 + unit[:-1]) == TailLoop()
    assert tail_loop([1, 2] * 15 + [1]) == TailLoop()
    assert tail_loop([1, 2] * 16) == TailLoop(32, 2)


def test_text_is_measured_in_characters():
    assert tail_loop_of_text("x" + "é😀" * 40) == TailLoop(80, 2)
    assert tail_loop_of_text("." * 63) == TailLoop()
    assert tail_loop_of_text("ab\ud83d" * 30) == TailLoop(90, 3)  # half an emoji
    assert tail_loop_of_text("") == TailLoop()
    long = "".join(map(str, range(1200)))  # 3,690 characters
    assert tail_loop_of_text(long * 3) == TailLoop(3 * len(long), len(long))


@pytest.mark.parametrize("looping", [False, True])
def test_a_batch_of_long_responses_takes_well_under_a_second(looping):
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 150_000, (256, 32_768))
    if looping:
        batch[:, 1000:] = np.resize(batch[0, :700], 31_768)
    began = time.process_time()
    loops = [tail_loop(response) for response in batch]
    assert time.process_time() - began < 0.5
    assert {loop.period for loop in loops} == ({700} if looping else {0})


_RNG = random.Random(0)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["".join(_RNG.choices(LETTERS, k=_RNG.randint(2, 10))) for _ in range(3000)]


def random_words(characters: int, seed: int = 1) -> str:
    """Text of a vocabulary of 3,000 random words."""
    return " ".join(random.Random(seed).choices(WORDS, k=characters))[:characters]


def loop(period: int, characters: int) -> str:
    return (random_words(period, seed=2) * (characters // period + 1))[:characters]


@pytest.mark.parametrize(
    ("text", "ratio", "loop_length"),
    [
        (random_words(12_000), 1.74, 0),
        ("a" * 12_000, 294, 12_000),
        (loop(100, 12_000), 73, 12_000),
        (loop(1000, 12_000), 14.4, 12_000),
        (loop(2000, 12_000), 7.8, 12_000),
        (random_words(4_000) + loop(50, 8_000), 7.7, 8_000),
        (random_words(3_000) + loop(50, 9_000), 14.4, 9_000),
    ],
    ids=["none", "period 1", "100", "1000", "2000", "80 % tail", "90 % tail"],
)
def test_fixtures_of_the_compression_rate_and_what_the_loop_search_finds(text, ratio, loop_length):
    bounds = (0.98 * ratio, 1.02 * ratio, 10)
    assert [is_repetitive(text, 10_000, b) for b in bounds] == [True, False, ratio > 10]
    assert loop_length <= tail_loop_of_text(text).length <= loop_length + 2  # a letter by chance


def test_a_text_of_the_tail_length_is_not_repetitive():
    assert not is_repetitive("a" * 10_000, 10_000, 10)
    assert is_repetitive("a" * 10_001, 10_000, 10)


def test_the_ratio_counts_bytes_of_a_tail_counted_in_characters():
    text = "é" * 101
    bound = 200 / len(zlib.compress(("é" * 100).encode(), 6))
    assert is_repetitive(text, 100, bound - 0.01)
    assert not is_repetitive(text, 100, bound)
    assert is_repetitive("\ud83d" * 101, 100, 2)  # half an emoji, as a decoder may leave it


@pytest.fixture(scope="module")
def generations():
    path = real_data("generations/qwen2.5-math-7b-base_greedy.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def tokens(generations):
    tokenizer = real_tokenizer(MATH)
    return [tokenizer.encode(row["response"]) for row in generations]


def precision_and_recall(flags, labels):
    hits = sum(f and t for f, t in zip(flags, labels, strict=True))
    return round(hits / sum(flags), 3), round(hits / sum(labels), 3)


def test_precision_and_recall_on_real_generations(generations, tokens):
    """The table of docs/method.md §5."""
    texts = [row["response"] for row in generations]
    detectors = {
        "tokens": [tail_loop(ids).length > 0 for ids in tokens],
        "characters": [tail_loop_of_text(text).length > 0 for text in texts],
        "zlib": [bool(is_repetitive(text, 10_000, 10)) for text in texts],
    }
    short_period = [row["tail_period_chars"] is not None for row in generations]
    degenerate = [p or row["rep4"] > 0.5 for p, row in zip(short_period, generations, strict=True)]
    assert (sum(short_period), sum(degenerate)) == (75, 113)
    against = {
        name: (precision_and_recall(flags, short_period), precision_and_recall(flags, degenerate))
        for name, flags in detectors.items()
    }
    assert against == {
        "tokens": ((0.901, 0.973), (1.0, 0.717)),
        "characters": ((0.904, 1.0), (1.0, 0.735)),
        "zlib": ((0.747, 0.787), (1.0, 0.699)),
    }


def test_no_healthy_text_cut_anywhere_ends_in_a_loop(generations, tokens):
    rng = random.Random(0)
    num_cuts = 0
    for row, ids in zip(generations, tokens, strict=True):
        if row["rep4"] < 0.3 and row["tail_period_chars"] is None:
            for cut in rng.sample(range(len(ids)), min(40, len(ids))):
                num_cuts += 1
                assert tail_loop(ids[:cut]) == TailLoop(), row["id"]
    assert num_cuts > 7000
