"""The Megatron scorer, on packed micro-batches, gives the scores that transformers computes."""

import pytest
import torch
from transformers import Qwen2ForCausalLM

from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import load_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.scoring.megatron import MegatronScorer
from tests.models import tiny
from tests.models.tiny import VOCAB_SIZE, microbatch

PADDED = VOCAB_SIZE + 11  # embedding rows of the teacher
BATCHES = [microbatch([7, 12, 3]), microbatch([20], seed=1), microbatch([1], seed=2)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    changes = {"vocab_size": PADDED, "tie_word_embeddings": True, "initializer_range": 0.2}
    directory = tmp_path_factory.mktemp("teacher")
    tiny.transformer(tiny.config("qwen2", **changes), seed=2).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def chunks(path, world):
    chunks = build_model(read_architecture(path), world, trainable=False)
    load_hf(chunks, path)
    return chunks


@pytest.fixture(scope="module")
def expected(path):
    """Per micro-batch: logits [N, V] of the common vocabulary, and hidden states [N, H]."""
    model = Qwen2ForCausalLM.from_pretrained(path).eval()
    results = []
    for batch in BATCHES:
        logits, hidden = [], []
        for start, stop in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
            with torch.no_grad():
                out = model(batch.tokens_T[start:stop][None], output_hidden_states=True)
            logits.append(out.logits[0, :, :VOCAB_SIZE])
            hidden.append(out.hidden_states[-1][0])
        rows = batch.rows_N
        results.append((torch.cat(logits)[rows], torch.cat(hidden)[rows]))
    return results


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_the_common_vocabulary(chunks, world, expected, temperature):
    model = MegatronScorer(chunks, world, vocab_size=VOCAB_SIZE, temperature=temperature, top_k=5)
    scores = model.score(BATCHES)
    assert len(scores) == len(BATCHES)
    for batch, score, (logits, _) in zip(BATCHES, scores, expected, strict=True):
        logprobs = torch.log_softmax(logits / temperature, 1)
        sampled = logprobs.gather(1, batch.targets_N[:, None])[:, 0]
        assert torch.allclose(score.logprob_N, sampled, atol=1e-5)
        entropy = -(logprobs.exp() * logprobs).sum(1)
        assert torch.allclose(score.entropy_N, entropy, atol=1e-5)
        top = logprobs.topk(5, dim=1)
        assert torch.equal(score.topk_ids_NK, top.indices)
        assert torch.allclose(score.topk_logprobs_NK, top.values, atol=1e-5)
        assert score.hidden_NH is None


def test_stop_token_has_the_logprob_of_all_stop_ids(chunks, world, expected):
    stop_ids = (3, 5, 8)
    model = MegatronScorer(chunks, world, vocab_size=VOCAB_SIZE, stop_ids=stop_ids)
    num_stops = 0
    for batch, score, (logits, _) in zip(BATCHES, model.score(BATCHES), expected, strict=True):
        assert score.hidden_NH is None
        assert score.topk_ids_NK is None
        logprobs = torch.log_softmax(logits, 1)
        is_stop = torch.isin(batch.targets_N, torch.tensor(stop_ids))
        sampled = logprobs.gather(1, batch.targets_N[:, None])[:, 0]
        wanted = torch.where(is_stop, logprobs[:, list(stop_ids)].logsumexp(1), sampled)
        assert torch.allclose(score.logprob_N, wanted, atol=1e-5)
        assert torch.allclose(score.token_logprob_N, sampled, atol=1e-5)
        num_stops += int(is_stop.sum())
    assert num_stops


def test_teacher_with_a_smaller_vocabulary_is_refused(chunks, world):
    with pytest.raises(ValueError, match=f"{PADDED} vocabulary entries, fewer than the 4096"):
        MegatronScorer(chunks, world, vocab_size=4096)
