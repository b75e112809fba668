"""Parts move to the host and back in place: views stay views, no byte is left behind or lost."""

from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.parallel.device_memory import DeviceMemory, Part
from stable_opd_mcore.parallel.world import start_world, stop_world


def parts_of(weights: torch.Tensor, gradients: torch.Tensor, state: list[torch.Tensor]):
    return [
        Part("student", lambda: [weights[:3], weights[3:]]),
        Part("gradients", lambda: [gradients], "scratch"),
        Part("optimizer", lambda: [weights[3:], *state]),  # its fp32 shard is the student's
    ]


def test_views_of_a_storage_survive_and_gradients_come_back_as_zero():
    weights, gradients = torch.arange(8.0), torch.ones(4)
    state = [torch.full((2, 2), 7.0), torch.zeros(0)]
    view, transposed = weights[2:5], state[0].T
    memory = DeviceMemory(parts_of(weights, gradients, state), {"gradients", "optimizer"})
    assert memory.num_bytes() == {"student": 32, "gradients": 16, "optimizer": 16}

    memory.keep_only("student")
    assert memory.num_bytes() == {"student": 32, "gradients": 0, "optimizer": 0}
    assert view.tolist() == [2, 3, 4], "the shard that the student owns stays"
    memory.hold("optimizer")
    assert memory.num_bytes() == {"student": 32, "gradients": 0, "optimizer": 16}
    transposed.mul_(2)
    for _ in range(2):
        memory.hold("student")
        memory.hold("optimizer", "gradients")
    assert state[0].tolist() == [[14, 14], [14, 14]], "the second move copied the change"
    assert gradients.tolist() == [0, 0, 0, 0]


def test_a_constant_part_is_copied_once():
    weights = torch.ones(4)
    memory = DeviceMemory([Part("frozen", lambda: [weights], "constant")], {"frozen"})
    memory.hold()
    memory.hold("frozen")
    weights.fill_(5)  # nobody does this to a frozen model
    memory.hold()
    memory.hold("frozen")
    assert weights.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("in_files", [False, True])
def test_parts_that_take_turns_are_on_the_device_one_at_a_time(in_files, tmp_path):
    weights = {name: torch.full((4,), float(place)) for place, name in enumerate("abs")}
    parts = [Part(n, lambda n=n: [weights[n]], "constant", takes_turns=n != "s") for n in weights]
    memory = DeviceMemory(parts, directory=str(tmp_path) if in_files else None)
    for names in ("a", "b", "ab", "b", ""):
        memory.take_turn(*names)
        assert [memory.num_bytes()[n] for n in weights] == [
            16 * (n in (*names, "s")) for n in weights
        ]
        assert all(weights[n].tolist() == [float("ab".index(n))] * 4 for n in names)
    memory.keep_only("s")  # as the next phase does
    assert memory.num_bytes() == {"a": 0, "b": 0, "s": 16}
    assert (f"{tmp_path}/" in Path("/proc/self/maps").read_text()) == in_files
    assert not any(tmp_path.iterdir())


def test_a_directory_without_room_for_teachers_is_refused(tmp_path):
    part = Part("a", lambda: [torch.ones(4)], "constant", takes_turns=True)
    with pytest.raises(UserError, match=r"teachers_directory=.*no room .*No such file.*drop it"):
        DeviceMemory([part], directory=str(tmp_path / "absent")).take_turn()


def test_replaced_tensors_leave_no_host_memory():
    state = [torch.ones(4)]
    memory = DeviceMemory([Part("optimizer", lambda: state)], {"optimizer"})
    for size in (5, 6, 7):  # a loaded checkpoint replaces the state
        memory.hold()
        memory.hold("optimizer")
        state[0] = torch.ones(size)
    memory.hold()
    assert [host.numel() for host in memory._hosts.values()] == [7 * 4]


def test_the_next_hold_takes_a_lent_device_back_first():
    world = start_world(ParallelConfig(), seed=0)
    weights, events = torch.ones(4), []
    memory = DeviceMemory([Part("student", lambda: [weights])], {"student"}, world.device)
    memory.lend(lambda: events.append(memory.num_bytes()["student"]), keep=("student",))
    assert (memory.is_lent, memory.num_bytes()) == (True, {"student": 16})
    memory.keep_only()
    memory.bring("student")  # the weights are sent again: still lent
    memory.keep_only()
    with pytest.raises(AssertionError, match="already lent"):
        memory.lend(lambda: None)
    assert not events
    memory.hold("student")
    assert events == [0], "the servers released the device before the trainer took it"
    assert (memory.is_lent, weights.tolist()) == (False, [1, 1, 1, 1])
    buffer = parallel_state.get_global_memory_buffer().buffer
    buffer[("gathered", torch.float32)] = torch.ones(4)
    DeviceMemory().lend(lambda: None)
    assert not buffer, "nothing is offloaded, and the caches are emptied all the same"
    stop_world()
