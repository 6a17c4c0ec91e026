"""Two hosts on this machine: network namespaces with a link that can be disconnected.

They share the disk, and use only loopback addresses, which are not visible outside a namespace.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.programs import Program
from valence import cli

ADDRESSES = ("127.77.0.1", "127.77.0.2")
CABLE = "cable"
"""Name of the network device on both hosts."""
SETTINGS = [
    f"net.ipv4.conf.{device}.{name}"
    for device in ("all", "default")
    for name in ("route_localnet=1", "rp_filter=0")
]
"""Without these settings Linux drops packets from loopback addresses on other devices."""


CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class There:
    """`valence` on a host."""

    name: str

    def __call__(self) -> None:
        with open(f"/run/netns/{self.name}", "rb") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.name)
        cli.main()


class Hosts:
    """Host 0 and host 1, which reach each other at ADDRESSES."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.started: list[subprocess.Popen[str]] = []

    def program(self, host: int, *words: str, output: Path, **environment: str) -> Program:
        """Starts `valence` with these words on a host. It is forked from what has torch loaded."""
        return Program(*words, output=output, main=There(self.names[host]), **environment)

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> subprocess.Popen[str]:
        """Starts a command on a host. Its output, errors among it, is a pipe."""
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self.names[host]}", "--", *command],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def pids(self, host: int) -> list[int]:
        """Ids of the processes on a host."""
        return [int(pid) for pid in _ip("netns", "pids", self.names[host]).split()]

    def disconnect(self) -> None:
        """Drop all packets. This closes no connection, and no process is notified."""
        _ip("-n", self.names[1], "link", "set", CABLE, "down")

    def reconnect(self) -> None:
        _ip("-n", self.names[1], "link", "set", CABLE, "up")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """They and what runs on them end with the block. Raises OSError where there can be none."""
    if sys.platform != "linux" or not all(map(shutil.which, ("ip", "nsenter"))):
        raise OSError("network namespaces need Linux, `ip` and `nsenter`")
    names = [f"valence-{os.getpid()}-{host}" for host in range(2)]
    hosts = Hosts(names)
    with ExitStack() as ending:
        for name in names:
            _ip("netns", "add", name)
            ending.callback(_ip, "netns", "delete", name)
        ending.callback(_end, hosts)
        for name in names:
            _run("nsenter", f"--net=/run/netns/{name}", "sysctl", "-qw", *SETTINGS)
            _ip("-n", name, "link", "set", "lo", "up")
            # else the other's address would be one's own
            _ip("-n", name, "addr", "del", "127.0.0.1/8", "dev", "lo")
            _ip("-n", name, "addr", "add", "127.0.0.1/32", "dev", "lo")
        _ip(
            "-n",
            names[0],
            "link",
            "add",
            CABLE,
            "type",
            "veth",
            "peer",
            "name",
            CABLE,
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            _ip("-n", name, "link", "set", CABLE, "up")
        yield hosts


def _end(hosts: Hosts) -> None:
    for host in range(2):
        for pid in hosts.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for process in hosts.started:
        process.kill()
        process.communicate()


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout
