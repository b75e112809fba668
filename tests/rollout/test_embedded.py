"""The embedded engine against transformers, and against itself in other batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GptOssForCausalLM, Qwen2ForCausalLM, Qwen3_5ForCausalLM

from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.data.rollout_files import read_rollouts, write_rollouts
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import load_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.records import Prompt, Rollout, Sampling, Segment
from stable_opd_mcore.rollout.embedded import EmbeddedEngine
from stable_opd_mcore.scoring.megatron import MegatronScorer
from tests.rollout.tiny import (
    VOCAB,
    Talk,
    build_engine,
    decode,
    make_prompts,
    sample_in_pieces,
    save_tiny,
)
from tests.shares import weights_of


@pytest.fixture(scope="module")
def engine(tiny_path, world):
    return build_engine(tiny_path, world)


@pytest.fixture(scope="module")
def transformer(tiny_path):
    return Qwen2ForCausalLM.from_pretrained(tiny_path).eval()


def full_forward_logits(transformer, rollout) -> torch.Tensor:
    """[response tokens, V]: logits that predict each response token, without any cache."""
    ids = torch.tensor([rollout.prompt.token_ids + tokens_of(rollout)])
    with torch.no_grad():
        logits = transformer(ids).logits[0].float()
    return logits[len(rollout.prompt.token_ids) - 1 : -1]


def tokens_of(rollout) -> tuple[int, ...]:
    return tuple(rollout.token_ids.tolist())


def assert_full_softmax(
    transformer, rollouts, temperature: float = 1.0, atol: float = 1e-5
) -> None:
    for rollout in rollouts:
        logprobs = torch.log_softmax(full_forward_logits(transformer, rollout) / temperature, 1)
        expected = logprobs.gather(1, torch.tensor(tokens_of(rollout))[:, None])[:, 0]
        assert torch.allclose(torch.tensor(rollout.rollout_logprobs), expected, atol=atol)


def test_greedy_is_the_argmax_of_the_full_forward(engine, transformer):
    rollouts = engine.generate(make_prompts(5), Sampling(temperature=0, max_new_tokens=30), step=0)
    for rollout in rollouts:
        best = full_forward_logits(transformer, rollout).argmax(1)
        assert best.tolist() == list(rollout.token_ids)
    assert_full_softmax(transformer, rollouts)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_logprobs_are_the_full_softmax_at_the_temperature(engine, transformer, temperature, top_p):
    sampling = Sampling(temperature, top_p, max_new_tokens=40, num_samples=3)
    rollouts = engine.generate(make_prompts(4), sampling, step=2)
    assert [(r.prompt.prompt_id, r.sample_index) for r in rollouts] == [
        (f"set:{i}", sample) for i in range(4) for sample in range(3)
    ]
    assert len({tokens_of(r) for r in rollouts}) == 12
    assert_full_softmax(transformer, rollouts, temperature)


@pytest.mark.parametrize(
    ("family", "model"), [("qwen3_5_text", Qwen3_5ForCausalLM), ("gpt_oss", GptOssForCausalLM)]
)
def test_states_sinks_and_sliding_windows_are_those_of_the_full_forward(
    tmp_path, world, family, model
):
    """Prompts of different lengths, a row for each sample; some rows end early."""
    path = save_tiny(tmp_path / "model", family)
    sampling = Sampling(max_new_tokens=70, num_samples=3, stop_token_ids=(4, 9))
    rollouts = build_engine(path, world).generate(make_prompts(5), sampling, step=2)
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 5
    assert_full_softmax(model.from_pretrained(path).eval(), rollouts, atol=2e-4)


def test_a_rollout_does_not_depend_on_the_other_rows(engine, tiny_path, world):
    prompts = make_prompts(6)
    sampling = Sampling(max_new_tokens=40, num_samples=2, stop_token_ids=(4, 9), seed=11)
    together = engine.generate(prompts, sampling, step=3)
    in_batches = build_engine(tiny_path, world, max_rows=5).generate(prompts, sampling, step=3)
    assert list(map(tokens_of, in_batches)) == list(map(tokens_of, together))
    for i in (0, 3, 5):
        alone = engine.generate([prompts[i]], sampling, step=3)
        expected = together[2 * i : 2 * i + 2]
        assert list(map(tokens_of, alone)) == list(map(tokens_of, expected))
    assert engine.generate(prompts, sampling, step=3) == together
    other_step = engine.generate(prompts, sampling, step=4)
    assert all(tokens_of(a) != tokens_of(b) for a, b in zip(together, other_step, strict=True))


def test_a_response_in_pieces_is_the_whole_one(engine, tiny_path, world):
    prompts = make_prompts(6)
    sampling = Sampling(max_new_tokens=20, num_samples=2, stop_token_ids=(4,), seed=11)
    whole = engine.generate(prompts, sampling, step=3)
    ahead = {"max_staleness": 2, "partial": True}
    cut = build_engine(tiny_path, world, max_rows=5, **ahead)
    pieces = sample_in_pieces(cut, prompts, sampling, step=3)
    for rollout, expected in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(
            rollout.rollout_logprobs, expected.rollout_logprobs, atol=1e-5, rtol=0
        )
        lengths = [7, 7, 6][: len(rollout.segments)]
        lengths[-1] = len(rollout.token_ids) - sum(lengths[:-1])
        assert rollout.segments == tuple(map(Segment, lengths, (3, 4, 5)))
        assert rollout == replace(
            expected,
            rollout_logprobs=rollout.rollout_logprobs,
            segments=rollout.segments,
            weight_version=3,
        )
    assert {len(rollout.segments) for rollout in pieces} == {1, 2, 3}

    cut.publish(3)
    cut.prefetch(prompts, sampling, step=3, weight_version=5)
    cut.drop_ahead()
    cut.publish(5)
    assert {r.weight_version for r in cut.generate(prompts, sampling, step=3)} == {5}


def test_whole_responses_are_handed_out_only_to_their_step(tiny_path, world):
    engine, fresh = (build_engine(tiny_path, world, max_staleness=1) for _ in range(2))
    prompts, sampling = make_prompts(3), Sampling(max_new_tokens=6, num_samples=2)
    expected = engine.generate(prompts, sampling, step=4)
    engine.prefetch(prompts, sampling, step=4, weight_version=1)
    with torch.no_grad():
        for parameter in (*engine._chunks[0].parameters(), *fresh._chunks[0].parameters()):
            parameter.mul_(0.7)
    for each in (engine, fresh):
        each.publish(1)
    engine.prefetch(prompts, sampling, step=4, weight_version=1)
    evaluated = replace(sampling, num_samples=1)
    now = fresh.generate(prompts, evaluated, step=4)
    assert engine.generate(prompts, evaluated, step=4) == now  # the current weights'
    assert engine.generate(prompts, sampling, step=4) == expected
    assert engine.generate(prompts, sampling, step=4) == fresh.generate(prompts, sampling, step=4)


TALK_PROMPTS = make_prompts(6, environment="")  # for which Talk is the environment
TALK = Sampling(0.8, max_new_tokens=9, num_samples=3, stop_token_ids=(4, 9), seed=2)


@pytest.fixture(scope="module")
def episodes(tiny_path, world) -> list[Rollout]:
    return build_engine(tiny_path, world, interaction=Talk()).generate(TALK_PROMPTS, TALK, step=1)


def test_every_turn_reads_its_context(episodes, transformer):
    """The log-probabilities of all turns are those of a full forward of their samples."""
    assert {turn.finish_reason for one in episodes for turn in one.turns} == {"stop", "length"}
    assert {(len(one.turns), one.finish_reason) for one in episodes} == {(3, "stop")}
    samples = rollout_samples(episodes)
    assert len(samples) == 6 * (1 + 2 + 1)
    for sample in samples:
        with torch.no_grad():
            logits = transformer(torch.tensor(sample.token_ids[None]).long()).logits[0].float()
        logprobs = torch.log_softmax(logits[sample.places - 1] / TALK.temperature, 1)
        sampled = torch.tensor(sample.token_ids[sample.places]).long()
        expected = logprobs.gather(1, sampled[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sample.rollout_logprobs), expected, atol=1e-5)


def test_turns_do_not_depend_on_the_other_rows_or_on_pieces(episodes, tiny_path, world):
    """Rows of a batch have contexts of different lengths and different numbers of tokens left. The
    limit of a turn may be the environment's own."""
    ahead = {"max_staleness": 2, "partial": True, "max_rows": 5}
    cut = build_engine(tiny_path, world, interaction=Talk(), **ahead)
    own_limit = [replace(prompt, max_new_tokens=9) for prompt in TALK_PROMPTS]
    pieces = sample_in_pieces(cut, own_limit, replace(TALK, max_new_tokens=30), step=1)
    assert max(len(one.segments) for one in pieces) == 3
    cut.publish(3)
    cut.prefetch(TALK_PROMPTS, TALK, step=1, weight_version=5)
    cut.drop_ahead()
    cut.publish(5)
    again = cut.generate(TALK_PROMPTS, TALK, step=1)
    assert {one.segments[0].weight_version for one in again} == {5}
    for one, expected in zip([*pieces, *again], [*episodes, *episodes], strict=True):
        np.testing.assert_allclose(one.rollout_logprobs, expected.rollout_logprobs, atol=1e-5)
        what = {"rollout_logprobs": expected.rollout_logprobs, "weight_version": 0}
        assert replace(one, segments=expected.segments, **what) == expected


def test_episodes_come_back_from_a_file(episodes, tmp_path):
    write_rollouts(tmp_path / "x.jsonl", episodes)
    assert read_rollouts(tmp_path / "x.jsonl") == episodes


def test_a_greedy_turn_is_the_greedy_response_to_its_context(engine, tiny_path, world):
    greedy = replace(TALK, temperature=0)
    talking = build_engine(tiny_path, world, interaction=Talk())
    for one in talking.generate(TALK_PROMPTS[:2], greedy, step=0):
        for sample in rollout_samples([one]):
            starts = sample.places[np.diff(sample.places, prepend=-1) > 1]
            contexts = [tuple(sample.token_ids[:start].tolist()) for start in starts]
            prompts = [Prompt(f"turn:{n}", "", context) for n, context in enumerate(contexts)]
            responses = engine.generate(prompts, replace(greedy, num_samples=1), step=0)
            alone = [token for response in responses for token in tokens_of(response)]
            assert alone == sample.token_ids[sample.places].tolist()


def test_rows_end_with_their_first_stop_token(engine):
    prompts = make_prompts(8)
    free = engine.generate(prompts, Sampling(max_new_tokens=20, num_samples=4), step=0)
    stops = (4, 9)
    rollouts = engine.generate(
        prompts, Sampling(max_new_tokens=20, num_samples=4, stop_token_ids=stops), step=0
    )
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for rollout, unstopped in zip(rollouts, free, strict=True):
        tokens = list(unstopped.token_ids)
        first = min((tokens.index(s) for s in stops if s in tokens), default=None)
        expected = tokens if first is None else tokens[: first + 1]
        assert list(rollout.token_ids) == expected
        assert len(rollout.rollout_logprobs) == len(expected)
        assert rollout.finish_reason == ("length" if first is None else "stop")
        assert rollout.text == decode(expected if first is None else expected[:-1])


