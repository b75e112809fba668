"""The engine that a config names."""

import contextlib

import pytest

from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.records import Prompt
from stable_opd_mcore.rollout.build_engine import build_engine, training_sampling
from stable_opd_mcore.rollout.embedded import EmbeddedEngine
from tests.config.cases import run_with
from tests.train.runs import tiny_config


def config(**rollout):
    return run_with(
        objective={"name": "grpo"},
        sampling={"temperature": 0.9, "top_p": 0.8, "max_new_tokens": 12},
        train={"seed": 3},
        rollout={"samples_per_prompt": 2} | rollout,
    )


def test_the_embedded_engine_uses_the_tokenizer(tiny_path, world):
    tokenizer = Tokenizer.load("synthetic")
    chunks = build_model(read_architecture(tiny_path), world)
    settings = config()
    engine = build_engine(settings, world, chunks, tokenizer)
    assert isinstance(engine, EmbeddedEngine)
    sampling = training_sampling(settings, (1,))
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.9, 0.8, 12)
    assert (sampling.num_samples, sampling.seed, sampling.stop_token_ids) == (2, 3, (1,))
    prompt = Prompt("p", "1+2", tuple(tokenizer.encode("1+2")))
    for rollout in engine.generate([prompt], sampling, step=0):
        assert max(rollout.token_ids) < tokenizer.vocab_size
        stopped = rollout.finish_reason == "stop"
        ids = rollout.token_ids[:-1] if stopped else rollout.token_ids
        assert rollout.text == tokenizer.decode(ids)


def test_a_replay_is_of_a_run_that_sampled_alike_for_as_many_steps(tmp_path, world):
    rollout = {"engine": "replay", "replay_from": str(tmp_path)}
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step_000001.jsonl").touch()
    save_config(tiny_config(tmp_path, "stored"), tmp_path / "config.resolved.yaml")
    for changed, reason in (
        ({}, None),
        ({"train": {"steps": 2}}, r"step 2 was not stored.*\(it has 1\)"),
        ({"sampling": {"temperature": 2.0}}, r"temperature=2.0, but .* sampled with 1.0"),
    ):
        settings = tiny_config(tmp_path, "x", **{"train": {"steps": 1}, **changed}, rollout=rollout)
        with pytest.raises(UserError, match=reason) if reason else contextlib.nullcontext():
            build_engine(settings, world, [], Tokenizer.load("synthetic"))
