"""A real Slurm cluster on this machine: munged, one slurmctld and several slurmd, without systemd.

    with hosts(["n1", "n2"]) as made, SlurmCluster(directory, nodes_on(made)) as cluster:
        job = cluster.submit(["slurm/stable_opd_7b.sh", "train.steps=4"], options=["--nodes=2"])
        cluster.wait(job, {"COMPLETED"}, timeout=120)

Each node is a host with its own address, loopback and hostname (hosts.py); slurmctld and sbatch run
outside, as on a login node. Without root all nodes are this machine (nodes_here). Each node has its
own port, eight CPUs and eight fake GPUs; all files and ports belong to one cluster. `sacct` is a
stand-in over `scontrol`, because there is no accounting database.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.hosts import Host
from tests.integration.processes import running

REPOSITORY = Path(__file__).parents[2]
CONFIGURATION = Path(__file__).with_name("slurm.conf")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
PREEMPTION_GRACE_SECONDS = 60
SACCT = r"""#!/bin/bash
# sacct --parsable2 -j ID, with the values of scontrol
while [ $# -gt 0 ]; do case "$1" in -j) id=$2; shift;; esac; shift; done
job=$(scontrol -o show job "$id")
field() { sed -nE "s/.*\b$1=(\S+).*/\1/p" <<<"$job"; }
echo "JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode"
echo "$id|$(field JobName)|$(field Partition)||1|$(field JobState)|$(field ExitCode)"
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]


@dataclass(frozen=True)
class Node:
    """A host that runs a slurmd."""

    name: str
    hostname: str
    address: str
    controller: str
    """Address at which this node reaches slurmctld."""
    command: Callable[..., list[str]]
    """Maps a command and its arguments to a command that runs them on this node."""

    @property
    def has_own_network(self) -> bool:
        return self.address != self.controller


def nodes_on(made: Sequence[Host]) -> list[Node]:
    return [Node(host.name, host.name, host.address, host.login, host.command) for host in made]


def nodes_here(names: Sequence[str]) -> list[Node]:
    """Nodes that share this machine's network, 127.0.0.1 included."""
    hostname, address = socket.gethostname().split(".")[0], "127.0.0.1"
    return [Node(name, hostname, address, address, lambda *command: [*command]) for name in names]


