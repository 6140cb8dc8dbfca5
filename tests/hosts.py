"""Two hosts for tests: network namespaces of Linux with an address each, joined by a cable of limited bandwidth."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_CARD = "eth0"


@dataclass(frozen=True)
class Cable:
    """The two ends of it, each named by the namespace where it is."""

    ends: tuple[str, str]

    def enter(self, host: int) -> None:
        """Let this process, and what it starts, be on that host. For good."""
        with open(f"/run/netns/{self.ends[host]}", "rb") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = _CARD

    def cut(self) -> None:
        """Nothing comes through any more."""
        _run("ip", "-n", self.ends[0], "link", "set", _CARD, "down")

    def mend(self) -> None:
        """Everything comes through again."""
        _run("ip", "-n", self.ends[0], "link", "set", _CARD, "up")


def bytes_through() -> tuple[int, int]:
    """Bytes received and sent by the host that this process has entered, headers included."""
    line = next(x for x in Path("/proc/thread-self/net/dev").read_text().splitlines() if x.strip().startswith(_CARD))
    fields = line.partition(":")[2].split()
    return int(fields[0]), int(fields[8])


@contextlib.contextmanager
def two_hosts(rate: str = "400mbit") -> Iterator[Cable]:
    """Hosts that are there inside the context; the test is skipped where they cannot be made. ``rate``: as for tc."""
    names = (f"offload-{os.getpid()}-0", f"offload-{os.getpid()}-1")
    try:
        try:
            for name in names:
                _run("ip", "netns", "add", name)
            _run(*f"ip link add {_CARD} netns {names[0]} type veth peer name {_CARD} netns {names[1]}".split())
            for number, name in enumerate(names, start=1):
                _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", _CARD)
                # Large packets: their headers are next to nothing beside what they carry.
                _run("ip", "-n", name, "link", "set", _CARD, "mtu", "65535", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
                bucket = f"rate {rate} burst 256kb latency 400ms"
                _run("ip", "netns", "exec", name, "tc", *f"qdisc add dev {_CARD} root tbf {bucket}".split())
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            pytest.skip(f"no network namespaces with a veth pair and tbf here: {str(said).strip()}")
        yield Cable(names)
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
