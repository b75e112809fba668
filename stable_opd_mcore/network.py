"""Which of this machine's addresses and interfaces lead to another machine.

gloo listens at the address of the machine's own name unless it is told an interface, and Debian and
Ubuntu give that name 127.0.1.1: ranks on other machines would connect to themselves. Not here:
NCCL, which leaves loopback out of its own accord.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

import psutil

_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`, which may be this machine; nothing is sent.

    Raises:
        OSError: no way leads there, or the name is unknown.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise OSError(f"{host}: {error.strerror}") from error
    for family, kind, _, _, target in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    raise OSError(f"no way leads from this machine to {host}")


def gloo_settings(host: str) -> dict[str, str]:
    """Environment variables that have gloo use the interface towards `host`.

    None where the way is loopback, for then all are on one machine, or where the user names an
    interface.
    """
    address = address_towards(host)
    if _GLOO_VARIABLE in os.environ or ipaddress.ip_address(address).is_loopback:
        return {}
    interfaces = psutil.net_if_addrs().items()
    name = next(name for name, known in interfaces if address in {each.address for each in known})
    return {_GLOO_VARIABLE: name}
