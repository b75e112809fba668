"""The gradient of a step's samples, before anything clips it or takes it for an update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.records import Sample
from stable_opd_mcore.train import step
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.update import loss_of


def gradient(
    run: Run, scoring: Run, samples: Sequence[Sample], counts_B: Any = True
) -> torch.Tensor:
    """All gradients of the samples' one minibatch, on one rank.

    Args:
        scoring: the run whose models score the samples.
        counts_B: False for samples without a policy term, which count in its normaliser.
    """
    (minibatch,) = step.minibatches_of(run, samples, step.facts_of_step(scoring, samples))
    weights = minibatch.weights
    counts_B = np.broadcast_to(np.asarray(counts_B), len(samples))[minibatch.places]
    weights = replace(weights, pg_B=weights.pg_B * counts_B)
    ((batches,), _) = step.score(scoring, [replace(minibatch, weights=weights)], 1)
    if len(run.objective.each) == 1:
        batches = [replace(batch, objective=0) for batch in batches]

    def forward_step(chunk: Any, batch: Any) -> Any:
        return forward_hidden(chunk, batch), lambda hidden_TH: loss_of(run, batch, hidden_TH)

    run.student.zero_grad()
    run_forward_backward(run.student.model, batches, forward_step, world=run.world)
    return torch.cat([buffer.clone() for buffer in run.student.gradient_buffers()])
