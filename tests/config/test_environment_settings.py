"""Settings of environments: refusals, growing horizons, and sources with one of their own."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from stable_opd_mcore.config.changes import changes, read_settings
from stable_opd_mcore.config.cold_start import cold_start_config
from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.config.no_effect import refuse_without_effect
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.inputs.hashes import changed_inputs, write_inputs
from stable_opd_mcore.inputs.loading import load_sources
from tests.config.cases import GOLDEN_ALL, SERVED, refused_until, run_of, run_with

SOURCE = {"path": "synthetic:arithmetic"}
FUNCTION = "environment.function=envs.py:episode"
PLAYED = f"{FUNCTION} {SERVED}"
PROMPTED = "teacher.path=self teacher.prompt.function=envs.py:prompt"
AGENT = "environment.function=envs.py:agent"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("envs.py").write_text(
        "def episode(row, seed):\n    yield\n    return 1\n"
        "def short(row): ...\n"
        "def agent(row, seed, base_url): return 1\n"
        "async def awaited(row, seed, base_url): return 1\n"
        "def other(row, seed, url): return 1\n"
        "def reward(row, response): return 1\n"
        "def prompt(row, rollout, group): return None\n"
    )


@pytest.mark.parametrize(
    ("settings", "message", "remedies"),
    [
        ("environment.function=envs.py:short",
         r"short\(row\) cannot be called: .*def short\(row, s", FUNCTION),
        ("environment.function=envs.py:other",
         r"cannot be called: .* or def other\(row, seed, base_url\)", AGENT),
        (f"{FUNCTION} environment.address=0.0.0.0",
         "address with .* a generator: it is for agents", "-environment.address"),
        (f"{AGENT} objective.discount=0.5", "an agent may begin contexts",
         f"{FUNCTION} | -objective.discount"),
        (f"{AGENT} rollout.max_staleness=2 rollout.partial=true rollout.engine=embedded",
         "wait for agents that wait", "rollout.partial=false"),
        ("environment.function=absent.py:episode", "absent.py: No such file", FUNCTION),
        ("environment.horizon_start=2", "environment.horizon_steps=None: a growing horizon needs",
         "environment.horizon_steps=2 | -environment.horizon_start"),
        ("environment.max_turns=4 environment.horizon_start=5 environment.horizon_steps=2",
         "environment.horizon_start=5 is not below environment.max_turns=4, to which it grows",
         "environment.horizon_start=3"),
        ("environment.max_turns=0", "max_turns: Input should be greater than 0",
         "environment.max_turns=1"),
        ("environment.timeout_seconds=0", "timeout_seconds: Input should be greater than 0",
         "environment.timeout_seconds=1"),
        ("environment.memory_gib=0", "memory_gib: Input should be greater than 0",
         "environment.memory_gib=1"),
        ("environment.history=all", "history: Input should be 'append' or 'template'",
         "environment.history=append"),
        (f"{FUNCTION} environment.timeout_seconds=60 fault.watchdog_minutes=2",
         "60: a step that hangs is tried twice, and after 2 minutes .*; set less than 60",
         "environment.timeout_seconds=59"),
        (f"{FUNCTION} environment.history=template objective.discount=0.5",
         "history=template with objective.discount: where the chat template rewrites earlier",
         "environment.history=append | -objective.discount"),
        (f"{FUNCTION} environment.history=template teacher.prompt=own.jinja",
         "teacher.prompt needs episodes of one; set environment.history=append, or drop teach",
         "environment.history=append | -teacher.prompt"),
        (f"{FUNCTION} rollout.engine=sglang rollout.routing_replay=true rollout.max_staleness=1 "
          "rollout.sglang.placement=disaggregated",
         "max_staleness=1 and an environment: the weights change between turns",
         "rollout.routing_replay=false | rollout.max_staleness=0"),
        (f"{FUNCTION} environment.timeout_seconds=1e5 fault.watchdog_minutes=null", "than 10800",
         "environment.timeout_seconds=10799"),
        ("rollout.prefix.by=teacher", "no row says .*; set last",
         f"rollout.prefix.last=2 {PLAYED}"),
        ("rollout.prefix.by=teacher rollout.prefix.last=2",
         "set environment.function and teacher.engine=sglang, or by=golden",
         f"{PLAYED} | -rollout.prefix.last rollout.prefix.by=golden {GOLDEN_ALL}"),
        (f"{AGENT} rollout.prefix.by=golden {GOLDEN_ALL}",
         "agent.s first turn .*; drop rollout.prefix, or write",
         f"-rollout.prefix.by | {FUNCTION}"),
        (f"{FUNCTION} {PROMPTED} objective.name=gkd objective.on_policy_fraction=0.5",
         "set on_policy_fraction=1, or a template as teacher.prompt",
         "objective.on_policy_fraction=1 | -teacher.prompt.function teacher.prompt=x"),
        (f"{FUNCTION} {PROMPTED} rollout.engine=replay rollout.replay_from=a", "sample them again",
         "-rollout.engine -rollout.replay_from"),
        (f"{FUNCTION} {PROMPTED} environment.history=template",
         "set environment.history=append, or drop teacher.prompt",
         "environment.history=append | -teacher.prompt.function"),
        (f"{FUNCTION} reward.function=envs.py:reward",
         "reward.function=envs.py:reward with environment.function=envs.py:episode for synth",
         "-reward.function | -environment.function"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_with_the_remedy(settings, message, remedies):
    refused_until(settings, message, remedies)


def test_a_function_with_a_url_is_an_agent():
    for name, is_agent in (("episode", False), ("agent", True), ("awaited", True)):
        config = EnvironmentConfig(function=f"envs.py:{name}")
        assert config.is_agent == is_agent
    assert not EnvironmentConfig().is_agent
    assert run_of(AGENT).environment.most_observed == float("inf")


def of_sources(*sources, **sections):
    named = [SOURCE | {"name": str(place)} | source for place, source in enumerate(sources)]
    return run_with(data={"train": named}, **sections)


def test_the_environment_of_a_source_stands_for_that_of_the_run():
    section = {"function": "envs.py:episode", "max_turns": 3}
    reward = {"function": "envs.py:reward"}
    config = of_sources({}, {"environment": {}, "reward": reward}, environment=section)
    assert [config.environment_of(source).function for source in config.data.sources] == [
        "envs.py:episode",
        None,
    ]
    agentic = of_sources({}, {"environment": section}, reward=reward)
    assert agentic.environment_of(agentic.data.sources[1]).max_turns == 3
    with pytest.raises(ConfigError, match="drop one of the two"):
        of_sources({"environment": section, "reward": reward})
    with pytest.raises(ConfigError, match="drop one of the two"):
        of_sources({"reward": reward}, environment=section)


def test_the_longest_episode_is_that_of_any_source():
    section = {"function": "envs.py:episode", "max_turns": 3}
    assert of_sources({}, {}).max_turns == 1
    assert of_sources({}, {}, environment=section).max_turns == 3
    agentic = {"environment": section | {"max_turns": 7, "max_new_tokens": 5}}
    config = of_sources({}, agentic, {"environment": section}, sampling={"max_new_tokens": 20})
    assert config.max_turns == 7
    assert [config.budget_of(source) for source in config.data.sources] == [20, 5, 20]
    assert (config.longest_turn, config.longest_episode) == (20, 60)
    assert config.longest_context == 7 * 5 + 6 * 2048
    assert of_sources({}, sampling={"max_new_tokens": 20}).longest_context == 20
    unlimited = {"environment": section | {"max_observation_tokens": None}}
    assert of_sources({}, unlimited).longest_context == float("inf")


def test_turns_grow_from_the_start_to_the_maximum():
    growing = EnvironmentConfig(max_turns=10, horizon_start=1, horizon_steps=18)
    assert [growing.turns_at(step) for step in (0, 1, 2, 9, 17, 18, 99)] == [1, 1, 2, 5, 9, 10, 10]
    assert EnvironmentConfig(max_turns=7).turns_at(0) == 7


def test_a_prompt_template_that_no_row_has_a_use_for_is_refused():
    conversations = "data.train.path=a.jsonl data.train.columns.messages=m data.prompt_template=Q"
    with pytest.raises(ConfigError, match="=Q would have no effect: it needs a source without col"):
        refuse_without_effect(run_of(conversations), {})
    for more in ("data.eval.path=b.jsonl", "evaluation.benchmarks=[amc]"):
        refuse_without_effect(run_of(f"{conversations} {more}"), {})
    refuse_without_effect(run_of("data.train.path=a.jsonl data.prompt_template=Q"), {})


def test_settings_of_an_environment_without_one_are_refused():
    with pytest.raises(ConfigError, match="max_turns=3 would have no effect: it needs environment"):
        refuse_without_effect(run_of("environment.max_turns=3"), {})
    refuse_without_effect(run_of(f"{FUNCTION} environment.max_turns=3"), {})
    with pytest.raises(ConfigError, match=r"environment.function=.*sft has no rollouts"):
        refuse_without_effect(run_of(f"{FUNCTION} objective.name=sft"), {})
    source = FUNCTION + ' data.train=[{"path":"a.jsonl","environment":{%s}}]'
    with pytest.raises(ConfigError, match=r"0\.environment has max_turns and no function, so the"):
        refuse_without_effect(run_of(source % '"max_turns":3'), {})
    refuse_without_effect(run_of(source % ""), {})
    cold = run_of(f"{FUNCTION} cold_start.steps=1 cold_start.lr=1")
    refuse_without_effect(cold_start_config(cold), {})


def test_a_run_from_before_environments_resumes(tmp_path):
    config = of_sources({}, {"weight": 2.0})
    stored = tmp_path / "stored.yaml"
    save_config(config, stored)
    values = OmegaConf.to_container(OmegaConf.load(stored))
    assert isinstance(values, dict)
    del values["environment"]
    for source in values["data"]["train"]:
        del source["environment"]
    OmegaConf.save(OmegaConf.create(values), stored)
    assert changes(read_settings(stored), config) == {}
    other = of_sources({}, {"weight": 2.0}, environment={"workers": 9, "max_turns": 3})
    assert changes(read_settings(stored), other) == {"environment.max_turns": (10, 3)}


def test_a_run_keeps_the_file_of_its_environment_which_gets_all_columns(tmp_path):
    Path("rows.jsonl").write_text(json.dumps({"problem": "?", "answer": "1", "game": "g"}))
    source = {"path": "rows.jsonl", "columns": {"solution": None}}
    with_own = source | {"name": "own", "environment": {"function": "envs.py:episode"}}
    config = run_with(
        data={"train": [source | {"name": "plain"}, with_own]},
        run={"name": "r", "directory": str(tmp_path)},
    )
    assert [row.columns and row.columns["game"] for row in load_sources(config)] == [None, "g"]
    write_inputs(config)
    kept, name = config.run.files.own_code, "data.train.1.environment.function"
    assert [path.name for path in kept.iterdir()] == [f"{name}.py"]
    assert changed_inputs(config) == {}
    Path("rules.py").write_text("N = 1")
    Path("envs.py").write_text("import rules\n" + Path("envs.py").read_text())
    write_inputs(config)
    assert (kept / name / "rules.py").read_text() == "N = 1"
    Path("rules.py").write_text("N = 2")
    assert [*changed_inputs(config)] == [f"contents of {name} (rules.py)=rules.py"]
