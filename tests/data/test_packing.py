"""Packing: every token once, on the right row, the same plan on every rank."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from stable_opd_mcore.data.packing import _length, fill, level, pack, partition
from stable_opd_mcore.records import Sample, TokenWeights


def make_samples(count, seed=0, longest=30):
    rng = random.Random(seed)
    samples, weights = [], []
    for index in range(count):
        prompt = tuple(rng.randrange(1, 50) for _ in range(rng.randint(1, 9)))
        response = tuple(rng.randrange(1, 50) for _ in range(rng.randint(1, longest)))
        n = len(response)
        is_golden = index % 4 == 3
        samples.append(
            Sample(
                source="golden" if is_golden else "rollout",
                prompt_id=f"p:{index}",
                prompt_token_ids=prompt,
                response_token_ids=response,
                trained=(True,) * n,
                rollout_logprobs=None if is_golden else tuple(-rng.random() for _ in range(n)),
                repetitive=None if is_golden else tuple(rng.random() < 0.3 for _ in range(n)),
            )
        )
        weights.append(
            TokenWeights(
                pg=tuple(rng.random() for _ in range(n)),
                kl=tuple(rng.random() for _ in range(n)),
                sft=tuple(rng.random() for _ in range(n)),
            )
        )
    return samples, weights


@pytest.mark.parametrize("data_size", [1, 3])
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_response_token_is_predicted_by_the_token_before_it(data_size, multiple):
    samples, weights = make_samples(17)
    seen = {}
    for rank in range(data_size):
        for batch in pack(
            samples,
            weights,
            max_tokens=64,
            data_rank=rank,
            data_size=data_size,
            pad_to_multiple=multiple,
        ):
            assert len(batch.tokens_T) % multiple == 0
            for row in range(len(batch.rows_N)):
                index = int(batch.sample_index_N[row])
                token = int(batch.token_index_N[row])
                key = (index, token)
                assert key not in seen
                seen[key] = True
                sample, place = samples[index], int(batch.rows_N[row])
                whole = sample.prompt_token_ids + sample.response_token_ids
                here = len(sample.prompt_token_ids) - 1 + token
                assert int(batch.tokens_T[place]) == whole[here]
                assert int(batch.positions_T[place]) == here
                assert int(batch.targets_N[row]) == whole[here + 1]
                for name in ("pg", "kl", "sft"):
                    packed = float(getattr(batch, f"{name}_weight_N")[row])
                    assert packed == pytest.approx(getattr(weights[index], name)[token])
                if sample.rollout_logprobs is None:
                    assert float(batch.rollout_logprob_N[row]) == 0
                    assert not bool(batch.repetitive_N[row])
                else:
                    expected = sample.rollout_logprobs[token]
                    assert float(batch.rollout_logprob_N[row]) == pytest.approx(expected)
                    assert bool(batch.repetitive_N[row]) == sample.repetitive[token]
    assert len(seen) == sum(len(sample.response_token_ids) for sample in samples)


def test_sequences_are_whole_and_padding_is_a_sequence_of_its_own():
    samples, weights = make_samples(9)
    for batch in pack(samples, weights, max_tokens=50, data_rank=0, data_size=1, pad_to_multiple=8):
        bounds = batch.cu_seqlens.tolist()
        assert batch.cu_seqlens.dtype == torch.int32
        assert bounds[0] == 0
        assert bounds[-1] == len(batch.tokens_T)
        lengths = np.diff(bounds)
        assert batch.max_seqlen == lengths.max()
        positions = np.concatenate([np.arange(n) for n in lengths])
        assert batch.positions_T.tolist() == positions.tolist()
        used = {
            int(i): len(samples[i].prompt_token_ids) + len(samples[i].response_token_ids)
            for i in batch.sample_index_N.unique()
        }
        padding = len(batch.tokens_T) - sum(used.values())
        assert sorted(lengths) == sorted([*used.values()] + [padding] * (padding > 0))
        if padding:
            assert lengths[-1] == padding
            assert (batch.rows_N < bounds[-2]).all()


def test_all_ranks_get_the_same_number_of_micro_batches_some_of_them_empty():
    samples, weights = make_samples(3, longest=4)
    ranks = [
        pack(samples, weights, max_tokens=8, data_rank=r, data_size=4, microbatch_multiple=2)
        for r in range(4)
    ]
    assert {len(batches) for batches in ranks} == {2}
    empty = ranks[3][0]
    assert len(empty.rows_N) == 0
    assert empty.tokens_T.tolist() == [0]
    assert empty.cu_seqlens.tolist() == [0, 1]


def test_no_samples_still_give_one_empty_micro_batch():
    (batch,) = pack([], [], max_tokens=8, data_rank=0, data_size=1, pad_to_multiple=4)
    assert len(batch.rows_N) == 0
    assert len(batch.tokens_T) == 4


def test_only_a_sequence_longer_than_a_micro_batch_exceeds_max_tokens():
    samples, weights = make_samples(20, longest=40)
    for batch in pack(samples, weights, max_tokens=30, data_rank=0, data_size=1):
        assert len(batch.tokens_T) <= 30 or len(batch.sample_index_N.unique()) == 1


def test_partition_balances_tokens():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, 64)
    loads = [lengths[share].sum() for share in partition(lengths, 4)]
    # Longest-first greedy is within the shortest items of the even split.
    assert max(loads) - min(loads) <= lengths.min() + lengths.max() // 8
    assert sorted(i for share in partition(lengths, 4) for i in share) == list(range(64))


def test_every_micro_batch_has_given_advantages_if_one_sample_has():
    samples, weights = make_samples(4)
    first = weights[0]
    weights[0] = TokenWeights(
        first.pg, first.kl, first.sft, advantage=tuple(float(k) for k in range(len(first.pg)))
    )
    batches = pack(samples, weights, max_tokens=20, data_rank=0, data_size=1)
    for batch in batches:
        expected = torch.where(batch.sample_index_N == 0, batch.token_index_N, 0).float()
        assert torch.equal(batch.given_advantage_N, expected)
    plain = pack(samples[1:], weights[1:], max_tokens=20, data_rank=0, data_size=1)
    assert all(batch.given_advantage_N is None for batch in plain)


@pytest.mark.parametrize(
    "name", ["trained", "rollout_logprobs", "repetitive", "pg", "kl", "sft", "advantage"]
)
def test_wrong_lengths_are_refused_with_both_numbers(name):
    samples, weights = make_samples(2)
    holder = samples if hasattr(samples[1], name) else weights
    holder[1] = replace(holder[1], **{name: (1.0,)})
    count = len(samples[1].response_token_ids)
    expected = rf"sample 1 \(p:1\) has 1 values of {name} for {count} response tokens$"
    with pytest.raises(ValueError, match=expected):
        pack(samples, weights, max_tokens=64, data_rank=0, data_size=1)


def test_empty_prompts_and_missing_weights_are_refused():
    samples, weights = make_samples(2)
    with pytest.raises(ValueError, match="shorter"):
        pack(samples, weights[:1], max_tokens=64, data_rank=0, data_size=1)
    samples[1] = replace(samples[1], prompt_token_ids=())
    with pytest.raises(
        ValueError, match=r"^sample 1 \(p:1\) has an empty prompt: nothing predicts"
    ):
        pack(samples, weights, max_tokens=64, data_rank=0, data_size=1)


@pytest.mark.parametrize("count", [0, 3])
def test_types_and_device_are_the_models_also_without_samples(count):
    samples, weights = make_samples(count)
    weights = [replace(weight, advantage=weight.pg) for weight in weights]
    (batch,) = pack(samples, weights, max_tokens=999, data_rank=0, data_size=1, device="meta")
    tensors = {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}
    assert {value.device.type for value in tensors.values()} == {"meta"}
    kinds = {name: value.dtype for name, value in tensors.items()}
    assert kinds.pop("cu_seqlens") == torch.int32
    assert kinds.pop("repetitive_N") == torch.bool
    floats = {"pg_weight_N", "kl_weight_N", "sft_weight_N", "rollout_logprob_N"}
    floats |= {"given_advantage_N"} if count else set()
    assert {name for name, kind in kinds.items() if kind == torch.float32} == floats
    assert {kind for name, kind in kinds.items() if name not in floats} == {torch.int64}


def test_the_padding_too_is_a_multiple_of_the_sequences():
    samples, weights = make_samples(1)
    (batch,) = pack(
        samples,
        weights,
        max_tokens=99,
        data_rank=0,
        data_size=1,
        pad_to_multiple=6,
        sequence_multiple=4,
    )
    assert len(batch.tokens_T) % 12 == 0
    assert not (np.diff(batch.cu_seqlens.tolist()) % 4).any()


def test_equal_lengths_keep_their_order():
    lengths = np.random.default_rng(0).integers(1, 4, 400)
    (order,) = partition(lengths, 1)
    assert order == sorted(range(400), key=lambda index: (-lengths[index], index))


def test_a_long_sequence_weighs_as_much_as_its_attention_costs():
    """By tokens alone the one of 8 would lie with another of 2: 10 against 10."""
    lengths = np.array([8, 2, 2, 2, 2, 2, 2])
    assert sorted(map(sorted, partition(lengths * (1 + lengths / 4), 2))) == [[0], [*range(1, 7)]]
    samples, weights = make_samples(30, longest=60)

    def shares(attention_length: float) -> list[set[int]]:
        found = []
        for rank in range(2):
            batches = pack(
                samples,
                weights,
                max_tokens=64,
                data_rank=rank,
                data_size=2,
                attention_length=attention_length,
            )
            found.append({int(i) for batch in batches for i in batch.sample_index_N})
        return found

    whole, short = shares(float("inf")), shares(5.0)
    assert set.union(*whole) == set.union(*short) == set(range(30))
    tokens, squares = (
        [sum(_length(samples[i]) ** power for i in share) for share in short] for power in (1, 2)
    )
    costs = [a + b / 5.0 for a, b in zip(tokens, squares, strict=True)]
    assert abs(costs[0] - costs[1]) < 0.02 * sum(costs)


@pytest.mark.parametrize("seed", range(20))
def test_levelled_micro_batches_hold_the_same_sequences_and_cost_about_the_same(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 40, 30)
    lengths[0] = 70  # longer than a micro-batch
    costs = lengths * (1 + lengths / 20)
    bins = fill(lengths, range(30), 64)
    for count in (len(bins), len(bins) + 2):
        found = level(lengths, costs, bins, count, 64)
        assert len(found) == count
        assert sorted(i for members in found for i in members) == list(range(30))
        assert all(lengths[members].sum() <= 64 or members == [0] for members in found)

        def highest(plan):
            return max(costs[members].sum() for members in plan)

        assert highest(found) <= highest(bins)


def test_bins_that_cannot_be_levelled_stay_as_they_are():
    """`level` puts the two 4s into different bins; no bin then has room for the last 3."""
    lengths = np.array([4, 4, 3, 3, 3])
    bins = [[0, 1], [2, 3, 4]]
    assert level(lengths, lengths, bins, 2, 9) == bins
    assert level(lengths, lengths, bins, 3, 9) == [[0, 4], [1], [2, 3]]


def test_sequences_fill_a_micro_batch_to_its_last_token():
    assert fill(np.array([5, 4, 3, 2, 1]), range(5), 6) == [[0, 4], [1, 3], [2]]
