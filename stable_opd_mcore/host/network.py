"""Which of this machine's addresses and interfaces lead to another machine.

gloo listens at the address of the machine's own name unless an interface is named. Debian and
Ubuntu give that name 127.0.1.1, so ranks on other machines would connect to themselves. Not here:
NCCL, which ignores loopback by itself.
"""

import contextlib
import ipaddress
import os
import socket

import psutil

_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def address_towards(host: str) -> str:
    """This machine's source address for packets to `host`, which may be itself; sends nothing.

    Raises:
        OSError: there is no route to `host`, or its name is unknown.
    """
    try:
        addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise OSError(f"{host}: {error.strerror}") from error
    for family, kind, _, _, target in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    raise OSError(f"there is no route from this machine to {host}")


def gloo_settings(host: str) -> dict[str, str]:
    """Environment variables that make gloo use the interface towards `host`.

    Empty if that interface is loopback (all ranks are on one machine) or the user has named one.
    """
    address = address_towards(host)
    if _GLOO_VARIABLE in os.environ or ipaddress.ip_address(address).is_loopback:
        return {}
    interfaces = psutil.net_if_addrs().items()
    name = next(name for name, bound in interfaces if address in {each.address for each in bound})
    return {_GLOO_VARIABLE: name}
