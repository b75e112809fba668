"""The chosen train.recompute and memory.offload against every combination."""

import shlex
from itertools import chain, combinations, product
from pathlib import Path

import pytest

from stable_opd_mcore.commands.plan.plan import Plan, make_plan
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.placement.hardware import Cluster
from tests.commands.plan.cases import CONFIGS, NODE, config_7b

PARTS = ("optimizer", "gradients", "frozen")
EMBEDDED = ("rollout.engine=embedded", "rollout.prompts_per_step=16")
LONG = ("sampling.max_new_tokens=16384", "parallel.context=2", "parallel.tensor=2")
UNCUT = ("parallel.tensor=1", "parallel.sequence=false")
RUNS = {
    "everything fits": (NODE, "h200", ()),
    "long responses": (Cluster(2, 8, 1), "h100", LONG),
    "one tensor rank": (NODE, "h100", UNCUT),
    "no servers": (NODE, "h100", (*UNCUT, *EMBEDDED, "train.micro_batch_tokens=16384")),
    "rollouts hide the update": (
        Cluster(1, 8, 1),
        "h200",
        (
            "rollout.max_staleness=1",
            "rollout.sglang.placement=disaggregated",
        ),
    ),
    "nothing fits": (Cluster(1, 1), "h200", UNCUT),
}


def plan_of(name: str, directory: Path, *more: str) -> Plan:
    cluster, gpu, overrides = RUNS[name]
    return make_plan(config_7b(directory, *overrides, *more), cluster, gpu)


@pytest.mark.parametrize("name", RUNS)
def test_the_choice_fits_and_every_faster_combination_does_not(name, tmp_path):
    plan = plan_of(name, tmp_path)
    choice, needed = plan.choice, []
    subsets = chain.from_iterable(combinations(PARTS, n) for n in range(len(PARTS) + 1))
    for recompute, subset in product(("none", "selective", "full"), subsets):
        other = Plan(plan.run.changed(train={"recompute": recompute}, memory={"offload": subset}))
        needed.append(other.memory.peak_bytes)
        assert not other.memory.fits or other.seconds.total > choice.best.seconds.total - 1e-5
    assert choice.best.memory.fits == (min(needed) <= plan.run.device.usable_bytes)
    assert choice.best.memory.fits == (name != "nothing fits")
    if not choice.best.memory.fits:
        assert choice.best.memory.peak_bytes == min(needed)
        assert "needs least" in choice.line()


def test_the_overrides_make_the_config_its_own_choice(tmp_path):
    plan = plan_of("one tensor rank", tmp_path)
    assert not plan.memory.fits
    assert plan.choice.remedy in plan.table()
    fixed = plan_of("one tensor rank", tmp_path, *shlex.split(plan.choice.remedy))
    assert fixed.memory.fits
    assert fixed.choice.remedy == ""
    assert fixed.seconds == plan.choice.best.seconds
    assert "fastest that fits: this config's" in fixed.table()


def test_equally_fast_settings_stay_as_they_are(tmp_path):
    for recompute in ("none", "full"):
        plan = plan_of("rollouts hide the update", tmp_path, f"train.recompute={recompute}")
        assert plan.seconds.rollout > 0
        assert plan.choice.remedy == ""


def test_every_shipped_run_has_a_choice_that_its_config_may_name():
    for path in sorted(CONFIGS.glob("*_*b*.yaml")):
        nodes = 4 if "32b" in path.name or "a3b" in path.name else 2
        config = load_config(path)
        plan = make_plan(config, Cluster(nodes, 8, int(config.rollout.engine == "sglang")))
        assert plan.choice.best.memory.fits
        load_config(path, shlex.split(plan.choice.remedy))
        assert plan.choice.best.seconds.total <= plan.seconds.total
