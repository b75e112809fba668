"""Seconds from a device's rates, by hand."""

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.planning.hardware import GIB, Device, device_named


def test_seconds_and_bytes_are_those_of_the_rates():
    device = Device("x", 10.0, 2.0, 100.0, 50.0, 20.0, 5.0, 2.0, 0.5, 0.8, 0.25)
    assert device.usable_bytes == 8 * GIB
    assert device.matmul_seconds(1e14) == pytest.approx(2.0)
    assert device.memory_seconds(4e10) == pytest.approx(1.0)
    assert device.link_seconds(5e9, within_node=True) == pytest.approx(1.0)
    assert device.link_seconds(5e9, within_node=False) == pytest.approx(4.0)
    assert device.host_seconds(5e9) == pytest.approx(10.0)


def test_unknown_devices_are_refused_with_the_known_ones():
    assert device_named("h200").memory_gib == 139.0
    with pytest.raises(UserError, match="--gpu v100: unknown; expected one of h100, h200"):
        device_named("v100")
