"""An objective for each source: what it inherits, what a run does with it, and what is refused."""

from typing import Any

import pytest

from stable_opd_mcore.config.objective_settings import ObjectiveConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.config.source_objectives import objective_names
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.inputs.source_uses import golden_of, routes_of, uses_of
from stable_opd_mcore.losses.objectives import OBJECTIVES
from stable_opd_mcore.losses.source_objectives import build_source_objectives
from stable_opd_mcore.records import Use
from tests.losses.cases import make_config


def sources(*objectives: dict[str, Any] | None, **of_first: Any) -> list[dict[str, Any]]:
    return [
        {"path": f"{number}.jsonl", "objective": each} | (of_first if number == 0 else {})
        for number, each in enumerate(objectives)
    ]


def config_of(*objectives: dict[str, Any] | None, first: Any = (), **changes: Any) -> Config:
    train = sources(*objectives, **dict(first))
    return make_config(**{"normaliser": "per_source", "data__train": train, **changes})


def built(config: Config):
    return build_source_objectives(config, (1,), (2,))


def test_a_source_takes_what_it_leaves_out_from_the_run():
    masks = {"repetitive_tail": True, "after_tokens": 9}
    own = {"name": "grpo", "std_normalise": False, "masks": {"after_tokens": 3}}
    config = config_of(own, None, {"name": "sft"}, objective__masks=masks, mixture__lambda=0.1)
    rewarded, run, golden = config.objectives
    assert run is config.objective
    assert (rewarded.name, rewarded.std_normalise, golden.name) == ("grpo", False, "sft")
    assert rewarded.masks == config.objective.masks.model_copy(update={"after_tokens": 3})
    again = Config.model_validate(config.model_dump(by_alias=True))  # as a resume reads it
    assert again == config

    objective = built(config)
    assert [one.name for one in objective.each] == ["grpo", "opd", "sft"]
    assert objective.of_source == (0, 1, 2)
    assert uses_of(objective) == {
        "0.jsonl/train": Use(0, is_sampled=True, is_taught=False),
        "1.jsonl/train": Use(1),
        "2.jsonl/train": Use(2, is_sampled=False, is_taught=False),
    }
    assert routes_of(objective) == {}
    assert [*golden_of(objective).values()] == ["by_source", "by_source", "required"]
    assert [*golden_of(objective.with_loss_weights(0, 0)).values()][2] == "required"
    alike = config_of({"name": "grpo"}, {"name": "grpo"}, normaliser="global")
    assert (len(alike.objectives), built(alike).of_source) == (1, (0, 0))
    stored = config.model_dump(mode="json")
    assert objective_names("opd", stored["data"]["train"]) == "grpo and opd and sft"
    assert objective_names("opd", {"path": "a"}) == "opd"


def test_each_source_that_asks_a_teacher_has_its_route_and_each_route_a_source():
    def routes(*names: str) -> dict[str, str]:
        served = {"engine": "sglang", "routes": {name: ["http://a"] for name in names}}
        return routes_of(built(config_of({"name": "grpo"}, None, teacher=served)))

    own = "1.jsonl/train"
    assert routes(own) == {own: own}  # the first source needs none
    with pytest.raises(ConfigError, match=r"source '1.jsonl/train' of .* has t, not '1.jsonl/"):
        routes("t")
    with pytest.raises(ConfigError, match=r"teacher\.routes\.t scores no rows: .*drop it, or name"):
        routes(own, "t")


def test_the_settings_know_which_objectives_ask_a_teacher():
    for name, spec in OBJECTIVES.items():
        assert ObjectiveConfig(name=name).asks_teacher is (spec.teacher != "none")


@pytest.mark.parametrize(
    ("objectives", "changes", "message", "remedies"),
    [
        ([{"name": "grpo"}, None], {"normaliser": "global"}, r"\(grpo and opd\).*=per_source, and",
         [{"normaliser": "per_source"}]),
        ([{"name": "gkd", "on_policy_fraction": 0.5}, {"name": "grpo"}], {},
         "on_policy_fraction=0.5 of 0.jsonl with sources of different",
         [{"objectives": [{"name": "gkd"}, {"name": "sft"}]}]),
        ([{"name": "sft"}, None], {"first": {"columns": {"solution": None}}},
         "0.jsonl has objective.name=sft and no column of golden",
         [{"first": {}}, {"objectives": [{"name": "grpo"}, None]}]),
        ([{"name": "opdd"}, None], {}, "expected one of sft, grpo, opd",
         [{"objectives": [{"name": "opd"}, None]}]),
        ([{"name": "grpo"}, None], {"teacher": None}, "name=opd needs a teacher",
         [{"teacher": "dropped"}]),
        ([{"name": "grpo"}, None],
         {"first": {"teacher": "t"}, "teacher": {"engine": "sglang",
          "routes": {"t": ["http://a"]}}},
         "teacher=t of 0.jsonl, whose objective.name=grpo asks no teacher",
         [{"first": {}, "teacher": "dropped"}, {"objectives": [{"name": "opd"},
          {"name": "grpo"}]}]),
        ([{"name": "grpo", "top_k": 8}, None], {}, "top_k=8 of a source would have no effect",
         [{"objectives": [{"name": "grpo"}, None]}]),
        ([{"name": "grpo"}, None], {"objective__top_k": 8}, "=grpo or objective.name=opd has no",
         [{"objective__top_k": "dropped"}]),
        ([{"name": "lsm"}, {"name": "lsm", "top_k": 8}], {"objective__name": "gkd"},
         "name=gkd would have no effect: it needs a source without an objective of its own",
         [{"objective__name": "dropped"}]),
        ([{"name": "grpo"}, {"name": "sft"}], {"objective__discount": 0.5},
         "objective.discount=0.5 would have no effect", [{"objective__discount": "dropped"}]),
        ([{"name": "opd"}, None], {"memory__teachers_directory": "/d"},
         "it needs several models in teacher.models", [{"memory__teachers_directory": "dropped"}]),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_until_the_remedy(
    objectives, changes, message, remedies
):
    """A remedy has the objectives or the changes that it replaces."""
    with pytest.raises(ConfigError, match=message):
        built(config_of(*objectives, **changes))
    for remedy in remedies:
        then = {key: value for key, value in (changes | remedy).items() if value != "dropped"}
        built(config_of(*then.pop("objectives", objectives), **then))


def test_a_run_value_that_one_source_uses_is_no_mistake_in_the_others():
    built(config_of({"name": "grpo"}, {"name": "lsm"}, objective__top_k=8))
