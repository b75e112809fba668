"""The guard's decisions over made series of metrics: order, bounds, healing, resume."""

import json
import random
from dataclasses import asdict, replace

import pytest
from pydantic import TypeAdapter

from stable_opd_mcore.config.guard_settings import GuardConfig
from stable_opd_mcore.train.oversight import guard
from stable_opd_mcore.train.oversight.guard import GuardState, decide

ACT = GuardConfig(policy="act", max_beta=0.8, max_lambda=0.4)
HEALTHY = {
    "rollout/truncation_rate": 0.1,
    "rollout/response_length_mean": 100.0,
    "kl/teacher": 0.1,
    "tokens/repetitive_share": 0.0,
}
LONGER = HEALTHY | {"rollout/response_length_mean": 150.0}
HUMP = LONGER | {"rollout/truncation_rate": 0.4}
DAMAGE = HUMP | {"rollout/truncation_rate": 0.8, "tokens/repetitive_share": 0.5}


def follow(rows, config=ACT, state=None, first=1, every=10):
    """The state after each row, and (step, name of the action)."""
    state, states, actions = state or GuardState(), [], []
    for step, values in enumerate(rows, start=first):
        state, taken = decide(config, state, step, values, saved=step % every == 0)
        states.append(state)
        actions += [(step, action) for action in taken]
    return states, actions


def names(actions):
    return [(step, action.name) for step, action in actions]


def test_measures_follow_one_another_while_damage_lasts():
    states, actions = follow([HEALTHY] * 45 + [DAMAGE] * 60)
    assert names(actions) == [
        (46, "warned"),
        (47, "damaged"),
        (47, "raised"),
        (57, "rolled_back"),
        (71, "rolled_back"),
        (85, "stopped"),
    ]
    seen = actions[0][1].details["evidence"]["rollout/truncation_rate"]
    assert seen["recent"] == pytest.approx((4 * 0.1 + 0.8) / 5)
    assert seen["recent"] > seen["bound"] > seen["normal"] == pytest.approx(0.1)
    returns = [action.details["to_step"] for _, action in actions if action.name == "rolled_back"]
    assert returns == [30, 20]  # the save of step 40 had not proved healthy
    assert [action.details["next"] for _, action in actions] == [
        "a measure if there is damage",
        "the run returns to step 30 after 10 more steps with damage",
        "the run returns to step 30 after 10 more steps with damage",
        "the run returns to step 20 after 10 more steps with damage",
        "the run is stopped after 10 more steps with damage",
        "the run ends",
    ]
    assert states[-1].measure == "stopped"
    assert states[-1].rollbacks == guard.MAX_ROLLBACKS
    assert decide(ACT, states[-1], 106, HEALTHY, True) == (states[-1], [])


def test_beta_and_lambda_rise_to_their_bounds_and_stay():
    states, actions = follow([HEALTHY] * 40 + [DAMAGE] * 6 + [HEALTHY] * 100)
    betas = [state.beta for state in states]
    first = next(i for i, beta in enumerate(betas) if beta)
    assert betas[first : first + 3] == [0.2, 0.4, 0.8]
    assert set(betas[first + 3 :]) == {0.8}
    assert states[first].lambda_ == 0.1
    assert states[-1].lambda_ == 0.4
    assert [name for _, name in names(actions)] == ["warned", "damaged", "raised", "recovered"]
    assert states[-1].measure == "none"


@pytest.mark.parametrize("in_force", [{"kl/beta": 0.8, "mixture/lambda": 0.4}, {}])
def test_beta_and_lambda_at_their_bounds_are_no_measure(in_force):
    """Those of the config, or the guard's own from an earlier collapse."""
    before = [] if in_force else [HEALTHY] * 40 + [DAMAGE] * 6
    rows = [HEALTHY | in_force] * 50 + [DAMAGE | in_force] * 3
    _, actions = follow(before + rows)
    assert [name for _, name in names(actions)][-3:] == ["warned", "damaged", "rolled_back"]
    _, actions = follow(before + rows + rows[-1:] * 20, every=1000)  # no checkpoint to return to
    assert [(step - len(before), name) for step, name in names(actions)][-2:] == [
        (52, "damaged"),
        (61, "stopped"),
    ]


