"""Hosts that wait: looked at now and then beside the run, and told of when that changes.

The one rule: looking changes nothing. Nothing stays on a spare between two looks, and what it can
or cannot do matters only when a host fails. Units: seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from base.errors import UserError
from launch.hosts.cluster import Cluster
from launch.hosts.hostfile import Host
from launch.hosts.judge import judge
from launch.hosts.preflight import Inspection

READY_S, ABSENT_S = 300.0, 15.0  # between two looks at spares that are ready, or where one is not
TIMEOUT_S = 60.0


class SpareWatch:
    """Looks at `spares()` in a thread, until `stop`; `facts()` are those of the hosts that train.

    `say(line)` and `note(host, state, why=...)` get what changed.
    """

    def __init__(
        self,
        cluster: Callable[[], Cluster],
        spares: Callable[[], Sequence[Host]],
        inspection: Inspection,
        facts: Callable[[], Mapping[str, Any]],
        log: Callable[[str], None],
        note: Callable[..., None],
    ):
        self._cluster, self._spares, self._facts = cluster, spares, facts
        self._inspection, self._log, self._note = inspection, log, note
        self._known: dict[str, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SpareWatch:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            spares = list(self._spares())
            if spares and self._facts():
                for host in spares:
                    self._tell(host, self.look(host))
            absent = any(self._known.get(host.name) for host in spares) or not self._facts()
            self._over.wait(ABSENT_S if absent else READY_S)

    def look(self, host: Host) -> str:
        """What is wrong with a spare; empty where it could train."""
        ask = {"shared": None, "folders": list(self._inspection.folders), "port": None}
        order = {"do": "facts", "ask": ask, "environment": dict(self._inspection.environment)}
        try:
            said = replace(self._cluster(), hosts=[host]).ask(order, TIMEOUT_S)
        except UserError as error:
            return "; ".join(error.problems).removeprefix(f"{host.name}: ")
        own = next(message["facts"] for message in said[0] if message["say"] == "facts")
        skews_s = [
            message["time"] - message["at"] for message in said[0] if message["say"] == "clock"
        ]
        found = judge(
            {**self._facts(), host.name: own}, {host.name: max(skews_s)}, self._inspection.need
        )
        wrong = [line for line in found.problems if line.startswith(f"{host.name}: ")]
        return "; ".join(line.removeprefix(f"{host.name}: ") for line in wrong)

    def _tell(self, host: Host, wrong: str) -> None:
        if self._over.is_set() or self._known.get(host.name) == wrong:
            return
        self._known[host.name] = wrong
        self._log(f"spare {host.name}: {'not fit: ' + wrong if wrong else 'ready'}")
        self._note(host.name, "not_fit" if wrong else "ready", why=wrong or None)
