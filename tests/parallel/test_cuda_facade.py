"""The stand-in for torch.cuda: one device, streams that do nothing, torch's own generator."""

from __future__ import annotations

import torch

from stable_opd_mcore.parallel.cuda_facade import FACADE, Stream


def test_the_generator_is_torchs_default_one():
    before = FACADE.get_rng_state()
    drawn = torch.rand(4)
    FACADE.set_rng_state(before, device="cuda:0")
    assert torch.equal(torch.rand(4), drawn)
    assert torch.equal(FACADE.random.get_rng_state(), torch.get_rng_state())
    FACADE.manual_seed_all(5)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_streams_and_events_do_nothing_but_keep_time():
    stream = FACADE.current_stream()
    with stream as entered, FACADE.stream(stream):
        assert entered is stream
    first, last = FACADE.Event(enable_timing=True), FACADE.Event()
    first.record(stream)
    torch.rand(1000).sort()
    last.record()
    assert 0 < first.elapsed_time(last) == -last.elapsed_time(first)
    assert last.query()
    assert stream.wait_event(first) is last.synchronize() is None
    assert stream.record_event(first) is first
    assert isinstance(stream.record_event(), Stream)
