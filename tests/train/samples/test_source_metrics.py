"""Metrics of sources and of teachers, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from stable_opd_mcore.data.responses import rollout_metrics
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.losses.source_objectives import build_source_objectives
from stable_opd_mcore.losses.token_weights import by_episode
from stable_opd_mcore.metrics import Mean
from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.records import Prompt, Rollout, Sample, Turn
from stable_opd_mcore.train.samples.sharing import gather_facts
from stable_opd_mcore.train.samples.source_metrics import groups_of, source_metrics
from tests.losses.cases import make_config
from tests.shares import facts_of, sample_of

SOURCES = [
    {"path": "mine/math.jsonl"},
    {"path": "c", "name": "code", "teacher": "t"},
    {"path": "d", "name": "d", "teacher": "t"},
]
TEACHER = {"engine": "sglang", "routes": {"math.jsonl/train": ["http://a"], "t": ["http://b"]}}


def sample(prompt: str, length: int, kind="rollout", reward=None, truncated=False) -> Sample:
    ids = (3,) * length
    trained = (True,) * length
    return sample_of(kind, prompt, (5,), ids, trained, reward=reward, truncated=truncated)


def facts():
    batch = [
        sample("a", 90, reward=1.0),
        sample("a", 6, reward=0.5),
        sample("b", 2, reward=0.0),
        sample("b", 2, truncated=True),
        sample("a", 50, "golden"),
    ]
    return replace(facts_of(batch), source_B=np.array([0, 0, 1, 1, 0]))


def test_shares_accuracy_and_truncation_of_each_source_and_teacher():
    config = make_config(data__train=SOURCES, teacher=TEACHER)
    objective = build_source_objectives(config, (1,), (1,))
    found = source_metrics(config, objective, facts())
    values = found.values_by_key()
    require_known(values)
    names = ("mine_math.jsonl_train", "code", "d"), ("mine_math.jsonl_train", "t")
    expected = {f"source/{name}" for name in names[0]} | {f"teacher/{name}" for name in names[1]}
    assert {key.rpartition("/")[0] for key in values} == expected
    code = {"row_share": 0.5, "token_share": 0.04, "weight_share": 0.5}
    code |= {"accuracy": 0.0, "truncation_rate": 0.5}
    for area in ("source/code", "teacher/t"):
        assert {key: values[f"{area}/{key}"] for key in code} == pytest.approx(code)
    assert values["source/mine_math.jsonl_train/accuracy"] == 0.75
    assert values["source/d/row_share"] == 0.0
    assert values["source/d/accuracy"] is None
    by_tokens = make_config(data__train=SOURCES, teacher=TEACHER, aggregation="token_mean")
    found = source_metrics(by_tokens, build_source_objectives(by_tokens, (1,), (1,)), facts())
    assert found.values_by_key()["source/code/weight_share"] == pytest.approx(0.04)


def test_truncation_is_of_turns_as_over_all_rollouts(world):
    """Sources of episodes, in one context or two and without a token, and of plain responses."""
    cut, ended = Turn(2, "length"), Turn(2, "stop")
    anew = replace(cut, before=(8, 8), restarts=True)
    episodes = [(cut, ended, anew), (ended, ended), (anew, ended), (Turn(0, "length"),)]
    rollouts = [
        Rollout(
            replace(Prompt("p", "", (1, 2)), slot=slot),
            0,
            np.full(sum(turn.num_tokens for turn in turns), 7, np.int32),
            np.zeros(sum(turn.num_tokens for turn in turns), np.float32),
            "stop" if turns[-1] is ended else "length",
            0,
            turns=turns,
        )
        for slot, turns in enumerate([*episodes, (ended,), (cut,), (ended,)])
    ]
    facts, _ = by_episode(gather_facts(world, rollout_samples(rollouts)))
    config = make_config(data__train=SOURCES, teacher=TEACHER)
    of_source = replace(facts, source_B=np.array([0] * 4 + [1] * 3))
    found = source_metrics(config, build_source_objectives(config, (1,), (1,)), of_source)
    for name, own in (("mine_math.jsonl_train", rollouts[:4]), ("code", rollouts[4:])):
        expected = rollout_metrics(own, 8)["rollout/truncation_rate"]
        assert found[f"source/{name}/truncation_rate"] == expected
    assert rollout_metrics(rollouts, 8)["rollout/truncation_rate"] == Mean(5, 11)


@pytest.mark.parametrize(
    ("aggregation", "share"),
    [("sequence_mean", 0.75), ("token_mean", 0.75), ("constant", 3 * 2 / (3 * 2 + 48))],
)
def test_the_share_of_the_weight_is_the_sources_but_under_constant(aggregation, share):
    """Means over rollouts of 2 tokens, with the weight 3, and of 48 tokens, with the weight 1."""
    weighted = [SOURCES[0] | {"weight": 1.0}, SOURCES[1] | {"weight": 3.0}]
    settings = {"normaliser": "per_source", "aggregation": aggregation}
    config = make_config(data__train=weighted, teacher=TEACHER, **settings)
    found = source_metrics(config, build_source_objectives(config, (1,), (1,)), facts())
    assert found.values_by_key()["source/code/weight_share"] == pytest.approx(share)


def test_one_source_has_no_metrics_of_its_own():
    config = make_config()
    one = replace(facts(), source_B=None)
    assert not source_metrics(config, build_source_objectives(config, (1,), (1,)), one)
    assert groups_of(config, None) == {}


def test_a_run_without_rollouts_counts_golden_solutions():
    config = make_config(data__train=SOURCES, objective__name="sft", teacher=None)
    found = source_metrics(config, build_source_objectives(config, (1,), None), facts())
    assert found.values_by_key()["source/mine_math.jsonl_train/weight_share"] == 1.0
    assert found.values_by_key()["source/code/token_share"] == 0.0
