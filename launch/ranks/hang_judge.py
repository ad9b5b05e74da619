"""Decides which rank hangs, once the watchdog of a host hears silence.

    one host        the rank that its watchdog blames
    several hosts   suspect -> launch.ranks.inquiry compares all hosts -> verdict

Rule: a rank that the request for its stacks has woken, and that then ends well, hung all the same:
its end waits until the judgement is over. Units: seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from launch.ranks.watchdog import Hung, Watchdog

# Where no launcher compares the hosts, a host whose ranks only wait lets the others speak first;
# else the launcher's verdict comes soon (launch.ranks.inquiry).
WAITING_S, VERDICT_S = 3.0, 20.0


class HangJudge:
    """The judgement of one attempt. `is_all` = the ranks of this host are all ranks of the run.

    `is_paused` = the ranks are suspended; `is_asked` = another host hears silence; `verdict` = the
    launcher's answer; `is_over` = all ranks are ended for another reason. They may be set from
    anywhere.
    """

    def __init__(
        self, watchdog: Watchdog, is_all: bool, suspect: Callable[[Hung | None], None] | None
    ):
        self.watchdog, self._is_all, self._suspect = watchdog, is_all, suspect
        self.hung: Hung | None = None  # on any host
        self.is_paused = self.is_asked = self.is_over = False
        self.verdict: Hung | None = None
        self._judging = threading.Lock()

    @property
    def is_decided(self) -> bool:
        """Whether silence says nothing new."""
        return self.hung is not None or self.is_paused or self.is_over

    def look(self, living: Mapping[int, int]) -> dict[int, str] | None:
        """The stacks by rank where one hangs, on any host; None where none does.

        `living` are the ranks that live, with their process numbers. The rank is then `hung`, or
        None where all are ended for another reason.
        """
        is_silent = self.watchdog.look(list(living)) is not None
        if not living or not (is_silent or self.is_asked):
            return None
        with self._judging:
            if self._suspect and not self.is_asked:
                self._suspect(None)
            own, stacks = self.watchdog.blame(living)
            self.hung = self._of_all_hosts(own)
        return stacks

    def hung_of(self, rank: int) -> Hung | None:
        """The judgement on one rank, when it is over; None where that rank does not hang."""
        with self._judging:
            return self.hung if self.hung is not None and self.hung.rank == rank else None

    def _of_all_hosts(self, own: Hung) -> Hung | None:
        """The rank that hangs, of all hosts; None where another reason came to end all at once."""
        if self._is_all:
            return own
        if self._suspect is None:
            time.sleep(WAITING_S if own.only_waits else 0)
            return own
        self._suspect(own)
        deadline = time.monotonic() + VERDICT_S
        while self.verdict is None and time.monotonic() < deadline:
            if self.is_over:
                return None
            time.sleep(0.05)
        return self.verdict or own
