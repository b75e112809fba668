"""The guard's measures in real runs: carried out, the same on two ranks, identical after a kill.

The learning rate of the warm-up, which rises by design, replaces the metrics of a collapse.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.objective_settings import KLConfig
from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.monitoring.metric_sinks import MetricSinks
from stable_opd_mcore.train.loss_weights import Adapted, loss_weights_of
from stable_opd_mcore.train.oversight import guard, onset
from stable_opd_mcore.train.oversight.guard import Action, GuardState
from stable_opd_mcore.train.oversight.measures import (
    CollapsedError,
    warn_of_equal_models,
    with_normal_values,
    write_actions,
)
from stable_opd_mcore.train.oversight.onset import Detector, Series
from stable_opd_mcore.train.persistence.state import TrainState
from tests.parallel.launch import run_ranks
from tests.train.killed import run_killed_at
from tests.train.runs import metrics_of, tiny_architecture, tiny_config

pytestmark = pytest.mark.slow

GUARD = {"policy": "act", "max_beta": 0.8}
KILLED_AT = 6  # the step after which the run returns to a checkpoint


def config_of(directory: Path, name: str, **sections):
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, **sections.pop("rollout", {})}
    sections = {"guard": GUARD, "checkpoint": {"every": 1, "keep": 1}, **sections}
    return tiny_config(
        directory,
        name,
        student={"architecture": tiny_architecture(16, 2)},
        teacher={"architecture": tiny_architecture(32, 2), "stop_token_ids": [0]},
        objective={"name": "opd", "stop_class": False},
        rollout=rollout,
        sampling=sections.pop("sampling", {"max_new_tokens": 8}),
        optimizer={"lr": 2e-2, "warmup_steps": 20},
        train={"steps": 14},
        kl={"beta": 0.0},
        mixture={"lambda": 0.0},
        **sections,
    )


def watch_learning_rate() -> None:
    onset.WINDOW, onset.BASELINE, guard.PATIENCE, guard.HEALTHY_AFTER = 1, 3, 2, 2
    onset.NOISE = 1.0  # the rise of the warm-up counts as noise of the rate
    onset.DETECTORS.clear()
    onset.DETECTORS["rate"] = Detector("optimizer/lr", "higher", 0.0)
    onset._is_damage = lambda found, watched: bool(found)


def run_to_collapse(rank: int, world_size: int, directory: str, name: str, sections: dict) -> None:
    """Train until the guard stops the run; rank 0 leaves the message."""
    watch_learning_rate()
    with pytest.raises(CollapsedError) as stopped:
        train(config_of(Path(directory), name, **sections), show_progress=False)
    if rank == 0:
        (Path(directory) / f"{name}.message").write_text(str(stopped.value))


def test_a_teacher_that_says_what_the_student_says_is_named_at_the_start(caplog):
    for step, kl in ((1, 0.1), (2, -5e-4), (3, None), (4, 0.0)):
        warn_of_equal_models(step, {"kl/teacher": kl})
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("step 2: KL(student || teacher) is -0.0005, so")


def test_a_recovered_run_says_what_is_in_force(tmp_path, caplog):
    config = config_of(tmp_path, "run").model_copy(update={"kl": KLConfig(beta=0.1)})
    recovered = Action("recovered", {"beta": 0.0, "lambda": 0.0})  # the guard's own part has ended
    with MetricSinks(config.run.path, config, 0) as sinks:
        write_actions(sinks, 9, [recovered], loss_weights_of(config, Adapted(), GuardState()))
    assert caplog.messages == ["step 9: guard recovered: beta now 0.1, lambda now 0"]
    (event,) = metrics_of(config.run.path)
    assert (event["beta"], event["lambda"]) == (0.1, 0.0)


def test_normal_values_are_forgotten_when_other_data_were_accepted(tmp_path, world):
    """Also by a run that was killed after it had accepted them and before its next checkpoint."""
    files, guard_state = (
        RunDirectory(tmp_path),
        GuardState({"length": Series(normal=9.0)}, beta=0.5),
    )
    state = TrainState(step=3, guard=guard_state)
    with MetricSinks(tmp_path, config_of(tmp_path, "run"), 0) as sinks:
        sinks.write(3, Metrics())
        sinks.write_event("settings_changed", 3, {"changes": {"optimizer.lr": [1, 2]}})
        assert with_normal_values(world, files, state) == state
        sinks.write_event("settings_changed", 3, {"changes": {"data.train.path": ["a", "b"]}})
    changed = with_normal_values(world, files, state)
    assert changed.guard == replace(guard_state, watched={})
    assert with_normal_values(world, files, replace(state, step=4)).guard == guard_state
    assert with_normal_values(world, files, TrainState()) == TrainState()


def events_of(directory: Path) -> list[tuple[str, int]]:
    rows = [row for row in metrics_of(directory) if row.get("event") == "guard"]
    return [(row["action"], row["after_step"]) for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, run_to_collapse, str(directory), "whole", {})
    return directory


def test_measures_are_carried_out_in_order(runs):
    assert events_of(runs / "whole") == [
        ("warned", 4),
        ("damaged", 4),
        ("raised", 4),
        ("rolled_back", 6),
        ("rolled_back", 8),
        ("stopped", 10),
    ]
    rows = [row for row in metrics_of(runs / "whole") if "event" not in row]
    assert [row["step"] for row in rows] == list(range(1, 11))  # the count of steps continues
    assert [row["kl/beta"] for row in rows[:7]] == [0, 0, 0, 0, 0.2, 0.4, 0.8]
    assert [row["mixture/lambda"] for row in rows[:7]] == [0, 0, 0, 0, 0.25, 0.5, 1]
    shares = [row["tokens/golden_share"] for row in rows[:6]]
    assert shares[:4] == [0] * 4
    assert min(shares[4:]) > 0
    assert [row["kl/reference"] for row in rows[:4]] == [None] * 4  # beta 0 scores no reference


def test_a_return_restores_the_weights_of_the_healthy_checkpoint(runs):
    """The distance to the reference, the student of step 0, is again that after one step."""
    distance = [row.get("kl/reference") for row in metrics_of(runs / "whole") if "event" not in row]
    assert distance[5] > 4 * distance[6]
    assert distance[7] > 4 * distance[8]


def test_stopped_run_has_a_report_and_names_the_healthy_checkpoint(runs):
    message = (runs / "whole.message").read_text()
    healthy = runs / "whole" / "checkpoints" / "step_000001"
    assert healthy.is_dir()  # kept although checkpoint.keep is 1
    assert str(healthy) in message
    assert "after step 10" in message
    assert "--accept-changes. The student stops on other tokens than the teacher" in message
    assert message.endswith("set objective.stop_class=true")
    assert (runs / "whole" / "report.html").is_file()
    assert not (runs / "whole" / "model").exists()
    run_ranks(1, run_to_collapse, str(runs), "whole", {})  # resumed: it stays stopped
    assert (runs / "whole.message").read_text() == message
    assert len(metrics_of(runs / "whole")) == 10 + 6


def test_run_killed_between_decision_and_return_is_identical(runs):
    run_killed_at(KILLED_AT, run_to_collapse, str(runs), "killed", {})
    assert metrics_of(runs / "killed")[-1]["action"] == "rolled_back"
    run_ranks(1, run_to_collapse, str(runs), "killed", {})
    assert metrics_of(runs / "killed") == metrics_of(runs / "whole")


def test_a_return_drops_what_is_sampled_ahead(runs):
    """In the same run and in one that was killed between the decision and the return."""
    ahead = {"rollout": {"max_staleness": 2, "partial": True}}
    run_killed_at(KILLED_AT, run_to_collapse, str(runs), "ahead", ahead)
    run_ranks(1, run_to_collapse, str(runs), "ahead", ahead)
    assert events_of(runs / "ahead") == events_of(runs / "whole")
    first_tokens = [
        {
            rollout.weight_version
            for rollout in read_rollouts(RunDirectory(runs / "ahead").rollouts(step))
        }
        for step in range(1, 11)
    ]
    # The run resumes after step 5 and returns after steps 6 and 8: to versions 5, 7 and 10, which
    # sample the next rollouts.
    assert first_tokens == [{version} for version in (0, 0, 0, 1, 2, 5, 7, 7, 10, 10)]


def test_actions_and_loss_weights_are_the_same_on_two_ranks(runs):
    run_ranks(2, run_to_collapse, str(runs), "tp2", {"parallel": {"tensor": 2}})
    one, other = (metrics_of(runs / name) for name in ("whole", "tp2"))
    assert [row for row in other if "event" in row] == [row for row in one if "event" in row]
    for key in ("kl/beta", "mixture/lambda"):
        assert [row.get(key) for row in other] == pytest.approx([row.get(key) for row in one])
    one, other = (
        [row["kl/reference"] for row in rows if row.get("kl/reference")] for rows in (one, other)
    )
    assert other == pytest.approx(one, rel=1e-3)
