"""Every objective with every option. Imports no pytest, which a GPU machine may lack."""

from pathlib import Path
from typing import Any

from stable_opd_mcore.losses.objectives import OBJECTIVES
from tests.losses.cases import Case, make_case, make_config

# Setting -> (a value other than the default, the other settings that it needs). A setting that an
# entry of OBJECTIVES names must be here.
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "objective__clip": (0.05, {"train__minibatches": 2}),
    "objective__discount": (0.5, {}),
    "objective__stop_class": (False, {}),
    "objective__top_k": (3, {}),
    "objective__tail": (True, {}),
    "objective__divergence": ("jsd", {}),
    "objective__jsd_beta": (0.3, {"objective__divergence": "jsd"}),
    "objective__on_policy_fraction": (0.5, {}),
    "objective__std_normalise": (False, {}),
    "objective__advantage__control_variate": (True, {}),
    "objective__advantage__power": (0.5, {}),
    "objective__advantage__log": (True, {}),
    "objective__advantage__clamp": (0.1, {}),
    "objective__advantage__policy": ("present", {"train__minibatches": 2}),
    "objective__advantage__teacher_weight": (0.3, {}),
    "objective__masks__special_token_ids": ([9], {}),
    "objective__masks__truncated_rollouts": (True, {}),
    "objective__masks__repetitive_tail": (True, {}),
    "objective__masks__after_tokens": (1, {}),
    "aggregation": ("constant", {}),
    "kl__beta": (0.1, {}),
    "kl__estimator": ("k3", {"kl__beta": 0.1}),
    "mixture__lambda": (0.1, {}),
    "sampling__temperature": (0.7, {}),
    "rollout__importance_correction": ("truncated", {}),
    "rollout__importance_threshold": (1.01, {"rollout__importance_correction": "truncated"}),
}


def with_every_option(name: str) -> dict[str, Any]:
    """An objective with another value of every setting that it uses."""
    changes: dict[str, Any] = {"objective__name": name}
    for key in OBJECTIVES[name].settings:
        value, needed = SETTINGS["objective__" + key.replace(".", "__")]
        changes |= needed | {"objective__" + key.replace(".", "__"): value}
    return changes


# Every entry of OBJECTIVES has two cases: its defaults, and another value for each of its settings.
# Further cases set single options to extremes, or combine them with other terms.
TOP_1 = {"objective__top_k": 1}
MARGIN = Path(__file__).parents[2] / "docs/examples/pairwise_margin.py"
VARIANTS = {
    name: {"objective__name": name} | (TOP_1 if "top_k" in spec.settings else {})
    for name, spec in OBJECTIVES.items()
}
VARIANTS |= {
    f"{name}_options": with_every_option(name) for name, spec in OBJECTIVES.items() if spec.settings
}
VARIANTS |= {
    "opd_exact_kl": {"kl__beta": 0.3},
    "opd_k3": {"kl__beta": 0.3, "kl__estimator": "k3", "objective__discount": 1.0},
    "opd_k3+": {"kl__beta": 0.3, "kl__estimator": "k3+", "objective__stop_class": False},
    "opd_discounted": {
        "objective__discount": 0.5,
        "objective__advantage__power": 0.5,
        "objective__advantage__log": True,
        "objective__advantage__clamp": 0.2,
    },
    "opd_vopd": {
        "objective__advantage__control_variate": True,
        "objective__discount": 1.0,
        "kl__beta": 0.1,
    },
    "opd_present": {"rollout__max_staleness": 4, "objective__discount": 0.5},
    "gkd_forward": {
        "objective__name": "gkd",
        "objective__divergence": "forward",
        "objective__stop_class": False,
        "kl__beta": 0.2,
    },
    "gkd_jsd": {
        "objective__name": "gkd",
        "objective__divergence": "jsd",
        "objective__jsd_beta": 0.3,
        "kl__beta": 0.2,
    },
    "lsm_exact_kl": {"objective__name": "lsm", "objective__top_k": 4, "kl__beta": 0.2},
    "student_topk_k3": {
        "objective__name": "student_topk",
        "objective__top_k": 4,
        "kl__beta": 0.2,
        "kl__estimator": "k3",
    },
    "student_topk_tail": {
        "objective__name": "student_topk",
        "objective__top_k": 4,
        "objective__tail": True,
    },
    "own": {"objective__name": f"{MARGIN}:pairwise_margin", "objective__top_k": 6},
}


def case_of(variant: str, rows: int = 13, vocab: int = 31, **options) -> Case:
    changes = dict(VARIANTS[variant])
    if "objective__top_k" in changes:
        changes["objective__top_k"] = min(changes["objective__top_k"], vocab)
    temperature = options.pop("temperature", 1.0)
    if variant != "sft":  # sft has no rollouts
        changes["sampling__temperature"] = temperature
    config = make_config(**changes)
    if vocab == 1:
        options["stop_ids"] = ((0,), (0,))
    return make_case(config, rows, vocab, **options)
