"""Addresses and interfaces of this machine; several machines are in tests/integration."""

import psutil
import pytest

from stable_opd_mcore.network import address_towards, gloo_settings


def test_the_way_to_this_machine_is_loopback_and_gloo_is_left_alone(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert gloo_settings("localhost") == {}


def test_gloo_is_told_the_interface_that_has_the_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    way_out = address_towards("192.0.2.1")  # RFC 5737: nobody's, behind the default route
    name = gloo_settings(way_out)["GLOO_SOCKET_IFNAME"]
    assert way_out in [known.address for known in psutil.net_if_addrs()[name]]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    assert gloo_settings(way_out) == {}  # the user's choice stands


def test_an_unknown_host_is_an_error():
    with pytest.raises(OSError, match=r"nowhere\.invalid: "):
        gloo_settings("nowhere.invalid")
