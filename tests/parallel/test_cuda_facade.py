"""The stand-in for torch.cuda: one device, streams that do nothing, torch's own generator."""

import torch

from stable_opd_mcore.parallel.cuda_facade import FACADE, Stream


def test_the_generator_is_torchs_default_one():
    before = FACADE.get_rng_state()
    sampled = torch.rand(4)
    FACADE.set_rng_state(before, device="cuda:0")
    assert torch.equal(torch.rand(4), sampled)
    assert torch.equal(FACADE.random.get_rng_state(), torch.get_rng_state())
    FACADE.manual_seed_all(5)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_streams_and_events_do_nothing():
    stream = FACADE.current_stream()
    with stream as entered, FACADE.stream(stream):
        assert entered is stream
    event = FACADE.Event(enable_timing=True)
    assert event.query()
    assert event.record(stream) is stream.wait_event(event) is event.synchronize() is None
    assert stream.record_event(event) is event
    assert isinstance(stream.record_event(), Stream)
