"""Token values of known minibatches: each token gets its own, in order, of the kept rollouts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.token_files import read_tokens
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.records import Prompt, Rollout, Sample
from stable_opd_mcore.train.samples import token_values
from stable_opd_mcore.train.samples.sharing import Minibatch
from stable_opd_mcore.train.samples.token_values import (
    RolloutValues,
    TokenRecorder,
    write_token_values,
)
from tests.config.cases import run_with
from tests.shares import facts_of, sample_of, weights_of


def config(save: str = "all") -> Config:
    return run_with(rollout={"save": save})


def sample(length: int, kind: Any = "rollout") -> Sample:
    return sample_of(kind, "p", (1,), tuple(range(length)), (True,) * length)


def rollout(length: int) -> Rollout:
    return Rollout(Prompt("p", "", (1,)), 0, range(length), (0.0,) * length, "stop", 0)


def minibatch(*places: int) -> Minibatch:
    return Minibatch([], weights_of([]), np.array(places))


def results_of(rows: list[tuple[int, int, float]]) -> tuple[list[Any], list[Any]]:
    """A micro-batch of (sample, token, advantage) rows and its loss, with teacher values only."""
    samples, tokens, advantages = zip(*rows, strict=True)
    advantage_N = torch.tensor(advantages)
    output = SimpleNamespace(
        advantage_N=advantage_N,
        teacher_logprob_N=-advantage_N,
        kl_reference_N=torch.zeros(len(rows)),
        kl_teacher_N=advantage_N + 1,
    )
    batch = SimpleNamespace(
        sample_index_N=torch.tensor(samples), token_index_N=torch.tensor(tokens)
    )
    return [batch], [output]


def test_each_token_of_the_first_rollouts_has_its_value(world, monkeypatch):
    monkeypatch.setattr(token_values, "NUM_ROLLOUTS", 2)
    first, second, third, golden = sample(3), sample(2), sample(2), sample(2, "golden")
    values = TokenRecorder(config(), facts_of([first, second, third, golden]))
    # The minibatches hold the samples in another order, and their tokens too.
    values.record(minibatch(2, 1), *results_of([(1, 1, 0.5), (0, 0, 9.0), (1, 0, 0.25)]))
    values.record(minibatch(3, 0), *results_of([(1, 2, 3.0), (0, 0, 9.0), (1, 0, 1.0)]))
    rollouts = [rollout(3), rollout(2), rollout(2)]
    found = values.gather(world, rollouts)
    assert [each.rollout for each in found] == rollouts[:2]
    assert [each.values for each in found] == [
        {
            "advantage": [1.0, None, 3.0],
            "teacher_logprob": [-1.0, None, -3.0],
            "kl_teacher": [2.0, None, 4.0],
        },
        {"advantage": [0.25, 0.5], "teacher_logprob": [-0.25, -0.5], "kl_teacher": [1.25, 1.5]},
    ]


def test_a_rollout_has_the_values_of_all_its_samples(world, monkeypatch):
    """Rollouts of three, two and one sample; those of a rollout follow each other."""
    monkeypatch.setattr(token_values, "NUM_ROLLOUTS", 2)
    facts = facts_of([sample(2), sample(1), sample(2), sample(1), sample(2), sample(3)])
    values = TokenRecorder(config(), replace(facts, episode_B=np.array([1, 1, 1, 2, 2, 3])))
    rows = [(4, 1, 6.0), (2, 1, 5.0), (0, 0, 1.0), (1, 0, 3.0), (5, 2, 9.0), (3, 0, 7.0)]
    values.record(minibatch(*range(6)), *results_of(rows))
    rollouts = [rollout(5), rollout(3), rollout(3)]
    found = values.gather(world, rollouts)
    assert [each.rollout for each in found] == rollouts[:2]
    assert [each.values["advantage"] for each in found] == [
        [1.0, None, 3.0, None, 5.0],
        [7.0, None, 6.0],
    ]


def test_objectives_without_advantage_have_the_other_values(world):
    values = TokenRecorder(config(), facts_of([sample(1)]))
    batches, (output,) = results_of([(0, 0, 1.0)])
    output.advantage_N = None
    values.record(minibatch(0), batches, [output])
    (found,) = values.gather(world, [rollout(1)])
    assert found.values == {"teacher_logprob": [-1.0], "kl_teacher": [2.0]}


@pytest.mark.parametrize(("save", "kind"), [("none", "rollout"), ("all", "golden")])
def test_nothing_is_kept_without_saved_rollouts(world, save, kind):
    values = TokenRecorder(config(save), facts_of([sample(1, kind)]))
    values.record(minibatch(0), *results_of([(0, 0, 1.0)]))
    assert values.gather(world, [rollout(1)]) == []


def test_a_file_has_the_tokens_text_and_the_golden_solution(tmp_path):
    tokenizer = Tokenizer.load("synthetic")
    golden = tuple(tokenizer.encode("1+1=2;[2]")) + tokenizer.stop_token_ids[:1]
    prompt = Prompt("train:3", "1+1", (1,), "2", golden_token_ids=golden)
    ids = tuple(tokenizer.encode("1+1=3;"))
    rollouts = [Rollout(prompt, n, ids, (0.0,) * len(ids), "length", 1) for n in range(3)]
    values = [{"advantage": [0.5] * len(ids)}, {"advantage": [None] * len(ids)}]
    given = [RolloutValues(*pair) for pair in zip(rollouts, values, strict=False)]
    write_token_values(RunDirectory(tmp_path).tokens(4), given, tokenizer)
    first, second = read_tokens(RunDirectory(tmp_path).tokens(4))
    assert "".join(first.pieces) == "1+1=3;"
    assert (first.prompt_id, second.sample_index) == ("train:3", 1)
    assert first.values == values[0]
    assert first.golden == "1+1=2;[2]"
    write_token_values(RunDirectory(tmp_path).tokens(5), [], tokenizer)
    assert not RunDirectory(tmp_path).tokens(5).exists()
