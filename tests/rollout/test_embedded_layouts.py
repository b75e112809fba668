"""Rollouts and scores are the same on every tensor x pipeline layout."""

from collections import ChainMap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import load_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.scoring.megatron import MegatronScorer
from tests.models.tiny import microbatch
from tests.parallel.launch import run_ranks
from tests.rollout.tiny import (
    VOCAB,
    Talk,
    build_engine,
    make_prompts,
    sample_in_pieces,
    save_tiny,
)

pytestmark = pytest.mark.slow

LAYOUTS = {
    "dp4": {},
    "tp2_sp": {"tensor": 2, "sequence": True},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
}
SAMPLINGS = (
    Sampling(max_new_tokens=12, num_samples=2, stop_token_ids=(4, 9), seed=5),
    Sampling(temperature=0.7, top_p=0.9, max_new_tokens=6),
    Sampling(temperature=0, max_new_tokens=6),
)
BATCHES = [microbatch([8, 12]), microbatch([6, 4], seed=1)]
BATCHES = [replace(b, tokens_T=b.tokens_T % VOCAB, targets_N=b.targets_N % VOCAB) for b in BATCHES]


def run_layouts(rank: int, world_size: int, model: Path, results: Path) -> None:
    for name, layout in LAYOUTS.items():
        world = start_world(ParallelConfig(**layout), seed=0)
        engine = build_engine(model, world)
        prompts = make_prompts(4)[world.data_rank :: world.data_size]
        rollouts = {
            (number, rollout.prompt.prompt_id, rollout.sample_index): rollout
            for number, sampling in enumerate(SAMPLINGS)
            for rollout in engine.generate(prompts, sampling, step=2)
        }
        ahead = replace(engine, max_staleness=2, partial=True)
        for rollout in sample_in_pieces(ahead, prompts, SAMPLINGS[0], step=2):
            rollouts["pieces", rollout.prompt.prompt_id, rollout.sample_index] = rollout
        talking = replace(engine, interaction=Talk())
        told = [replace(prompt, environment="") for prompt in prompts]
        for rollout in talking.generate(told, SAMPLINGS[0], step=2):
            rollouts["turns", rollout.prompt.prompt_id, rollout.sample_index] = rollout
        chunks = build_model(read_architecture(model), world, trainable=False)
        load_hf(chunks, model)
        teacher, alone = (
            MegatronScorer(chunks, world, vocab_size=VOCAB, temperature=0.7, **asked)
            for asked in ({"top_k": 4}, {"hidden_only": True})
        )
        scores = [
            (said.topk_ids_NK, said.logprob_N, said.topk_logprobs_NK, states.hidden_NH)
            for said, states in zip(teacher.score(BATCHES), alone.score(BATCHES), strict=True)
        ]
        assert bool(scores) == world.is_last_stage
        torch.save((world.data_rank, rollouts, scores), results / f"{name}_{rank}.pt")
        stop_world()


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text"])
def test_rollouts_and_scores_do_not_depend_on_the_layout(tmp_path, family):
    model = save_tiny(tmp_path / "model", family)
    rounding = 1e-5 if family == "qwen2" else 5e-4  # it grows in normalised keys
    run_ranks(4, run_layouts, model, tmp_path)
    found = {
        name: [torch.load(tmp_path / f"{name}_{rank}.pt", weights_only=False) for rank in range(4)]
        for name in LAYOUTS
    }
    # The unsharded ranks of dp4 together hold every prompt: they are what the others must say.
    expected = ChainMap(*(rollouts for _, rollouts, _ in found["dp4"]))
    assert len(expected) == 4 * 8
    assert max(len(rollout.turns) for rollout in expected.values()) == 3
    assert max(len(rollout.segments) for rollout in expected.values()) == 3
    assert {rollout.finish_reason for rollout in expected.values()} == {"stop", "length"}
    expected_scores = found["dp4"][0][2]
    for name, ranks in found.items():
        replicas: dict[int, dict] = {}
        for replica, rollouts, scores in ranks:
            # Ranks of one replica return the same, log-probabilities included.
            assert replicas.setdefault(replica, rollouts) == rollouts, name
            for key, rollout in rollouts.items():
                other = expected[key]
                np.testing.assert_allclose(
                    rollout.rollout_logprobs, other.rollout_logprobs, atol=rounding, rtol=0
                )
                assert rollout == replace(other, rollout_logprobs=rollout.rollout_logprobs)
            for ours, theirs in zip(scores, expected_scores, strict=False):
                assert torch.equal(ours[0], theirs[0]), name
                torch.testing.assert_close(ours[1:], theirs[1:], atol=rounding, rtol=rounding)
        assert ChainMap(*replicas.values()).keys() == expected.keys(), name