def test_only_the_common_vocabulary_is_sampled(tiny_path, world):
    engine = build_engine(tiny_path, world, vocab_size=5)
    prompts = [Prompt("p", "", (1, 2, 3))]
    for temperature in (0.0, 3.0):
        sampling = Sampling(temperature, max_new_tokens=60, num_samples=4)
        for rollout in engine.generate(prompts, sampling, step=0):
            assert max(rollout.token_ids) < 5


@pytest.mark.parametrize(
    ("precision", "largest", "mean"), [("fp32", 1e-5, 1e-6), ("bf16", 0.3, 0.04)]
)
def test_the_trainer_agrees_with_the_rollouts(tiny_path, world, precision, largest, mean):
    chunks = build_model(read_architecture(tiny_path), world, precision=precision)
    load_hf(chunks, tiny_path)
    engine = EmbeddedEngine(chunks, world, decode, vocab_size=VOCAB, interaction=Talk())
    sampling = Sampling(0.8, max_new_tokens=25, num_samples=3, stop_token_ids=(4,))
    samples = rollout_samples(engine.generate(TALK_PROMPTS[:5], sampling, step=0))
    batches = pack(samples, weights_of(samples, 1, 1, 1), max_tokens=200)
    trainer = MegatronScorer(chunks, world, vocab_size=VOCAB, temperature=0.8)
    for batch, scores in zip(batches, trainer.score(batches), strict=True):
        # bf16: one unit of a logit of 8 is 0.06
        gap = (scores.logprob_N - batch.rollout_logprob_N).abs()
        assert gap.max() < largest
        assert gap.mean() < mean


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_path, world):
    with pytest.raises(ValueError, match=f"{VOCAB} vocabulary entries, fewer than the 99"):
        build_engine(tiny_path, world, vocab_size=99)
