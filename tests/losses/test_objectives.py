"""Objectives and their settings: what each needs, the effect of each setting, and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.config.objective_settings import ObjectiveConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.samples import (
    golden_samples,
    mark_off_policy,
    off_policy_slots,
    rollout_samples,
)
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.losses.objectives import OBJECTIVES, ObjectiveSpec, build_objective
from stable_opd_mcore.losses.token_losses import PolicyLoss, Rows
from stable_opd_mcore.losses.token_weights import correct_importance
from stable_opd_mcore.records import Prompt, Rollout
from tests.losses.cases import assert_close, make_case, make_config, run_definition, run_fused
from tests.losses.variants import SETTINGS
from tests.shares import facts_of
from tools.objectives_table import objectives_table

PROMPTS = [
    Prompt(f"s:{slot}", "", (1, 2), golden_token_ids=(7, 8, 9)[slot:], slot=slot)
    for slot in range(2)
]
ROLLOUTS = [
    Rollout(PROMPTS[i // 2], i % 2, ids, (-0.5,) * len(ids), reason, 0, reward=float(i == 0))
    for i, (ids, reason) in enumerate(
        [((5, 4, 9), "stop"), ((4,) * 32, "length"), ((6, 9), "stop"), ((9,), "stop")]
    )
]


def computed(config: Config) -> list[torch.Tensor]:
    """Token weights of a small batch, and the loss and gradients of a micro-batch."""
    case = make_case(config, vocab=37, old=True)
    fused = run_fused(case)
    settings, golden = config.objective, golden_samples(PROMPTS)
    off_policy = off_policy_slots(0, len(PROMPTS), settings.on_policy_fraction, seed=0)
    samples = mark_off_policy(rollout_samples(ROLLOUTS, settings.masks), off_policy)
    samples += mark_off_policy(golden, off_policy)
    weights = case.objective.sample_weights(facts_of(samples))
    rows = [torch.tensor(w) for w in vars(weights).values() if w is not None]
    rows += [torch.tensor(sample.trained) for sample in samples]
    moved = case.batch.rollout_logprob_N + torch.linspace(-0.1, 0.1, 13).double()
    kind, threshold = config.rollout.importance_correction, config.rollout.importance_threshold
    corrected = replace(case.batch, old_token_logprob_N=moved)
    if kind != "none":
        (corrected,), _ = correct_importance([corrected], kind, threshold, sampled_kl=False)
    return [*rows, corrected.pg_weight_N, fused.pg, fused.kl, fused.sft, fused.d_weight]


def computed_or_refusal(config: Config) -> list[torch.Tensor] | str:
    try:
        return computed(config)
    except ConfigError as refusal:
        return str(refusal)


@pytest.mark.parametrize("key", SETTINGS)
def test_every_setting_has_an_effect_or_is_refused(key):
    value, needed = SETTINGS[key]
    dotted = key.replace("__", ".")
    effects = []
    for name in OBJECTIVES:
        before = computed_or_refusal(make_config(objective__name=name, **needed))
        if isinstance(before, str):
            continue  # the objective refuses the needed settings
        after = computed_or_refusal(make_config(objective__name=name, **needed, **{key: value}))
        if isinstance(after, str):
            assert dotted.startswith(after.partition("=")[0])
            assert "would have no effect" in after
            continue
        effects.append(name)
        changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert any(changed), f"{dotted} changes nothing of {name}"
    assert effects


def test_the_page_of_objectives_has_the_table_of_their_entries():
    page = Path(__file__).parents[2] / "docs/objectives.md"
    assert objectives_table() in page.read_text(), "run: python -m tools.objectives_table"
    assert all(spec.summary for spec in OBJECTIVES.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_defaults_are_accepted_by_every_objective(name):
    config = make_config(objective__name=name)
    resolved = config.model_dump(by_alias=True)
    build_objective(Config.model_validate(resolved), (1,), (2,))


@pytest.mark.parametrize(
    "changes",
    [
        {"reference__update": "ema", "reference__decay": 0.9},
        {"reference__update": "every", "reference__every": 7},
        {"reference__path": "somewhere"},
        {"fp8__reference": "tensorwise"},
    ],
)
def test_settings_of_the_reference_need_its_kl(changes):
    build_objective(make_config(kl__beta=0.1, **changes), (1,), (2,))
    with pytest.raises(ConfigError, match=r"needs kl\.beta > 0"):
        build_objective(make_config(**changes), (1,), (2,))


WITHOUT_EFFECT = [
    ({"objective__name": "opdd"}, "expected one of sft, grpo, opd"),
    ({"teacher": None}, "^objective.name=opd needs a teacher: set teacher.path$"),
    ({"objective__name": "grpo", "objective__discount": 0.5}, "objective.discount=0.5 would"),
    ({"objective__name": "lsm", "objective__advantage__clamp": 0.5}, "advantage.clamp=0.5 wo"),
    ({"objective__on_policy_fraction": 0.5}, "opd has no use for it"),
    (
        {"objective__name": "sft", "aggregation": "token_mean"},
        "^aggregation=token_mean would have no effect: objective.name=sft has no rollouts; d",
    ),
    ({"objective__name": "sft", "mixture__lambda": 0.1}, "mixture.lambda=0.1 would"),
    (
        {"objective__name": "sft", "rollout__max_staleness": 3},
        "^rollout.max_staleness=3 would have no effect: objective.name=sft has no rollouts; d",
    ),
    ({"optimizer__min_lr": 1e-7}, "it needs optimizer.schedule=linear or cosine; drop it$"),
    (
        {"objective__clip": 0.1},
        "it needs train.minibatches > 1, or rollout.max_staleness > 0 without rollout."
        "importance_correction: the ratio is 1 otherwise; drop it",
    ),
    (
        {
            "objective__advantage__policy": "present",
            "rollout__max_staleness": 1,
            "rollout__importance_correction": "masked",
        },
        "advantage.policy=present would have no effect: it needs train.minibatches > 1, or",
    ),
    (
        {"objective__advantage__policy": "present", "objective__name": "gkd"},
        "gkd has no use for it",
    ),
    ({"objective__jsd_beta": 0.3, "objective__name": "gkd"}, "it needs objective.divergence=j"),
    ({"rollout__importance_threshold": 3.0}, "it needs rollout.importance_correction; drop it"),
    ({"rollout__sglang__lora": "merged"}, "it needs student.lora; drop it"),
    ({"kl__estimator": "k3"}, "kl.estimator=k3 would have no effect: it needs kl"),
    ({"kl__beta": 0.1, "reference__decay": 0.9}, "it needs reference.update=ema"),
    ({"kl__beta": 0.1, "reference__every": 7}, "it needs reference.update=every"),
]  # changes, message


def test_settings_without_effect_are_refused_and_may_be_dropped():
    """Also a name that no objective has, and one without its teacher: both have a default here."""
    for changes, message in WITHOUT_EFFECT:
        with pytest.raises(ConfigError, match=message) as found:
            build_objective(make_config(**changes), (1,), (1,))
        named = str(found.value).partition("=")[0].replace(".", "__")
        refused = named if named in changes else "teacher"
        kept = {key: value for key, value in changes.items() if key != refused}
        build_objective(make_config(**kept), (1,), (1,))


@pytest.mark.parametrize(
    ("changes", "golden"),
    [
        ({"mixture__lambda": 0.0}, False),
        ({"mixture__lambda": 0.1}, True),
        ({"objective__name": "sft"}, True),
        ({"objective__name": "gkd", "mixture__lambda": 0.0}, False),
        (
            {
                "objective__name": "gkd",
                "mixture__lambda": 0.0,
                "objective__on_policy_fraction": 0.5,
            },
            True,
        ),
    ],
)
def test_golden_solutions_are_needed_where_they_are_trained_on(changes, golden):
    objective = build_objective(make_config(**changes), (1,), (1,))
    assert objective.needs_golden is golden
    assert objective.needs_rollouts is (objective.name != "sft")


def test_new_objective_is_a_function_and_one_entry(monkeypatch):
    """The steps of CONTRIBUTING, "Add an objective"."""

    def entropy_weighted(rows: Rows, settings: ObjectiveConfig) -> PolicyLoss:
        """A product of leaves, twice as much where the student is uncertain."""
        assert rows.divergence is not None
        assert rows.entropy is not None
        weight = (1 + (rows.entropy > settings.clip)) * rows.logprob * rows.token_logprob
        return PolicyLoss(weight * rows.divergence)

    spec = ObjectiveSpec(entropy_weighted, "hidden", ("clip",), lambda settings: "forward")
    monkeypatch.setitem(OBJECTIVES, "entropy_weighted", spec)
    case = make_case(make_config(objective__name="entropy_weighted", kl__beta=0.1), 17, 31)
    assert_close(run_fused(case, padding=3), run_definition(case), 1e-10)
    with pytest.raises(ConfigError, match=r"objective\.top_k=3 would have no effect"):
        build_objective(
            make_config(objective__name="entropy_weighted", objective__top_k=3), (1,), (1,)
        )


def test_scores_that_the_kl_and_the_control_variate_need():
    def needs(**changes):
        objective = build_objective(make_config(**changes), (1,), (1,))
        return objective.teacher_needs, objective.reference_needs

    assert needs(kl__beta=0.1) == ("sampled", "hidden")
    assert needs(kl__beta=0.1, kl__estimator="k3") == ("sampled", "sampled")
    assert needs(objective__advantage__control_variate=True) == ("hidden", "none")


def test_stop_ids_are_merged_by_objectives_that_compare_distributions():
    def merged(student_stops, teacher_stops, **changes):
        return build_objective(
            make_config(**changes), student_stops, teacher_stops
        ).terms.merged_ids

    for name in ("gkd", "lsm", "student_topk"):
        assert merged((5, 1), (2, 1), objective__name=name) == (1, 2, 5)
        assert merged((1,), (1,), objective__name=name) == ()
        assert merged((1,), (2,), objective__name=name, objective__stop_class=False) == ()
    assert merged((1,), (2,), objective__advantage__control_variate=True) == (1, 2)
    assert merged((1,), (2,), kl__beta=0.1) == ()


def test_only_objectives_with_a_teacher_have_a_stop_class():
    def stops(name):
        objective = build_objective(make_config(objective__name=name), (1,), (2,))
        return objective.stop_ids

    assert stops("grpo") == stops("sft") == ()
    assert stops("opd") == stops("gkd") == stops("lsm") == stops("student_topk") == (1, 2)
