"""Loads and tries an objective that is the user's own function (docs/own_code.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from stable_opd_mcore.config.objective_settings import ObjectiveConfig
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.losses.token_losses import PolicyLoss, Rows

_ROWS = 4  # rows of the trial


def own_objective(settings: ObjectiveConfig) -> Callable[[Rows, ObjectiveConfig], PolicyLoss]:
    """The function that `settings.name` names; it may return a tensor in place of a PolicyLoss.

    Raises:
        ConfigError: on rows with what it asks for it fails, or gives no finite number with a
            gradient for each.
    """
    read = settings.read()
    function = read.load()
    try:
        found = function(_trial_rows(settings), settings)
        loss = found.loss if isinstance(found, PolicyLoss) else found
        if not isinstance(loss, Tensor) or loss.shape != (_ROWS,):
            wrong = getattr(loss, "shape", type(loss).__name__)
            raise TypeError(f"it returns {wrong}, expected a tensor of shape [rows]")
        if not loss.isfinite().all() or not loss.requires_grad:
            raise ValueError(f"it returns {loss}, expected finite numbers with a gradient")
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"{read.path}: {read.name} fails on a trial of {_ROWS} rows: "
            f"{type(error).__name__}: {error}. It has only the scores that NEEDS of the file "
            f"names: {', '.join(sorted(settings.needs)) or 'none'}"
        ) from error

    def policy(rows: Rows, settings: ObjectiveConfig) -> PolicyLoss:
        found = function(rows, settings)
        return found if isinstance(found, PolicyLoss) else PolicyLoss(found)

    return policy


def _trial_rows(settings: ObjectiveConfig) -> Rows:
    """Random numbers of the right kinds in the fields that a run would fill."""
    generator = torch.Generator().manual_seed(0)

    def logprob(*shape: int) -> Tensor:
        return -torch.rand(_ROWS, *shape, generator=generator) - 0.1

    needs = settings.needs
    own = logprob().requires_grad_()
    rows = Rows(own, own, own, own.detach(), torch.tensor([True, True, True, False]))
    given: dict[str, Tensor] = {"entropy": -logprob()}
    if needs & {"teacher_logprob", "support", "divergence"}:
        given["teacher_logprob"] = logprob()
    if needs & {"support", "divergence"}:
        given["divergence"] = (-logprob()).requires_grad_()
    if "support" in needs:
        given["support"] = logprob(settings.top_k).requires_grad_()
        given["teacher_support"] = logprob(settings.top_k)
    if "given_advantage" in needs:
        given["given_advantage"] = logprob()
    return replace(rows, **given)
