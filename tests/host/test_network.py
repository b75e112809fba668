"""Addresses and interfaces of this machine; tests/integration uses several hosts."""

import psutil

from stable_opd_mcore.host.network import address_towards, gloo_settings


def test_loopback_needs_no_gloo_setting(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert gloo_settings("localhost") == {}


def test_gloo_uses_the_interface_that_has_the_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    own_address = address_towards("192.0.2.1")  # RFC 5737: no machine has it; the default route
    name = gloo_settings(own_address)["GLOO_SOCKET_IFNAME"]
    assert own_address in [bound.address for bound in psutil.net_if_addrs()[name]]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    assert gloo_settings(own_address) == {}  # the user's setting stays