class SlurmCluster:
    """Slurm's daemons inside the `with` block; Slurm's commands reach them with `env`.

    `nodes` are those of the partitions "main" and, with higher priority, "high".
    """

    def __init__(self, directory: Path, nodes: Sequence[Node], aside: Sequence[Node] = ()):
        self.directory = directory
        self.nodes = {node.name: node for node in (*nodes, *aside)}
        partitions = {"main": nodes, "aside": aside}
        self._partitions = {
            name: ",".join(node.name for node in members)
            for name, members in partitions.items()
            if members
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        tools = directory / "bin"
        self.env = os.environ | {
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PATH": f"{tools}:{SEARCH_PATH}",
        }
        for inherited in [name for name in self.env if name.startswith(("SLURM_", "SBATCH_"))]:
            if inherited != "SLURM_CONF":
                del self.env[inherited]

    def __enter__(self) -> SlurmCluster:
        for name in ("state", "log", "run", "spool", "munge", "bin"):
            (self.directory / name).mkdir(parents=True, mode=0o755)
        (self.directory / "munge").chmod(0o700)
        sacct = self.directory / "bin" / "sacct"
        sacct.write_text(SACCT)
        sacct.chmod(0o755)
        self._write_configuration()
        try:
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-f", self.env["SLURM_CONF"])
            for node in self.nodes:
                self.start_node(node)
            self.until(lambda: self.num_idle() == len(self.nodes), 30, "all nodes idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        user = getpass.getuser()
        if "slurmctld" in self._daemons:
            self._run("scancel", "-u", user, check=False)
            deadline = time.monotonic() + 20
            while self.call("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(list(self._daemons.values())):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        self._kill_processes()

    def submit(
        self,
        script: Sequence[str],
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        directory: Path = REPOSITORY,
    ) -> str:
        """Submit a script with its arguments from `directory`; returns the id of the job."""
        answer = subprocess.run(
            ["sbatch", "--parsable", *options, *script],
            cwd=directory,
            env=self.env | (env or {}),
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 0, f"sbatch: {answer.stderr}"
        return answer.stdout.strip()

    def call(self, *command: str, check: bool = True) -> str:
        """Run a Slurm command; returns its standard output."""
        return self._run(*command, check=check).stdout

    def succeeds(self, *command: str) -> bool:
        return self._run(*command, check=False).returncode == 0

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, "" when it is absent."""
        match = re.search(rf"\b{name}=(\S*)", self.call("scontrol", "-o", "show", "job", job))
        return match.group(1) if match else ""

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def wait(self, job: str, states: set[str], timeout: float) -> str:
        """Wait until the job is in one of `states`; fail if it ends in another."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE"}
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in states:
            assert state not in final - states, f"job {job} ended as {state}, wanted {states}"
            assert time.monotonic() < deadline, f"job {job} is {state}, wanted {states}"
            time.sleep(0.3)
        return state

    def until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout} s: {what}\n{self._logs()}"
            time.sleep(0.1)

    def start_node(self, node: str) -> None:
        arguments = ("slurmd", "-D", "-N", node, "-f", self.env["SLURM_CONF"])
        self._start(f"slurmd-{node}", *self.nodes[node].command(*arguments))

    def lose_node(self, node: str) -> None:
        """Simulate a power cut: kill the daemon and all processes of its jobs."""
        self._daemons.pop(f"slurmd-{node}").kill()
        self._kill_processes(SLURMD_NODENAME=node)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def set_link(self, node: str, state: str) -> None:
        """Set the node's network link "up" or "down"; its processes continue."""
        command = ("ip", "link", "set", "eth0", state)
        subprocess.run(self.nodes[node].command(*command), check=True)

    def restore_node(self, node: str) -> None:
        self.start_node(node)
        self.call("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        self.until(lambda: self.num_idle(node) == 1, 30, f"{node} idle again")

    def num_idle(self, *names: str) -> int:
        """How many of these nodes, or of all, run no job."""
        selection = ["-n", ",".join(names)] if names else []
        listing = self.call(
            *("sinfo", "-h", "-N", "-p", ",".join(self._partitions), "-t", "idle", "-o", "%N"),
            *selection,
            check=False,
        )
        return len(listing.split())

    def _start_munge(self) -> None:
        home = self.directory / "munge"
        (home / "munge.key").write_bytes(os.urandom(1024))
        (home / "munge.key").chmod(0o600)
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={home / 'munge.key'}",
            f"--socket={self.directory / 'run/munge.sock'}",
            f"--pid-file={home / 'munged.pid'}",
            f"--log-file={home / 'munged.log'}",
            f"--seed-file={home / 'munged.seed'}",
        )
        self.until((self.directory / "run/munge.sock").is_socket, 10, "munged's socket")

    def _start(self, name: str, *command: str) -> None:
        with (self.directory / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _kill_processes(self, **variables: str) -> None:
        """Kill the cluster's processes that have these environment variables, its jobs' included.

        Slurm may lose a process of a job, such as a stopped rank, and leave it running.
        """
        wanted = variables | {"SLURM_CONF": self.env["SLURM_CONF"]}
        for pid, _, environment in running():
            if wanted.items() <= environment.items():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, signal.SIGKILL)

    def _run(self, *command: str, check: bool) -> subprocess.CompletedProcess[str]:
        answer = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert not check or answer.returncode == 0, f"{' '.join(command)}: {answer.stderr}"
        return answer

    def _logs(self) -> str:
        logs = sorted((self.directory / "log").glob("*"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-800:]}" for log in logs)

    def _write_configuration(self) -> None:
        controller, daemon, *ports = _free_ports(2 + len(self.nodes))
        nodes = [*self.nodes.values()]
        settings = CONFIGURATION.read_text().format(
            at=self.directory,
            user=getpass.getuser(),
            host=socket.gethostname().split(".")[0],
            address=nodes[0].controller,
            controller=controller,
            daemon=daemon,
            first_job=random.randrange(1, 9000),
        )
        lines = [settings]
        lines += [
            f"NodeName={node.name} NodeHostname={node.hostname} NodeAddr={node.address} Port={port}"
            " CPUs=8 RealMemory=8000 Gres=gpu:8"
            for node, port in zip(nodes, ports, strict=True)
        ]
        lines += [
            f"PartitionName={name} Nodes={members} Default={'YES' if name == 'main' else 'NO'}"
            f" MaxTime=INFINITE State=UP PriorityTier=10 GraceTime={PREEMPTION_GRACE_SECONDS}"
            for name, members in self._partitions.items()
        ]
        lines += [
            f"PartitionName=high Nodes={self._partitions['main']} MaxTime=INFINITE State=UP"
            " PriorityTier=100 PreemptMode=OFF",
        ]
        at = self.directory
        (at / "slurm.conf").write_text("\n".join(lines) + "\n")
        # `ip netns exec` mounts a /sys without cgroups, so Slurm cannot detect their version
        (at / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (at / "gres.conf").write_text(
            f"NodeName={','.join(self.nodes)} Name=gpu File=/dev/tty[0-7]\n"
        )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
