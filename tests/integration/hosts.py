"""Several hosts on one machine: one network namespace per host, joined by a switch.

    with hosts(["trainer", "server"], gbit_per_second=10) as (trainer, server):
        subprocess.run(trainer.command("ping", "-c1", "server"))

Each host has its own loopback, address and hostname; the others resolve its hostname to its address
and cannot reach what a host binds to 127.0.0.1. This process keeps its network and joins the
switch as a login node does: it reaches the hosts by address, and they reach it at `Host.login`, as
"login" and by this machine's name. Files, processes and users are shared. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000  # linux/sched.h
NAMESPACE_FILES = Path("/etc/netns")  # `ip netns exec` mounts these files over /etc
AS_HOST = 'hostname "$0" && exec "$@"'
BURST_BYTES = 1_000_000  # the largest burst that leaves a host at full speed


@dataclass(frozen=True)
class Host:
    """One network namespace."""

    name: str
    address: str
    namespace: str
    login: str
    """This process' address, as the hosts see it."""

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host."""
        as_host = ["unshare", "--uts", "sh", "-c", AS_HOST, self.name]
        return ["ip", "netns", "exec", self.namespace, *as_host, *command]


@contextlib.contextmanager
def on(host: Host) -> Iterator[None]:
    """Sockets and processes that this thread opens inside the block use the host's network.

    Host names are still this machine's: use addresses, and set GLOO_SOCKET_IFNAME=eth0 for gloo.
    """
    with (
        open("/proc/thread-self/ns/net") as own_network,
        open(NAMESPACES / host.namespace) as host_network,
    ):
        _enter(host_network.fileno())
        try:
            yield
        finally:
            _enter(own_network.fileno())


def _enter(namespace: int) -> None:
    """Call setns(2); Python has it from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def cannot_make_hosts() -> str:
    """The reason why this machine cannot make hosts, or ""."""
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("hostname", "hostname")):
        if shutil.which(tool) is None:
            return f"no {tool}: apt-get install {package}"
    probe = f"sopd{os.getpid()}-probe"
    result = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if result.returncode:
        return f"no network namespaces here: {result.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return ""


@contextlib.contextmanager
def hosts(
    names: Sequence[str], gbit_per_second: float | None = None, own_name: str | None = None
) -> Iterator[list[Host]]:
    """Make hosts with these names and remove them at the end.

    own_name: the address to which each host resolves its own name, such as 127.0.1.1, which
    Debian's installer writes; None: the address that the other hosts use.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    number = random.choice([n for n in range(256) if f"so{n}sw" not in interfaces])
    tag, switch = f"so{number}", f"so{number}sw"
    network = f"198.18.{number}"  # RFC 2544: for tests between machines
    login = f"{network}.1"
    all_hosts = [
        Host(name, f"{network}.{10 + index}", f"{tag}-{name}", login)
        for index, name in enumerate(names)
    ]
    with contextlib.ExitStack() as stack:
        _run("ip", "link", "add", switch, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", switch)
        _run("ip", "address", "add", f"{login}/24", "dev", switch)
        _run("ip", "link", "set", switch, "up")
        for index, host in enumerate(all_hosts):
            stack.enter_context(_names(host, all_hosts, own_name or host.address))
            _run("ip", "netns", "add", host.namespace)
            stack.callback(_run, "ip", "netns", "del", host.namespace)
            port = f"{tag}p{index}"
            _plug_in(host, port, switch, gbit_per_second)
            stack.callback(_run, "ip", "link", "del", port)
        yield all_hosts


@contextlib.contextmanager
def _names(host: Host, all_hosts: Sequence[Host], own_address: str) -> Iterator[None]:
    """Write the host's /etc/hosts, and remove it at the end."""
    folder = NAMESPACE_FILES / host.namespace
    folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", f"{host.login} login {socket.gethostname()}"]
    lines += [f"{other.address} {other.name}" for other in all_hosts if other is not host]
    lines += [f"{own_address} {host.name}"]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    try:
        yield
    finally:
        shutil.rmtree(folder)


def _plug_in(host: Host, port: str, switch: str, gbit_per_second: float | None) -> None:
    _run(
        *("ip", "link", "add", port, "type", "veth"),
        *("peer", "name", "eth0", "netns", host.namespace),
    )
    _run("ip", "link", "set", port, "master", switch, "up")
    _run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", "eth0"))
    for device in ("lo", "eth0"):
        _run(*host.command("ip", "link", "set", device, "up"))
    if gbit_per_second is not None:
        shape = ["rate", f"{gbit_per_second}gbit", "burst", str(BURST_BYTES), "latency", "50ms"]
        _run(*host.command("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
