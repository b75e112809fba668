"""One block of rows: its leaves, their gradients by the logits, and what a block costs."""

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stable_opd_mcore.losses import torch_ops
from stable_opd_mcore.losses.leaves import TAIL_FLOOR, support_kl, with_tail
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.scoring.token_scores import score
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


@pytest.mark.parametrize("top_k", [4, 32])
def test_the_tail_of_a_support_is_what_the_other_columns_hold(top_k):
    """Against sums of the other columns in float64, from far above the floor to far below it."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(400, 64, generator=generator)
    support = logits.topk(top_k).indices
    logits.scatter_add_(1, support, torch.linspace(0, 20, 400)[:, None].expand(-1, top_k))
    targets = torch.zeros(400, dtype=torch.long)
    scores = score(logits, Head(torch.eye(64), 0, 64), targets, temperature=1.0, top_k=top_k)
    assert scores.topk_logprobs_NK is not None
    outside = logits.double().log_softmax(1).scatter(1, support, -math.inf).logsumexp(1)
    assert outside.min() < math.log(TAIL_FLOOR) - 2 < outside.max() - 2
    expected = outside.clamp(min=math.log(TAIL_FLOOR))
    found = with_tail(scores.topk_logprobs_NK)[:, -1]
    close(found.double(), expected, rtol=0, atol=0.05)


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
    """More would take the host longer than the four products take a GPU (docs/evidence/loss.md)."""
    for variant, most in (("opd_exact_kl", 230), ("sft", 80), ("lsm_exact_kl", 310)):
        assert operations_per_block(monkeypatch, variant).total() <= most
