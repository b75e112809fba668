"""Which tensors are fake, what reading them gives, and the bytes that they would take."""

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from stable_opd_mcore.commands.rehearse.fake_tensors import fake_tensors


def test_bytes_are_those_of_the_tensors_that_exist():
    with fake_tensors() as live:
        first = torch.zeros(1000, dtype=torch.bfloat16)
        view = first.view(10, 100)
        assert live.bytes == 2000
        second = first.float() + 1
        assert (live.bytes, live.peak_bytes) == (6000, 10000)
        del second, first
        assert live.bytes == 2000  # the view
        live.restart()
        assert live.peak_bytes == 2000
        del view
    assert live.bytes == 0


def test_whole_numbers_are_real_and_fractions_read_as_one():
    with fake_tensors():
        lengths = torch.tensor([3, 4, 5])
        assert (lengths.cumsum(0) - 1).tolist() == [2, 6, 11]
        assert torch.arange(0, 6, 2).tolist() == [0, 2, 4]
        logits = torch.zeros(3, 10**12)  # 4 TB
        assert logits[lengths - 3].shape == (3, 10**12)
        assert float(logits.sum()) == 1.0
        assert bool(logits.isfinite().all())


def test_megatrons_scale_of_auxiliary_losses_stays_this_process_own():
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(()))  # any shape will do
    kept = MoEAuxLossAutoScaler.main_loss_backward_scale
    with fake_tensors():
        for _ in range(2):
            MoEAuxLossAutoScaler.set_loss_scale(torch.ones(()))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is kept
