"""How often a step multiplies an output head, whose products are most of a loss's work."""

from collections import Counter
from pathlib import Path
from unittest.mock import patch

from stable_opd_mcore.losses.head import Head
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.state import TrainState
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


def test_every_head_is_multiplied_once_a_token(tmp_path):
    """Metrics of the teacher (log-probabilities, entropies) come from the loss's own product."""
    run_ranks(1, take_one_step_each, tmp_path)


def take_one_step_each(rank: int, world_size: int, directory: Path) -> None:
    for number, objective in enumerate(OBJECTIVES):
        config = tiny_config(directory, f"heads_{number}", objective=objective)
        run = build_run(config, start_world(config.parallel, 0))
        assert run.head and run.teacher and run.reference
        heads = (run.head, run.teacher.head, run.reference.head)
        rows: Counter[int] = Counter()
        product = Head.logits

        def counted(head, hidden_CH, *given, rows=rows, product=product, **named):
            rows[head.weight_VH.data_ptr()] += len(hidden_CH)
            return product(head, hidden_CH, *given, **named)

        with patch.object(Head, "logits", counted):
            metrics = train_step(run, TrainState()).metrics.values_by_key()
        trained = metrics["tokens/trained"]
        assert [rows[head.weight_VH.data_ptr()] for head in heads] == [trained] * 3, objective
        for name in ("logprob/teacher", "entropy/teacher"):
            assert metrics[name] is not None
        stop_world()
