"""The hosts of a run between its attempts: which ones train, wait, are barred or take over.

    trains: node1 node2      waits: node3
    node2 lost -> node3 takes its place, node2 waits    (the same world size)
    no spare   -> the same hosts again, for restart.wait_s -> fewer, with restart.shrink -> the end

Rule: a healthy run is never disturbed. Hosts change places between two attempts only, so a spare
that comes late is used at the next failure. Which hosts failed before is read from the record of
the run. Units: seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from base.errors import UserError
from base.values import counted
from launch.hosts.cluster import AgentCluster
from launch.hosts.hostfile import Host
from launch.hosts.judge import names
from launch.hosts.place import Place
from launch.hosts.preflight import Inspection, StartPlan, preflight
from recipes.schema import Restart
from record.attempts import Attempt
from record.supervisor_log import SupervisorLog

DAY_S = 86_400.0
AGAIN_S = 10.0  # between two tries of hosts that are not fit
# Causes that speak against a host. A rank that fails by itself would fail anywhere.
BLAMED = ("lost_host", "hung", "killed", "unfit")


class Fleet:
    """Hosts of one run.

    `cluster` has those that train, in the order of their ranks, `spares` those that wait; `plan`
    and `facts` are of the attempt that starts. `resize(hosts)` raises UserError where the run
    cannot go on with so many. `alert(kind, text)` sends people a message.
    """

    def __init__(
        self,
        place: Place,
        inspection: Inspection,
        rules: Restart,
        supervisor_log: SupervisorLog,
        resize: Callable[[int], None],
        log: Callable[[str], None] = lambda line: print(line, flush=True),
        pause: Callable[[float], None] = time.sleep,
        alert: Callable[[str, str], None] = lambda kind, text: None,
    ):
        self.cluster: AgentCluster = place.cluster
        self.spares: list[Host] = list(place.spares)
        self.inspection, self.supervisor_log, self.log = inspection, supervisor_log, log
        self.plan: StartPlan | None = None
        self.facts: Mapping[str, Any] = {}
        self.included, self._rules, self._resize = place.included, rules, resize
        self.pause, self._alert = pause, alert
        self._noted: set[str] = set()  # found unfit since the last attempt

    def prepare(self, attempt: Attempt | None, lost: Iterable[str] = ()) -> StartPlan:
        """The plan of the next attempt, after `attempt`, in which the hosts `lost` went away.

        Raises UserError where there is no way.
        """
        lost = set(lost)
        self._noted.clear()
        for host in [host for host in self.cluster.hosts if host.name in lost]:
            self._replace(host, "lost", lost)
        for host, times in self.barred().items():
            if host in {other.name for other in self.cluster.hosts} and host not in lost:
                why = f"barred: it failed {times} times within a day (INCLUDE names it to use it)"
                if not self._replace(self._named(host), why, lost):
                    self.log(f"{host} failed {times} times within a day and no spare is left")
        if lost or (attempt is not None and attempt.cause == "hung"):
            self.plan = None
            again = lost or set(self.facts)  # a hang does not show which host caused it
            self.facts = {host: f for host, f in self.facts.items() if host not in again}
        return self.plan or self._fit(is_first=attempt is None, unfit=lost)

    def barred(self) -> dict[str, int]:
        """Hosts that failed too often, with the number of their failures."""
        counts: dict[str, int] = {}
        for host, cause, when in self.supervisor_log.failures():
            if cause in BLAMED and time.time() - when < DAY_S and host not in self.included:
                counts[host] = counts.get(host, 0) + 1
        return {host: n for host, n in counts.items() if n >= self._rules.host_failures}

    def _fit(self, is_first: bool, unfit: set[str]) -> StartPlan:
        """Examine the hosts that train; spares take the places of those that are not fit.

        `unfit` are hosts that have been found so already.
        """
        until, is_alerted = time.monotonic() + self._rules.wait_s, False
        while True:
            try:
                self.plan, self.facts = preflight(
                    self.cluster, self.inspection, self.log, self.facts
                )
                return self.plan
            except UserError as error:
                # Let spares take over.
                wrong = blamed(error.problems, self.cluster.hosts)
                unfit |= {host.name for host in wrong}
                taken = [self._replace(host, why_unfit(error, host), unfit) for host in wrong]
                if any(taken):
                    continue
                # Without spares: give up at the first start, later wait, then shrink.
                left_s = until - time.monotonic()
                if is_first or (not wrong and left_s < 0):
                    raise
                if left_s < 0:
                    self._shrink(wrong, error)
                    continue
                what = "; ".join(error.problems)  # of this machine: no process, no room
                if wrong:
                    who = names([host.name for host in wrong])
                    what = f"{who}: not fit, and no spare is left"
                what += f"; trying again for {left_s:.0f} s (restart.wait_s)"
                self.log(what)
                if not is_alerted:
                    self._alert("waiting", what)
                is_alerted = True
            self.pause(AGAIN_S)
            self.facts = {}
            unfit.clear()  # spares may have come back as well

    def _replace(self, host: Host, why: str, unfit: set[str]) -> bool:
        """Let a spare take the place of a host; False where none is left."""
        barred = self.barred()
        fit = [s for s in self.spares if s.name not in unfit and s.name not in barred]
        fit = [spare for spare in fit if spare.slots >= self.inspection.need.per_host]
        if not fit:
            return False
        spare = fit[0]
        hosts = [spare if other is host else other for other in self.cluster.hosts]
        self.cluster = replace(self.cluster, hosts=hosts)
        self.spares = [other for other in self.spares if other is not spare] + [host]
        self.plan = None
        self.log(f"spare {spare.name} takes the place of {host.name} ({why})")
        # Tried again and again in one outage it has failed once, and is not barred when it is back.
        is_new = not why.startswith(("lost", "barred")) and host.name not in self._noted
        cause = {"cause": "unfit"} if is_new else {}
        self._noted.add(host.name)
        self.supervisor_log.note(host.name, "replaced", by=spare.name, why=why, **cause)
        return True

    def _shrink(self, wrong: Sequence[Host], error: UserError) -> None:
        """Go on without hosts that do not come back, where that is allowed and possible."""
        left = [host for host in self.cluster.hosts if host not in wrong]
        who = names([host.name for host in wrong])
        waited = f"{who} did not come back within {self._rules.wait_s} s (restart.wait_s)"
        if not self._rules.shrink or not left:
            raise UserError(
                f"{waited} and no spare is left; add hosts, or allow fewer (restart.shrink=true)",
                *error.problems,
            )
        try:
            self._resize(len(left))
        except UserError as refused:
            raise UserError(
                f"{waited}; {counted(len(left), 'host')}: no way out", *refused.problems
            ) from None
        self.cluster = replace(self.cluster, hosts=left)
        self.spares += wrong
        self.log(f"{waited}; going on with {counted(len(left), 'host')} (restart.shrink)")
        for host in wrong:
            self.supervisor_log.note(host.name, "left_out", why=why_unfit(error, host))

    def _named(self, name: str) -> Host:
        """The host of this name, of those that train."""
        return next(host for host in self.cluster.hosts if host.name == name)


def blamed(problems: Iterable[str], hosts: Sequence[Host]) -> list[Host]:
    """The hosts that lines `host: problem` name."""
    named = {problem.partition(": ")[0] for problem in problems}
    return [host for host in hosts if host.name in named]


def why_unfit(error: UserError, host: Host) -> str:
    """The first problem of one host."""
    lines = [line for line in error.problems if line.startswith(f"{host.name}: ")]
    return lines[0].partition(": ")[2] if lines else "not fit"
