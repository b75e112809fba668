"""One block of rows: its leaves, their gradients by the logits, and what a block costs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stable_opd_mcore.config.schema import ObjectiveConfig
from stable_opd_mcore.losses import torch_ops
from stable_opd_mcore.losses.leaves import Block, support_kl
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.token_losses import PolicyLoss, Rows
from tests.losses.cases import make_case, make_config
from tests.losses.definitions import kl_divergence
from tests.losses.test_fused import case_of, fused_in_blocks

close = torch.testing.assert_close


def test_divergence_on_a_support():
    """p = (2/3, 1/3) and q = (1/3, 2/3) there. Constants added to the logits cancel."""
    student, teacher = torch.tensor([[0.4, 0.2]]).log(), torch.tensor([[0.1, 0.2]]).log()
    for shift in (0.0, 7.0):
        logits = (student + shift).requires_grad_()
        value = support_kl(logits, teacher.double() - shift)
        kl, gap = math.log(2) / 3, math.log(2)
        close(value, torch.tensor([kl]))
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        close(gradient, torch.tensor([[2 / 3 * (gap - kl), 1 / 3 * (-gap - kl)]]))


def test_every_leaf_of_an_objective_has_its_gradient():
    """An objective that no registry has: a product of three leaves, and the KL to the reference."""

    def product(rows: Rows, settings: ObjectiveConfig) -> PolicyLoss:
        assert rows.divergence is not None
        return PolicyLoss(settings.clip * rows.divergence * rows.logprob * rows.token_logprob)

    case = make_case(make_config(objective__name="gkd", kl__beta=0.5))
    terms = replace(case.objective.terms, policy=product, stop_ids=(1, 2))
    batch = replace(case.batch, sft_weight_N=0 * case.batch.sft_weight_N)
    logits = case.hidden_NH @ case.weight_VH.T
    others = {
        "teacher": case.teacher_hidden_NH @ case.teacher_weight_VH.T,
        "reference": case.reference_hidden_NH @ case.reference_weight_VH.T,
    }
    z = logits.clone().requires_grad_()
    ids = torch.cat([batch.targets_N[:, None], torch.tensor([[1, 2]]).expand(13, 2)], 1)

    def outcomes(x):
        log_p = x.log_softmax(1)
        merged = log_p[:, 1:3].logsumexp(1, keepdim=True)
        return torch.cat([log_p[:, :1], merged, log_p[:, 3:]], 1)

    token = z.log_softmax(1).gather(1, ids[:, :1])[:, 0]
    is_stop = (batch.targets_N == 1) | (batch.targets_N == 2)
    outcome = torch.where(is_stop, outcomes(z)[:, 1], token)
    teacher, reference = (kl_divergence(outcomes(z), outcomes(x)) for x in others.values())
    loss = batch.pg_weight_N * 0.2 * teacher * outcome * token + batch.kl_weight_N * reference
    (expected,) = torch.autograd.grad(loss.sum(), z)
    block = Block.of(
        terms, batch, Head(case.weight_VH, 0, 31), {"student": logits, **others}, ids, None
    )
    output, by_leaf = block.differentiate(None)
    close(output.loss, loss.detach())
    close(block.write_gradient_(by_leaf), expected)


class Operations(TorchDispatchMode):
    """Counts operations, those of the passes over the logits as one kernel each."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    def as_one(self, name):
        function = getattr(torch_ops, name)

        def counted(*args):
            self.counts[name] += 1
            with _disable_current_modes():
                return function(*args)

        return counted


def operations_per_block(monkeypatch, variant: str) -> Counter[str]:
    counts = []
    for blocks in (3, 4):
        mode = Operations()
        with monkeypatch.context() as patched:
            for name in ("shard_sums", "jsd_sums", "write_gradient_"):
                patched.setattr(torch_ops, name, mode.as_one(name))
            with mode:
                fused_in_blocks(case_of(variant, 8 * blocks, 64, temperature=0.7), 8)
        counts.append(mode.counts)
    return counts[1] - counts[0]


@pytest.mark.parametrize(
    "variant", ["sft", "opd_discounted", "opd_vopd", "gkd_jsd", "lsm_exact_kl", "student_topk_k3"]
)
def test_a_block_copies_nothing_between_host_and_device(monkeypatch, variant):
    """On a GPU each of these would wait for, or copy, a number."""
    found = operations_per_block(monkeypatch, variant)
    waiting = {"_local_scalar_dense", "nonzero", "lift_fresh", "equal", "isin", "unique"}
    assert not waiting & found.keys()


def test_operations_of_a_block(monkeypatch):
    """More would take the host longer than the four products take a GPU (docs/loss.md)."""
    for variant, most in (("opd_exact_kl", 230), ("sft", 80), ("lsm_exact_kl", 310)):
        assert operations_per_block(monkeypatch, variant).total() <= most