def test_a_hump_of_truncation_is_a_warning_only():
    hump = [HEALTHY | {"rollout/truncation_rate": 0.1 + 0.07 * n} for n in range(11)]
    rows = [HEALTHY] * 40 + hump + [HUMP] * 30 + hump[::-1] + [HEALTHY] * 40
    states, actions = follow(rows)
    assert {name for _, name in names(actions)} == {"warned", "recovered"}
    assert all(state.beta == 0 for state in states)


CAPPED = HUMP | {"rollout/truncation_rate": 0.95}
KNOWN = {
    "rollout/truncation_rate": 0.1,
    "advantage/abs_share_repetitive": 0.0,
    "rollout/accuracy_finished": 0.5,
    "rollout/truncation_rate_turn_3_4": 0.1,
    "stop/student_mass": 0.9,
}


JUDGED = [
    (HUMP, {}, False),
    (CAPPED, {}, True),
    (CAPPED, {"rollout/truncation_rate": 0.6}, False),  # a small budget by design
    (HUMP | {"advantage/abs_share_repetitive": 0.4}, {}, True),
    (HUMP | {"rollout/accuracy_finished": 0.2}, {}, True),
    (HUMP | {"rollout/accuracy_finished": 0.9}, {}, False),
    (HUMP | {"kl/teacher": 0.4}, {}, True),
    (HUMP | {"stop/student_mass": 0.3}, {}, True),  # of responses that end: 0.5 after 1
    (HUMP | {"stop/student_mass": 0.6}, {}, False),  # 1 as before
    ({"rollout/truncation_rate_turn_3_4": 0.4, "kl/teacher": 0.4}, {}, True),
    (LONGER | {"tokens/repetitive_share": 0.5}, {}, False),  # none is cut
    (HEALTHY | {"rollout/accuracy_finished": 0.2}, {}, False),
    (HEALTHY | {"rollout/accuracy_finished": 0.1}, {}, True),  # nearly all of it is lost
    (HUMP | {"rollout/truncation_rate": 0.8}, {}, True),  # it leaps
]  # row, start, is_damage


def test_what_is_damage():
    for row, start, is_damage in JUDGED:
        _, actions = follow([HEALTHY | KNOWN | start] * 40 + [KNOWN | row] * 10)
        assert ("raised" in [name for _, name in names(actions)]) is is_damage


def test_few_responses_that_end_say_little_about_accuracy():
    """With a small budget: of 32 responses 13 end, then one does, which is wrong in most steps."""
    noise = random.Random(3)
    shares = [sum(noise.random() < 0.6 for _ in range(13)) / 13 for _ in range(120)]

    def rows(truncated, accuracies):
        cut = {"rollout/truncation_rate": truncated}
        return [HEALTHY | cut | {"rollout/accuracy_finished": share} for share in accuracies]

    before, wrong = rows(0.6, shares), [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert not follow(before + rows(31 / 32, wrong))[0][-1].damaged
    assert follow(before + rows(0.8, wrong))[0][-1].damaged


def test_what_lasts_does_not_become_normal():
    wrong = HEALTHY | KNOWN | {"rollout/accuracy_finished": 0.3}
    states, actions = follow([HEALTHY | KNOWN] * 40 + [wrong] * 200 + [KNOWN | HUMP] * 9)
    assert states[239].watched["accuracy"].normal == pytest.approx(0.5, abs=0.02)
    assert names(actions)[0][1] == "warned"
    late = follow([wrong | HUMP | {"rollout/accuracy_finished": 0.3}] * 6, state=states[239])
    assert late[0][-1].damaged


def test_the_ceiling_holds_also_where_truncation_rose_slowly():
    rates = [min(0.1 + 0.004 * step, 0.97) for step in range(300)]
    _, actions = follow([{"rollout/truncation_rate": rate} for rate in rates])
    first = next(step for step, name in names(actions) if name == "raised")
    assert rates[first - 1] == pytest.approx(0.9, abs=0.02)


def test_growth_becomes_normal():
    states, _ = follow([HEALTHY] * 40 + [HUMP] * 400)
    assert states[-1].watched["length"].normal == pytest.approx(150, rel=0.05)
    assert not states[-1].warned


def test_growth_does_not_count_as_time_for_a_measure_to_help():
    rows = [HEALTHY] * 45 + [DAMAGE] * 2 + [HUMP] * 8 + [DAMAGE] * 3
    assert [name for _, name in names(follow(rows)[1])] == ["warned", "damaged", "raised"]


def test_save_soon_after_a_warning_is_not_a_healthy_one():
    states, _ = follow([HEALTHY] * 40 + [LONGER] * 4 + [HEALTHY] * 20)
    assert states[49].warned
    assert states[49].quiet > 0
    assert states[49].recent_save is None
    assert states[59].recent_save == 60


def test_warning_policy_changes_nothing_and_off_remembers_nothing():
    rows = [HEALTHY] * 40 + [DAMAGE] * 80
    states, actions = follow(rows, replace_policy("warn"))
    assert [name for _, name in names(actions)] == ["warned", "damaged"]
    assert actions[-1][1].details["next"] == "nothing, as guard.policy=warn"
    assert (states[-1].beta, states[-1].measure) == (0, "none")
    assert follow(rows, replace_policy("off")) == ([GuardState()] * 120, [])


def replace_policy(policy):
    return ACT.model_copy(update={"policy": policy})


def test_healthy_noise_causes_no_action():
    noise = random.Random(1)

    def row():
        return {
            "rollout/truncation_rate": sum(noise.random() < 0.3 for _ in range(64)) / 64,
            "rollout/response_length_mean": noise.gauss(300, 30),
            "kl/teacher": abs(noise.gauss(0.1, 0.04)),
            "tokens/repetitive_share": max(0.0, noise.gauss(0.02, 0.02)),
        }

    _, actions = follow([row() for _ in range(2000)])
    assert names(actions) == []


def test_save_counts_as_healthy_only_after_patience_steps_without_symptoms():
    states, _ = follow([HEALTHY] * 60)
    assert [(state.older_save, state.healthy_save) for state in states[:40]] == [
        *[(None, None)] * 19,
        *[(None, 10)] * 10,
        *[(10, 20)] * 10,
        (20, 30),
    ]
    assert states[24].kept_saves == {10, 20}
    late, _ = follow([HEALTHY] * 24 + [DAMAGE] * 20, every=8)
    assert late[23].recent_save == 24  # that of step 16 came before step 8 had proved healthy
    assert late[-1].healthy_save == 8
    assert late[-1].recent_save is None


def test_without_a_healthy_save_the_run_stops_instead_of_rolling_back():
    _, actions = follow([HEALTHY] * 45 + [DAMAGE] * 40, every=1000)
    assert [name for _, name in names(actions)][-1] == "stopped"


def test_damage_during_a_return_is_not_learnt_as_normal():
    states, _ = follow([HEALTHY] * 45 + [DAMAGE] * 30)
    assert states[70].watched["truncation"].normal == states[46].watched["truncation"].normal


def test_state_from_a_checkpoint_decides_the_same():
    rows = [HEALTHY] * 45 + [DAMAGE] * 45
    states, actions = follow(rows)
    for cut in (20, 43, 47, 58, 66, 70, 81):
        text = json.dumps(asdict(states[cut - 1]))
        restored = TypeAdapter(GuardState).validate_json(text, strict=True)
        assert restored == states[cut - 1]
        later, more = follow(rows[cut:], state=restored, first=cut + 1)
        assert later == states[cut:]
        assert more == [(step, action) for step, action in actions if step > cut]


def test_state_of_an_earlier_version_is_read():
    series = {"recent": [0.1] * 5, "learnt": 40, "start": 0.1, "normal": 0.1, "variance": 0.0}
    old = {"watched": {"truncation": series}, "must_roll_back": False, "healthy_save": 20}
    state = TypeAdapter(GuardState).validate_json(json.dumps(old), strict=True)
    _, actions = follow([CAPPED] * 20, state=state, first=41)
    assert names(actions)[:3] == [(45, "warned"), (45, "damaged"), (45, "raised")]
    assert actions[-1][1].details["to_step"] == 20


def test_measures_end_when_the_policy_is_weakened():
    states, _ = follow([HEALTHY] * 45 + [DAMAGE] * 25)
    assert states[-5].must_roll_back
    state, _ = decide(replace_policy("warn"), states[-5], 71, DAMAGE, saved=False)
    assert (state.measure, state.beta, state.lambda_) == ("none", 0, 0)
    assert not state.must_roll_back
    stopped = replace(states[-1], measure="stopped")
    assert decide(replace_policy("warn"), stopped, 72, HEALTHY, False)[0].measure == "none"
