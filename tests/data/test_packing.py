"""Packing: every token once, on the right row, the same plan on every rank."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from stable_opd_mcore.data.packing import costs, fill, level, pack
from stable_opd_mcore.data.partition import partition, split_by_prompt
from stable_opd_mcore.parallel.context import slice_microbatch
from tests.real_data import real_data
from tests.shares import facts_of, pack_share, sample_of, weights_of, with_gaps


def make_samples(count, seed=0, longest=30, siblings=1):
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        if index % siblings == 0:
            prompt = tuple(rng.randrange(1, 50) for _ in range(rng.randint(1, 9)))
        response = tuple(rng.randrange(1, 50) for _ in range(rng.randint(1, longest)))
        n = len(response)
        is_golden = index % 4 == 3
        sample = sample_of(
            kind="golden" if is_golden else "rollout",
            prompt_id=f"p:{index}",
            prompt_token_ids=prompt,
            response_token_ids=response,
            trained=[rng.random() < 0.8 for _ in range(n)],
            rollout_logprobs=None if is_golden else tuple(-rng.random() for _ in range(n)),
            repetitive=None if is_golden else np.arange(n) >= rng.randint(0, n),
            truncated=not is_golden and index % 3 == 0,
            turns=None if is_golden else np.cumsum([rng.random() < 0.2 for _ in range(n)]),
            turn_truncated=None if is_golden else [rng.random() < 0.5 for _ in range(n)],
        )
        samples.append(with_gaps(sample) if index % 3 else sample)
    values = ([rng.random() for _ in range(count)] for _ in range(3))
    return samples, weights_of(samples, *values)


@pytest.mark.parametrize("data_size", [1, 3])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("siblings", [1, 4])
def test_every_sampled_token_and_no_other_is_predicted_by_the_token_before_it(
    data_size, multiple, siblings
):
    samples, weights = make_samples(17, siblings=siblings)
    options = {"max_tokens": 64, "pad_to_multiple": multiple, "share_prefixes": siblings > 1}
    seen = {}
    for rank in range(data_size):
        for batch in pack_share(samples, weights, rank, data_size, **options):
            assert len(batch.tokens_T) % multiple == 0
            for row in range(len(batch.rows_N)):
                index = int(batch.sample_index_N[row])
                token = int(batch.token_index_N[row])
                key = (index, token)
                assert key not in seen
                seen[key] = True
                sample, place = samples[index], int(batch.rows_N[row])
                whole, here = sample.token_ids, sample.places[token] - 1
                assert int(batch.tokens_T[place]) == whole[here]
                assert int(batch.positions_T[place]) == here
                assert int(batch.targets_N[row]) == whole[here + 1]
                turns, truncated = sample.turns, sample.turn_truncated
                turns = np.zeros(token + 1) if turns is None else turns
                assert int(batch.turn_N[row]) == turns[token]
                assert int(batch.index_in_turn_N[row]) == sum(turns[:token] == turns[token])
                assert bool(batch.truncated_N[row]) == (truncated is not None and truncated[token])
                assert bool(batch.golden_N[row]) == (sample.kind == "golden")
                for name in ("pg", "kl", "sft"):
                    packed = float(getattr(batch, f"{name}_weight_N")[row])
                    weight = getattr(weights, f"{name}_B")[index]
                    is_on = name == "kl" or sample.trained[token]
                    assert packed == pytest.approx(weight if is_on else 0.0)
                if sample.rollout_logprobs is None:
                    assert float(batch.rollout_logprob_N[row]) == 0
                    assert not bool(batch.repetitive_N[row])
                else:
                    expected = sample.rollout_logprobs[token]
                    assert float(batch.rollout_logprob_N[row]) == pytest.approx(expected)
                    assert bool(batch.repetitive_N[row]) == sample.repetitive[token]
    assert len(seen) == sum(len(sample.places) for sample in samples)


def test_common_prefixes_are_computed_once_and_read_by_all():
    samples, weights = make_samples(24, longest=9, siblings=6)
    samples.append(replace(samples[0], kind="rollout"))  # the same tokens again
    weights = weights_of(samples)
    whole, shared = (
        pack(samples, weights, max_tokens=64, share_prefixes=on) for on in (False, True)
    )
    tokens = [sum(len(batch.tokens_T) for batch in batches) for batches in (whole, shared)]
    assert tokens[1] < 0.7 * tokens[0]
    for batch in shared:
        assert len(batch.tokens_T) <= 64
        ends = batch.cu_seqlens if batch.cu_seqlens_keys is None else batch.cu_seqlens_keys
        places = range(ends[-1]) if batch.key_places_K is None else batch.key_places_K.tolist()
        own = batch.cu_seqlens.diff().tolist()
        of_sequence = dict.fromkeys(batch.sample_index_N.tolist())
        for index, start, end, count in zip(of_sequence, ends, ends[1:], own, strict=False):
            path = list(places[start:end])
            assert batch.tokens_T[path].tolist() == samples[index].token_ids.tolist()
            assert batch.positions_T[path].tolist() == [*range(len(path))]
            assert path[-count:] == [*range(path[-1] - count + 1, path[-1] + 1)]


def test_replayed_experts_that_differ_end_what_is_shared():
    prompt, experts = (1, 2, 3, 4), np.zeros((5, 2, 1), np.int16)
    other = experts.copy()
    other[2] = 1
    samples = [
        replace(sample_of("rollout", "p", prompt, (end, 6)), routed_experts=routed)
        for end, routed in enumerate((experts, experts, other))
    ]
    (batch,) = pack(
        samples, weights_of(samples), max_tokens=64, routing=(2, 1), share_prefixes=True
    )
    assert batch.cu_seqlens.diff().tolist() == [6, 2, 4]
    places = batch.key_places_K.split(batch.cu_seqlens_keys.diff().tolist())
    for path, sample in zip(places, samples, strict=True):
        found = batch.routed_experts_TYX[path]
        assert found[:5].tolist() == sample.routed_experts.tolist()
        assert (found[5:] == -1).all()


def test_the_samples_of_a_prompt_go_to_one_part_unless_they_cost_too_much():
    prompt_B, first_B = np.array([0, 1, 0, 1, 2, 2, 2, 2]), np.ones(8, np.bool_)
    costs_B = np.array([2.0, 1, 2, 1, 4, 4, 4, 4])
    shares = partition(costs_B, 2, first_B, prompt_B)
    parts = {index: part for part, share in enumerate(shares) for index in share}
    assert (parts[0], parts[1]) == (parts[2], parts[3])
    assert sum(parts[index] for index in range(4, 8)) == 2


def test_sequences_are_whole_and_padding_is_a_sequence_of_its_own():
    samples, weights = make_samples(9)
    for batch in pack(samples, weights, max_tokens=50, pad_to_multiple=8):
        bounds = batch.cu_seqlens.tolist()
        assert batch.cu_seqlens.dtype == torch.int32
        assert bounds[0] == 0
        assert bounds[-1] == len(batch.tokens_T)
        lengths = np.diff(bounds)
        assert batch.max_seqlen == lengths.max()
        positions = np.concatenate([np.arange(n) for n in lengths])
        assert batch.positions_T.tolist() == positions.tolist()
        used = {int(i): len(samples[i].token_ids) for i in batch.sample_index_N.unique()}
        padding = len(batch.tokens_T) - sum(used.values())
        assert sorted(lengths) == sorted([*used.values()] + [padding] * (padding > 0))
        if padding:
            assert lengths[-1] == padding
            assert (batch.rows_N < bounds[-2]).all()


def test_all_ranks_get_the_same_number_of_micro_batches_some_of_them_empty():
    samples, weights = make_samples(3, longest=4)
    ranks = [
        pack_share(samples, weights, r, 4, max_tokens=8, microbatch_multiple=2) for r in range(4)
    ]
    assert {len(batches) for batches in ranks} == {2}
    empty = ranks[3][0]
    assert len(empty.rows_N) == 0
    assert empty.tokens_T.tolist() == [0]
    assert empty.cu_seqlens.tolist() == [0, 1]


def test_samples_that_no_model_scores_have_micro_batches_of_their_own():
    samples, weights = make_samples(9)
    samples = [
        replace(sample, off_policy=True) if index == 4 else sample
        for index, sample in enumerate(samples)
    ]
    batches = pack(samples, weights, max_tokens=50, microbatch_multiple=2)
    flags = [batch.is_scored for batch in batches]
    assert flags == sorted(flags, reverse=True), "the scored ones come first"
    assert flags.count(True) % 2 == flags.count(False) % 2 == 0
    for scored in (True, False):
        packed = {
            i
            for batch in batches
            if batch.is_scored == scored
            for i in batch.sample_index_N.tolist()
        }
        expected = {i for i, sample in enumerate(samples) if sample.is_scored == scored}
        assert packed == expected
        assert packed


def test_every_micro_batch_has_given_advantages_if_one_sample_has():
    samples, weights = make_samples(4)
    given = replace(weights, advantage_B=np.array([0.5, 0, 0, 0]))
    for batch in pack(samples, given, max_tokens=20):
        assert torch.equal(batch.given_advantage_N, 0.5 * (batch.sample_index_N == 0))
    plain = pack(samples, weights, max_tokens=20)
    assert all(batch.given_advantage_N is None for batch in plain)


@pytest.mark.parametrize("count", [0, 5])  # without samples there is one empty micro-batch
def test_types_are_the_models_also_without_samples(count):
    samples, weights = make_samples(count)
    weights = replace(weights, advantage_B=weights.pg_B)
    batch, *rest = pack(samples, weights, max_tokens=999)
    assert len(rest) == (count > 0)
    tensors = {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}
    assert tensors["golden_rows_G"].tolist() == tensors["golden_N"].nonzero()[:, 0].tolist()
    kinds = {name: value.dtype for name, value in tensors.items()}
    assert kinds.pop("cu_seqlens") == torch.int32
    flags = {"golden_N", "repetitive_N", "truncated_N"}
    assert {kinds.pop(name) for name in flags} == {torch.bool}
    floats = {"pg_weight_N", "kl_weight_N", "sft_weight_N", "rollout_logprob_N"}
    floats |= {"given_advantage_N"}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == floats
    assert {kind for name, kind in kinds.items() if name not in floats} == {torch.int64}


def test_the_padding_too_is_a_multiple_of_the_sequences():
    samples, weights = make_samples(1)
    (batch,) = pack(samples, weights, max_tokens=99, pad_to_multiple=6, sequence_multiple=4)
    assert len(batch.tokens_T) % 12 == 0
    assert not (np.diff(batch.cu_seqlens.tolist()) % 4).any()


def test_equal_lengths_keep_their_order():
    lengths = np.random.default_rng(0).integers(1, 4, 400)
    (order,) = partition(lengths, 1)
    assert order == sorted(range(400), key=lambda index: (-lengths[index], index))


def test_a_long_sequence_weighs_as_much_as_its_attention_costs():
    """By tokens the one of 8 would lie with another of 2: 10 against 10."""
    lengths = np.array([8, 2, 2, 2, 2, 2, 2])
    assert sorted(map(sorted, partition(lengths * (1 + lengths / 4), 2))) == [[0], [*range(1, 7)]]


def test_the_sequences_of_either_kind_are_balanced():
    """By total cost both of 4 would lie together, and the other rank would score nothing."""
    costs_B = np.array([5.0, 4, 4, 3, 2])
    assert partition(costs_B, 2) == [[0, 3, 4], [1, 2]]
    assert partition(costs_B, 2, costs_B == 4) == [[1, 0], [2, 3, 4]]


def test_ranks_multiply_equally_over_long_tailed_and_real_lengths():
    """64 prompts x 8 responses up to 32k tokens; Qwen2.5-Math-1.5B's attention is the costliest."""
    values = np.random.default_rng(0).lognormal(np.log(4000), 0.8, 512)
    rows = real_data("generations/qwen2.5-math-7b-base_greedy.jsonl").read_text().splitlines()
    answers = [json.loads(row) for row in rows]
    # Three characters a token, as in these answers.
    real = np.array([len(row["problem"] + row["response"]) // 3 for row in answers])
    assert len(real) == 310
    for lengths in (np.minimum(values, 32768).astype(np.int64), real):
        costs_B = costs(lengths, attention_length=30464)
        for data_size in (2, 4, 8, 16, 32):
            shares = partition(costs_B, data_size)
            assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
            loads = [costs_B[share].sum() for share in shares]
            assert max(loads) / (costs_B.sum() / data_size) < 1.03


def test_levelled_micro_batches_hold_the_same_sequences_and_cost_about_the_same():
    for seed, more in itertools.product(range(20), (0, 2)):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 40, 30)
        lengths[0] = 70  # longer than a micro-batch
        costs_B = costs(lengths, 20)
        bins = fill(lengths, range(30), 64)
        count = len(bins) + more
        found = level(lengths, costs_B, bins, count, 64)
        assert len(found) == count
        assert sorted(i for members in found for i in members) == list(range(30))
        assert all(lengths[members].sum() <= 64 or members == [0] for members in found)
        highest = [max(costs_B[one].sum() for one in plan) for plan in (found, bins)]
        assert highest[0] <= highest[1]


def packed(lengths: list[int], **options) -> list[list[int]]:
    """The samples of each micro-batch; a sample has one prompt token."""
    samples = [
        sample_of("rollout", f"p:{i}", (1,), (2,) * (n - 1), [True] * (n - 1))
        for i, n in enumerate(lengths)
    ]
    batches = pack(samples, weights_of(samples), max_tokens=16, **options)
    for batch in batches:
        assert (np.diff(batch.cu_seqlens.tolist()) > 0).all(), "no sequence is empty"
    return [sorted(set(batch.sample_index_N.tolist())) for batch in batches]


def test_micro_batches_are_balanced_by_attention_and_filling_tokens():
    assert costs(np.array([5, 8]), 10.0).tolist() == [7.5, 14.4]
    assert costs(np.array([5, 8]), 10.0, 4).tolist() == [14.4, 14.4]
    assert costs(np.array([8]), 10.0, 1, np.array([3])).tolist() == [10.5]
    assert packed([8, 4, 4, 4, 4]) == [[0, 3], [1, 2, 4]]
    assert packed([8, 4, 4, 4, 4], attention_length=1) == [[0], [1, 2, 3, 4]]
    assert packed([2, 11, 4, 6]) == [[1], [0, 2, 3]]
    assert packed([2, 11, 4, 6], sequence_multiple=4) == [[1, 2], [0, 3]]


def test_the_longest_sequences_are_placed_first():
    """The other way round takes three micro-batches: 6 + 6, 10 and 10."""
    assert len(packed([6, 6, 10, 10])) == 2
    assert packed([4] * 40)[0] == [0, 10, 20, 30]  # equal ones in their order


def test_levelling_goes_by_cost_and_uses_all_the_room():
    assert level(np.array([2, 2, 2, 6]), np.array([2, 2, 2, 6]), [[0, 1], [2, 3]], 2, 16) == [
        [3],
        [0, 1, 2],
    ]
    lengths = np.array([9, 4, 4])
    assert level(lengths, lengths, [[2, 1], [0]], 2, 8) == [[0], [2, 1]]


def test_bins_that_cannot_be_levelled_stay_as_they_are():
    """`level` puts the two 4s into different bins; no bin then has room for the last 3."""
    lengths = np.array([4, 4, 3, 3, 3])
    bins = [[0, 1], [2, 3, 4]]
    assert level(lengths, lengths, bins, 2, 9) == bins
    assert level(lengths, lengths, bins, 3, 9) == [[0, 4], [1], [2, 3]]


def test_sequences_fill_a_micro_batch_to_its_last_token():
    assert fill(np.array([5, 4, 3, 2, 1]), range(5), 6) == [[0, 4], [1, 3], [2]]


@pytest.mark.parametrize("context_size", [1, 2])
def test_experts_of_the_engine_lie_at_the_tokens_they_were_chosen_for(context_size):
    """In the whole micro-batch and in its slices; a golden solution has none."""
    samples, weights = make_samples(9)
    lengths = [len(sample.token_ids) for sample in samples]
    samples = [
        sample
        if sample.kind == "golden"
        else replace(sample, routed_experts=experts_of(np.arange(length - 1), index))
        for index, (sample, length) in enumerate(zip(samples, lengths, strict=True))
    ]
    batches, seen = pack_whole(samples, weights, context_size), 0
    for batch, rank in itertools.product(batches, range(context_size)):
        mine = slice_microbatch(batch, rank, context_size)
        assert mine.routed_experts_TYX is not None
        assert mine.routed_experts_TYX.dtype == torch.int16
        for row, token in enumerate(mine.rows_N.tolist()):
            index, place = int(mine.sample_index_N[row]), int(mine.positions_T[token])
            is_golden = samples[index].kind == "golden"
            expected = np.full((2, 3), -1) if is_golden else experts_of(np.array([place]), index)[0]
            assert (mine.routed_experts_TYX[token].numpy() == expected).all()
            seen += not is_golden
    assert seen > 50


def experts_of(positions, sample_index):
    """[positions, 2 layers, 3 experts]: numbers that name position and sample."""
    return (positions[:, None, None] * 100 + sample_index * 6 + np.arange(6).reshape(2, 3)).astype(
        np.int16
    )


def pack_whole(samples, weights, context_size):
    multiple = 2 * context_size if context_size > 1 else 1
    return pack(samples, weights, sequence_multiple=multiple, max_tokens=10_000, routing=(2, 3))


def test_prompts_are_split_evenly_with_all_their_samples():
    sample = make_samples(1)[0][0]
    facts = facts_of([replace(sample, prompt_id=name) for name in "cabcabd"])
    facts = replace(facts, slot_B=facts.slot_B[::-1] * 7)  # numbers in another order
    split = split_by_prompt(facts, 3)
    assert [part.tolist() for part in split] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [part.tolist() for part in split_by_prompt(facts.select(np.s_[:1]), 3)] == [[0]]
