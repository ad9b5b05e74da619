"""Makes hosts for tests: network namespaces on a bridge, each with its own name and ssh server.

    host 1 --+
    host 2 --+-- bridge (10.77.0.0/24)       shared: files, processes; own: network, name
    host 3 --+

Needs root, `ip` and the right to make namespaces; `why_not()` names what is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from ranks import PATIENCE

NET = "10.77"
SSHD = "/usr/sbin/sshd"
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h


@functools.cache
def why_not() -> str | None:
    """Reason why no hosts can be made on this machine; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare", "mount"):
        if not shutil.which(tool):
            return f"no {tool} on this machine (Debian: iproute2, util-linux)"
    name = f"try{os.getpid()}"
    for command in (
        ["ip", "netns", "add", name],
        ["ip", "link", "add", f"b{name}"[:15], "type", "bridge"],
        ["ip", "netns", "exec", name, "unshare", "--uts", "true"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            break
    subprocess.run(["ip", "link", "del", f"b{name}"[:15]], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"{' '.join(command)}: {done.stderr.strip()}" if done.returncode else None


def why_no_ssh() -> str | None:
    """Reason why no ssh connection can be made on this machine; None where it can."""
    if not Path(SSHD).exists() or not shutil.which("ssh"):
        return "no sshd or ssh here; as root: apt-get install openssh-server openssh-client"
    return None


class Hosts:
    """Hosts node1, node2, ... at 10.77.<net>.1, ..."""

    def __init__(self, folder: Path, count: int, net: int):
        self.folder, self.count, self.net = folder, count, net
        self.names = [f"node{n}" for n in range(1, count + 1)]
        self._spaces = [f"pt{net}n{n}" for n in range(1, count + 1)]
        self._bridge = f"pt{net}br"
        self._daemons: dict[int, subprocess.Popen] = {}
        self._servers: dict[int, list[str]] = {}
        self._cables: list[SlowCable] = []

    def address(self, number: int) -> str:
        """IP address of host `number` (from 1)."""
        return f"{NET}.{self.net}.{number}"

    def make(self) -> None:
        """Make the namespaces and join them."""
        self.remove()
        ip("link", "add", self._bridge, "type", "bridge")
        ip("link", "set", self._bridge, "up")
        table = "127.0.0.1 localhost\n" + "".join(
            f"{self.address(n)} node{n}\n" for n in range(1, self.count + 1)
        )
        for number, space in enumerate(self._spaces, start=1):
            ip("netns", "add", space)
            inside = Path("/etc/netns") / space
            inside.mkdir(parents=True, exist_ok=True)
            (inside / "hosts").write_text(table)  # `ip netns exec` puts it over /etc/hosts
            outer, inner = f"pt{self.net}o{number}", f"pt{self.net}i{number}"
            ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
            ip("link", "set", outer, "master", self._bridge, "up")
            ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", inner)
            ip("-n", space, "link", "set", inner, "up")
            ip("-n", space, "link", "set", "lo", "up")

    def command(self, number: int, *words: str, prepare: str = "") -> list[str]:
        """Command that runs `words` on host `number`, after the shell line `prepare`."""
        enter = f'hostname node{number}; {prepare or ":"}; exec "$@"'
        space = self._spaces[number - 1]
        return [
            "ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-c", enter, "sh",
            *words,
        ]  # fmt: skip

    def serve_ssh(
        self, variables: Mapping[int, Mapping[str, str]] = {}, prepare: Mapping[int, str] = {}
    ) -> Path:
        """Start sshd on every host but the first; returns an ssh configuration that reaches them.

        `variables` are those of the logins of a host, `prepare` is shell that runs before its
        server and whose mounts the logins see.
        """
        keys = self.folder / f"ssh{self.net}"
        keys.mkdir(exist_ok=True)
        for name in ("host", "user"):
            if not (keys / name).exists():
                command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
                subprocess.run(command, check=True)
        shutil.copy(keys / "user.pub", keys / "authorized")
        Path("/run/sshd").mkdir(exist_ok=True)
        for number in range(2, self.count + 1):
            given = [f'"{name}={value}"' for name, value in variables.get(number, {}).items()]
            (keys / f"sshd{number}").write_text(
                f"HostKey {keys}/host\nAuthorizedKeysFile {keys}/authorized\nStrictModes no\n"
                "PasswordAuthentication no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
                + (f"SetEnv {' '.join(given)}\n" if given else "")
            )
            command = [SSHD, "-D", "-e", "-f", str(keys / f"sshd{number}")]
            self._servers[number] = self.command(number, *command, prepare=prepare.get(number, ""))
            self.start_server(number)
        (keys / "config").write_text(
            f"Host *\n  IdentityFile {keys}/user\n  UserKnownHostsFile {keys}/known\n"
            "  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
        )
        self._await_servers(keys / "config")
        return keys / "config"

    def slow_down(self, number: int, mib_per_s: float) -> None:
        """Replace the cable of a host by a program that limits its speed."""
        space = self._spaces[number - 1]
        inner, tap = f"pt{self.net}s{number}", f"pt{self.net}t{number}"
        outer, inside = tap_device(tap), tap_device(inner)
        ip("link", "set", inner, "netns", space)
        ip("-n", space, "link", "del", f"pt{self.net}i{number}")
        ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", inner)
        ip("-n", space, "link", "set", inner, "up")
        ip("link", "set", tap, "master", self._bridge, "up")
        self._cables.append(SlowCable(outer, inside, mib_per_s))

    def start_server(self, number: int) -> None:
        """Start the ssh server of a host again after power_off."""
        with open(self.folder / f"ssh{self.net}" / f"node{number}.log", "ab") as log:
            self._daemons[number] = subprocess.Popen(self._servers[number], stderr=log, stdout=log)

    def processes(self, number: int) -> list[int]:
        """Process ids of a host."""
        command = ["ip", "netns", "pids", self._spaces[number - 1]]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def cable(self, number: int, is_in: bool) -> None:
        """Pull the cable of a host or put it back."""
        ip("link", "set", f"pt{self.net}o{number}", "up" if is_in else "down")

    def lose_way(self, number: int, to: Collection[int]) -> None:
        """Drop in silence all that host `number` sends to the hosts of `to` from now on.

        The packets go to a hardware address that no card has. What those hosts send still arrives.
        """
        for other in set(to) - {number}:
            ip(
                "-n", self._spaces[number - 1], "neigh", "replace", self.address(other), "lladdr",
                "02:00:00:00:00:01", "dev", f"pt{self.net}i{number}", "nud", "permanent",
            )  # fmt: skip

    def power_off(self, number: int) -> None:
        """Kill all processes of a host at once and pull its cable, without any last message."""
        self.cable(number, is_in=False)
        for pid in self.processes(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if daemon := self._daemons.pop(number, None):
            daemon.wait(timeout=10 * PATIENCE)

    def heal(self) -> None:
        """Put all cables back and end all processes of the hosts."""
        for number, space in enumerate(self._spaces, start=1):
            self.cable(number, is_in=True)
            ip("-n", space, "neigh", "flush", "all", "nud", "permanent")
            servers = [self._daemons[number].pid] if number in self._daemons else []
            for pid in servers:
                os.kill(pid, signal.SIGCONT)  # the host may have been made to stand still
            for pid in set(self.processes(number)) - set(servers):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if number in self._servers and number not in self._daemons:
                self.start_server(number)

    def stop_ssh(self) -> None:
        """End the servers; connections that are open stay."""
        for daemon in self._daemons.values():
            daemon.send_signal(signal.SIGCONT)  # a host may have been made to stand still
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=10 * PATIENCE)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _await_servers(self, config: Path) -> None:
        for name in self.names[1:]:
            command = self.command(1, "ssh", "-F", str(config), name, "true")
            for _ in range(50):
                if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                    break
                time.sleep(0.1)
            else:
                raise AssertionError(f"no ssh server on {name}")

    def remove(self) -> None:
        """Remove all namespaces and the bridge."""
        self.stop_ssh()
        for cable in self._cables:
            cable.close()
        self._cables.clear()
        for number, space in enumerate(self._spaces, start=1):
            for pid in self.processes(number):  # what a failed test left running
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


def why_no_taps() -> str | None:
    """Reason why no slow cable can be made on this machine; None where it can."""
    return None if os.access("/dev/net/tun", os.W_OK) else "no /dev/net/tun on this machine"


def tap_device(name: str) -> int:
    """Make a network interface whose other end is the returned file: one frame a read or write."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


class SlowCable:
    """Passes frames between two taps at a limited speed until it is closed.

    Its threads end before the files are closed: one left behind would read and write whatever gets
    the same numbers next, such as the output of another test's process.
    """

    def __init__(self, outer: int, inside: int, mib_per_s: float):
        self._ends, self._is_over = (outer, inside), threading.Event()
        ways = ((outer, inside), (inside, outer))
        self._threads = [
            threading.Thread(target=self._carry, args=(*way, mib_per_s), daemon=True)
            for way in ways
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self, source: int, target: int, mib_per_s: float) -> None:
        free_at = time.monotonic()
        arrived = select.poll()
        arrived.register(source, select.POLLIN)
        while not self._is_over.is_set():
            if not arrived.poll(200):
                continue
            try:
                frame = os.read(source, 65536)
                free_at = max(free_at, time.monotonic()) + len(frame) / (mib_per_s * 2**20)
                while (left := free_at - time.monotonic()) > 0.001:
                    time.sleep(left)
                os.write(target, frame)
            except OSError:  # the interface is gone
                return


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(folder: Path, count: int, net: int) -> Iterator[Hosts]:
    """Make hosts for the time of a test."""
    made = Hosts(folder, count, net)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def processes_in(folder: Path) -> list[tuple[int, str]]:
    """Process id and command of every process whose working folder is `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "cwd") == str(folder):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if words:
                    found.append((int(entry.name), words))
    return found
