"""Hidden states that a step multiplies by each output head, per trained token.

These products are most of a loss's work.
"""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.step import train_step
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_config

OBJECTIVES = (
    {"name": "opd"},
    {"name": "opd", "advantage": {"control_variate": True}},
    {"name": "gkd"},
    {"name": "student_topk", "top_k": 4},
    {"name": "lsm", "top_k": 4},
)

RETURNS = {"name": "opd", "discount": 0.9}


def test_each_head_is_multiplied_once_per_token(tmp_path):
    """The teacher's metrics (log-probabilities, entropies) need no further product. Golden tokens
    meet only the student's head, once."""
    run_ranks(1, count_products_of_each_objective, tmp_path)


def count_products_of_each_objective(rank: int, world_size: int, directory: Path) -> None:
    for number, objective in enumerate(OBJECTIVES):
        assert products_per_token(directory, f"heads_{number}", objective, 1) == [1, 1, 1], (
            objective
        )
    # Discounted returns need the log-probabilities of later tokens. With two minibatches the
    # student's head is run once more for the behaviour policy; with one, a separate pass runs
    # the heads of student and reference.
    assert products_per_token(directory, "two_minibatches", RETURNS, 2) == [2, 1, 1]
    assert products_per_token(directory, "one_minibatch", RETURNS, 1) == [2, 1, 2]
    # The old policy of stale rollouts is the engine's, so the behaviour policy is not scored.
    assert products_per_token(directory, "stale", RETURNS, 2, max_staleness=1) == [2, 1, 2]


def products_per_token(
    directory: Path, name: str, objective: dict[str, Any], minibatches: int, **rollout: int
) -> list[float]:
    """Rows multiplied per rollout token in one step, of [student, teacher, reference] head; the
    student's without one for each golden token.
    """
    train = {"minibatches": minibatches}
    config = tiny_config(directory, name, objective=objective, train=train, rollout=rollout)
    run = build_run(RunInputs(config), start_world(config.parallel, 0))
    assert run.head
    assert run.teacher
    assert run.reference
    heads = (run.head, run.teacher.head, run.reference.head)
    rows: Counter[int] = Counter()
    product = Head.logits

    def counted(head, hidden_CH, *given, **named):
        rows[head.weight_VH.data_ptr()] += len(hidden_CH)
        return product(head, hidden_CH, *given, **named)

    with patch.object(Head, "logits", counted):
        metrics = train_step(run, TrainState()).metrics.values_by_key()
    trained, rollouts = metrics["tokens/trained"], metrics["tokens/rollout"]
    assert trained is not None
    assert rollouts
    golden = trained - rollouts
    assert golden > 0
    rows[run.head.weight_VH.data_ptr()] -= int(golden)
    for metric in ("logprob/teacher", "entropy/teacher"):
        assert metrics[metric] is not None
    stop_world()
    return [rows[head.weight_VH.data_ptr()] / rollouts for head in heads]
