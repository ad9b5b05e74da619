"""When the ranks of a host get which signal, once they must end: a state machine over the time.

    running -> asked to end: the signal that asked -> after the grace time: SIGKILL, each second
            -> one failed: the others get a moment  -> SIGKILL, each second
            -> killed: SIGKILL at once              -> after UNENDING_S: abandoned

Rule: it sends nothing by itself, and its requests only set fields, so that a signal handler may
make them. Units: seconds on one monotonic clock.
"""

from __future__ import annotations

import signal

from record.attempts import RankEnd

# After the first failure the others lose their connections and report it; this long they may.
OTHERS_S = 5.0
KNOWN_S = 0.5  # where the first failure leaves no question
# One request may come twice: to this process by a signal of its own and through its launcher.
AGAIN_S = 3.0
# From the first SIGKILL on: after that a rank sits in the kernel, as in a driver or a file system
# that does not answer. Freeing the memory of a large host takes a minute.
UNENDING_S = 120.0


def patience_s(first: RankEnd) -> float:
    """The time for which other ranks may go on after the first that failed."""
    is_clear = first.is_lost or first.hung or first.status == -signal.SIGKILL
    return KNOWN_S if is_clear else OTHERS_S


class Shutdown:
    """The requests to end that came, and the signals that follow from them."""

    def __init__(self):
        self.is_killed = False  # all must end at once, whatever hangs
        self._asked: int | None = None  # the signal that asked for the end
        self._asked_at = 0.0
        self._is_sent = False
        self._hurry = False  # SIGKILL is due now
        self._kill_at: float | None = None
        self._killed_at: float | None = None

    def ask(self, by: int, now: float) -> None:
        """Ask for the end by signal `by`; asking again later kills."""
        if self._asked is None:
            self._asked, self._asked_at = by, now
        elif now - self._asked_at > AGAIN_S:
            self._hurry = self.is_killed = True

    def kill(self) -> None:
        """End all at once."""
        self._asked = self._asked or signal.SIGTERM
        self._hurry = self.is_killed = True

    def asked_now(self) -> int | None:
        """The signal that asked for the end, once; None before and afterwards."""
        if self._asked is None or self._is_sent:
            return None
        self._is_sent = True
        return self._asked

    def grant(self, seconds: float, now: float) -> None:
        """Let the ranks end by themselves for so long after they were asked."""
        self._kill_at = now + seconds

    def failed(self, first: RankEnd, now: float) -> None:
        """Let the other ranks report what the first failure did to them, and no longer."""
        if self._kill_at is None:
            self._kill_at = now + patience_s(first)

    def is_kill_due(self, now: float) -> bool:
        """Whether SIGKILL is due now; it is again a second later."""
        if not self._hurry and (self._kill_at is None or now < self._kill_at):
            return False
        self._kill_at, self._hurry = now + 1, False
        self._killed_at = self._killed_at or now
        return True

    def is_in_vain(self, now: float) -> bool:
        """Whether SIGKILL has had no effect for UNENDING_S."""
        return self._killed_at is not None and now - self._killed_at > UNENDING_S
