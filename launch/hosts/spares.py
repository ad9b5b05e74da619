"""Spare hosts: examined now and then beside the run; a change is reported.

Rule: looking changes nothing. Nothing stays on a spare between two looks, and what it can or cannot
do matters only when a host fails. Units: seconds.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from base.errors import UserError
from launch.hosts.fleet import Fleet
from launch.hosts.hostfile import Host
from launch.hosts.judge import judge

READY_S, ABSENT_S = 300.0, 15.0  # between two looks at spares that are ready, or where one is not
TIMEOUT_S = 60.0


class SpareWatch:
    """Examines the spares of a fleet in a thread, for as long as the context lasts.

    What changed is printed and put on record.
    """

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
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
            spares = list(self._fleet.spares)
            if spares and self._fleet.facts:
                for host in spares:
                    self._report(host, self.look(host))
            absent = any(self._known.get(host.name) for host in spares) or not self._fleet.facts
            self._over.wait(ABSENT_S if absent else READY_S)

    def look(self, host: Host) -> str:
        """The problems of a spare; empty where it could train."""
        inspection = self._fleet.inspection
        ask = {"shared": None, "folders": list(inspection.folders), "port": None}
        order = {"do": "facts", "ask": ask, "environment": dict(inspection.environment)}
        try:
            answers = replace(self._fleet.cluster, hosts=[host]).ask(order, TIMEOUT_S)[0]
        except UserError as error:
            return "; ".join(error.problems).removeprefix(f"{host.name}: ")
        own = next(message["facts"] for message in answers if message["kind"] == "facts")
        skews_s = [
            message["time"] - message["at"] for message in answers if message["kind"] == "clock"
        ]
        found = judge(
            {**self._fleet.facts, host.name: own}, {host.name: max(skews_s)}, inspection.need
        )
        wrong = [line for line in found.problems if line.startswith(f"{host.name}: ")]
        return "; ".join(line.removeprefix(f"{host.name}: ") for line in wrong)

    def _report(self, host: Host, wrong: str) -> None:
        """Print and record the state of a spare, where it changed."""
        if self._over.is_set() or self._known.get(host.name) == wrong:
            return
        self._known[host.name] = wrong
        self._fleet.log(f"spare {host.name}: {'not fit: ' + wrong if wrong else 'ready'}")
        state = "not_fit" if wrong else "ready"
        self._fleet.supervisor_log.note(host.name, state, why=wrong or None)
