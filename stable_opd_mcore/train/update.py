"""One optimizer step of the student on the scored micro-batches of a minibatch.

Weights that are not finite are neither saved nor published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.errors import NotFiniteError
from stable_opd_mcore.losses.fused import finite_scores, require_finite_scores
from stable_opd_mcore.metrics import Mean, Metrics, Same, Sum
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.weights import refuse_non_finite
from stable_opd_mcore.monitoring.health import token_metrics
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.transfers import OnHost
from stable_opd_mcore.records import LossOutput, MicroBatch
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.samples.source_metrics import groups_of, limits_of
from stable_opd_mcore.train.step_metrics import reduce_row_metrics


def update_once(
    run: Run,
    micro_batches: Sequence[MicroBatch],
    lr: float,
    step: int,
    source_B: NDArray[np.int64] | None = None,
) -> tuple[Sequence[LossOutput], Metrics]:
    """One optimizer step on scored micro-batches, whose samples are of the sources `source_B`.

    Returns:
        The loss of each micro-batch, on the last pipeline stage; and metrics, the same on every
        rank.

    Raises:
        UserError: a score, the loss, the gradient norm or an updated weight is not finite.
    """

    def forward_step(
        model_chunk: Module, micro_batch: MicroBatch
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, LossOutput]]]:
        with run.student.routers.applying(micro_batch, trains=True):
            hidden_TH = forward_hidden(model_chunk, micro_batch)
        return hidden_TH, lambda hidden_TH: loss_of(run, micro_batch, hidden_TH)

    run.student.zero_grad()
    outputs = run_forward_backward(run.student.model, micro_batches, forward_step, world=run.world)
    config = run.config
    row_metrics = token_metrics(
        outputs,
        micro_batches,
        config.longest_turn,
        groups_of(config, source_B),
        config.max_turns,
        limits_of(config, source_B),
    )
    pairs = list(zip(micro_batches, outputs, strict=True)) if outputs else []  # last stage only
    finite = [OnHost(finite_scores(*pair)) for pair in pairs]
    grad_norm = run.student.finish_grads()  # the host waits for the device here
    for is_finite, pair in zip(finite, pairs, strict=True):
        if not is_finite.values():
            require_finite_scores(*pair)
    metrics = reduce_row_metrics(run.world, row_metrics()) | run.student.routers.take()
    require_finite(metrics, grad_norm, step)  # before any weight changes
    run.student.update(lr)
    origin = f"step {step}: nothing is saved or published"
    refuse_non_finite(run.student.chunks, origin, "lower optimizer.lr, and start again")
    # Each update has its own normaliser, so a step reports the mean of its updates' losses.
    losses = {
        key: Mean(loss.total, 1)
        for key, loss in metrics.items()
        if key.startswith("loss/") and isinstance(loss, Sum)
    }
    more = {"grad_norm": Mean(grad_norm, 1), "optimizer/lr": Same(lr)}
    return outputs, Metrics({**metrics, **losses, **more})


def loss_of(run: Run, micro_batch: MicroBatch, hidden_TH: Tensor) -> tuple[Tensor, LossOutput]:
    assert run.head is not None, "the last pipeline stage holds the output head"
    objective = run.objective.each[micro_batch.objective]
    output = objective(
        hidden_TH.index_select(0, micro_batch.rows_N),
        run.head,
        micro_batch,
        teacher_head=run.teacher.head_of(micro_batch) if run.teacher else None,
        reference_head=run.reference.head if run.reference else None,
        context_group=run.world.context_group,
    )
    # The outputs are kept until the step ends. A loss with its graph would keep the tensors of its
    # micro-batch on the device until then.
    return output.loss, replace(output, loss=output.loss.detach())


def require_finite(metrics: Metrics, grad_norm: float, step: int) -> None:
    """Raise NotFiniteError before an update that would damage the weights."""
    loss = metrics["loss/total"].value()
    if loss is None or not math.isfinite(loss) or not math.isfinite(grad_norm):
        losses = ", ".join(f"{k}={metrics[k].value()}" for k in metrics if k.startswith("loss/"))
        raise NotFiniteError(
            f"step {step}: {losses}, grad_norm={grad_norm}: not finite. The update was not made "
            "and the newest checkpoint is intact. Lower optimizer.lr, or look at the step's "
            "rollouts"
        )
