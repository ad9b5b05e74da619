"""The agent of one host, `python -m launch.hosts.agent`: carries out one order and reports.

    standard input    one order as a line of JSON; then a line now and then; its end = stop
    standard output   lines of JSON: {"node": 3, "kind": "facts" | "route" | "line" | "end" | ...}

    facts    gather the facts of this host           (launch.hosts.facts, for the doctor)
    reach    test whether hosts reach the first one  (launch.hosts.network)
    ranks    start the ranks of this host            (launch.ranks.ranks)

Rule: nothing outlives the connection. When the launcher, its ssh or the network between goes away,
standard input ends or falls silent, and the ranks are stopped. Orders come as data, never as
arguments of a shell. Imports no torch.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from base.cores import allow_open_files, usable
from base.errors import UserError
from base.launcher_variables import of_launchers
from base.paths import ROOT
from base.values import counted
from launch.hosts import facts, network
from launch.ranks.rank_process import rank_variables
from launch.ranks.ranks import RankListener, start_ranks
from launch.ranks.recipe_file import recipe_file
from launch.ranks.run_logs import RunLogs
from launch.ranks.watchdog import Hung
from recipes.schema import Watch
from record.attempts import RankEnd

# The launcher sends something every other second (launch.hosts.cluster), and so does an agent with
# ranks. Where the network between them is gone, the ranks end a little before the launcher counts
# this host as lost and starts others in their place.
SILENCE_S, SILENT_SHARE = 300.0, 0.75
PULSE_S = 2.0
DEVICES = "CUDA_VISIBLE_DEVICES"


class Reporter:
    """Sends messages to the launcher, as whole lines and from any thread."""

    def __init__(self, node: int):
        self._node, self._lock = node, threading.Lock()
        # A login that prints a text without an end of line would swallow the first message.
        sys.stdout.write("\n")

    def send(self, kind: str, **content: Any) -> None:
        """Send one message. Nothing happens where nobody listens any more."""
        line = json.dumps({"node": self._node, "kind": kind, **content}) + "\n"
        # Standard input ends then, too, which stops the ranks.
        with contextlib.suppress(OSError, ValueError), self._lock:
            sys.stdout.write(line)
            sys.stdout.flush()


class InputListener:
    """Reads standard input after the order: requests for `on`, blank lines, the end.

    {"stop": signal}   {"kill": true}   {"look": true}, {"hung": rank} (launch.ranks.inquiry)
    """

    def __init__(self, has_pulse: bool):
        self.has_pulse = has_pulse
        self._heard = time.monotonic()
        self.silence_s = SILENCE_S
        self.on: dict[str, Callable[[Any], None]] = {
            "stop": lambda number: os._exit(1),
            "kill": lambda _: os._exit(1),
        }
        threading.Thread(target=self._listen, daemon=True).start()
        if has_pulse:
            threading.Thread(target=self._time, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._heard = time.monotonic()
            if line.strip():
                for request, content in json.loads(line).items():
                    self.on[request](content)
        self.on["stop"](signal.SIGTERM)

    def _time(self) -> None:
        while time.monotonic() - self._heard < self.silence_s:
            time.sleep(0.5)
        self.on["kill"](True)


def main(arguments: list[str]) -> int:
    """Run `python -m launch.hosts.agent`; 0 where the order was carried out, also in vain."""
    parser = argparse.ArgumentParser(prog="python -m launch.hosts.agent")
    parser.add_argument("--node", required=True, help="number of this host, or: slurm")
    parser.add_argument("--order", help="the order in base64, where standard input cannot carry it")
    options = parser.parse_args(arguments)
    allow_open_files()
    node = int(os.environ["SLURM_NODEID"] if options.node == "slurm" else options.node)
    text = base64.b64decode(options.order).decode() if options.order else sys.stdin.readline()
    if not text.strip():
        return 1  # the launcher went away before it sent an order
    order = json.loads(text)
    reporter = Reporter(node)
    listener = InputListener(has_pulse=not options.order)
    try:
        ORDERS[order["do"]](order, node, reporter, listener)
    except UserError as error:
        reporter.send("problem", problems=error.problems)
    except OSError as error:
        reporter.send("problem", problems=[f"{error}"])
    reporter.send("done")
    return 0


def do_facts(order: dict[str, Any], node: int, reporter: Reporter, listener: InputListener) -> None:
    """Send the time, then the facts of this host."""
    for _ in range(3):  # the least delayed one counts
        reporter.send("clock", time=time.time())
        time.sleep(0.02)
    environ = os.environ | order["environment"]
    reporter.send("facts", facts=facts.gather(ROOT, node, order["ask"], environ))


def do_reach(order: dict[str, Any], node: int, reporter: Reporter, listener: InputListener) -> None:
    """Listen on the port of the run (first host), or call it by all its addresses (the others)."""
    port, token, timeout_s = order["port"], order["token"], order["timeout_s"]
    if node == 0:
        callers = network.await_callers(port, token, len(order["hosts"]) - 1, timeout_s)
        routes = {who: dataclasses.asdict(route) for who, route in callers.items()}
        reporter.send("callers", routes=routes)
    else:
        route = network.call(order["addresses"], port, token, str(node), timeout_s)
        reporter.send("route", route=route and dataclasses.asdict(route))


def do_ranks(order: dict[str, Any], node: int, reporter: Reporter, listener: InputListener) -> None:
    """Run the ranks of this host; report their output and their ends."""
    here = order["hosts"][node]
    shown = set(order["shown"])  # ranks whose output a person sees

    def show(local: int, kind: str, line: bytes) -> None:
        rank = node * order["per_node"] + local
        if rank in shown:
            reporter.send("line", rank=rank, stream=kind, text=line.decode(errors="replace"))

    def ended(end: RankEnd) -> None:
        reporter.send("end", end=dataclasses.asdict(end))

    def suspect(hung: Hung | None) -> None:
        reporter.send("suspect", hung=hung and dataclasses.asdict(hung))

    folder = order["run_folder"]
    if not os.access(ROOT / order["arguments"][0], os.R_OK) and order["arguments"][0] != "-m":
        raise UserError(f"{ROOT / order['arguments'][0]} cannot be read on {here['name']}")
    with contextlib.ExitStack() as stack:
        text = order.get("composed")
        composed = [stack.enter_context(recipe_file(text))] if text else []
        ranks = start_ranks(
            [sys.executable, *order["arguments"], *composed],
            environments(
                os.environ | order["environment"],
                node=node,
                nodes=len(order["hosts"]),
                per_node=order["per_node"],
                address=here["address"],
                port=order["port"],
                interface=here["interface"],
                devices=here["devices"],
            ),
            ROOT,
            RankListener(show, ended, suspect if listener.has_pulse else None),
            RunLogs(ROOT / folder if folder else None),
            Watch(**order["limits"]) if order.get("limits") else None,
        )
        listener.on = {
            "stop": ranks.stop,
            "kill": lambda _: ranks.kill(),
            "look": lambda _: ranks.look(),
            "hung": lambda fields: ranks.condemn(Hung.of(fields)),
        }
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: ranks.stop(number))
        if listener.has_pulse:
            listener.silence_s = SILENT_SHARE * order["lost_s"]
        threading.Thread(target=pulse, args=(reporter,), daemon=True).start()
        reporter.send("started", host=socket.gethostname(), pid=os.getpid())
        ranks.wait()


def pulse(reporter: Reporter) -> None:
    """Report every PULSE_S that this host is there."""
    while True:
        reporter.send("pulse")
        time.sleep(PULSE_S)


def environments(
    environ: dict[str, str],
    *,
    node: int,
    nodes: int,
    per_node: int,
    address: str,
    port: int,
    interface: str | None = None,
    devices: list[int] | None = None,
) -> list[dict[str, str]]:
    """The environment of each rank of this host. Variables that the user set are kept."""
    # The variables of another launcher would contradict ours.
    others = {*of_launchers(environ), "MASTER_PORT"}
    base = {name: value for name, value in environ.items() if name not in others}
    # Waiting OpenMP threads sleep instead of spinning. On a busy machine spinning threads take the
    # cores from those that work: 350 against 1,900 tokens/s of `tiny`, two threads, load 4.
    base.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Ranks share the cores.
    base.setdefault("OMP_NUM_THREADS", str(max(1, usable() // per_node)))
    base["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(ROOT), *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))])
    )
    base.setdefault("PYTHONUTF8", "1")  # as make sets it
    # Compilers and ninja of the environment that runs, which a login without activation lacks.
    beside = str(Path(sys.executable).parent)
    base["PATH"] = os.pathsep.join(
        dict.fromkeys([beside, *filter(None, base.get("PATH", os.defpath).split(os.pathsep))])
    )
    if interface is not None:
        base.setdefault("GLOO_SOCKET_IFNAME", interface)
        base.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # `=` is an exact name to NCCL
    if devices is not None:
        base[DEVICES] = ",".join(among(devices, base.get(DEVICES)))
    return [
        base | rank_variables(node, nodes, per_node, local, address, port)
        for local in range(per_node)
    ]


def among(slots: list[int], shown: str | None) -> list[str]:
    """The GPUs at `slots` of those that `shown` lists; raises UserError where one is missing.

    `shown` is CUDA_VISIBLE_DEVICES, as a batch system sets it; None = all GPUs are visible.
    """
    if shown is None:
        return [str(slot) for slot in slots]
    if shown in ("", "-1"):  # none is to be used
        return [shown]
    names = [name.strip() for name in shown.split(",")]
    if slots[-1] >= len(names):
        raise UserError(
            f"slot {slots[-1]} (INCLUDE, EXCLUDE) does not exist: {counted(len(names), 'GPU')} in"
            f" {DEVICES}={shown} on {socket.gethostname()}; slots count from 0 among those"
        )
    return [names[slot] for slot in slots]


ORDERS = {"facts": do_facts, "reach": do_reach, "ranks": do_ranks}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
