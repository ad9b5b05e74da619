"""Finds the rank that hangs, of all hosts, once one host hears silence.

    an agent: silence -> every agent: look -> each: its likeliest rank -> here: the least `order`
      -> every agent: this is the one -> its host reports it as hung, the others as stopped with it

Rule: no rank is blamed before every host has answered. When one rank hangs all fall silent, each
with a limit of its own, so the first host to report silence proves nothing. A host that does not
answer while all others only wait is lost. Where a rank or a host has failed meanwhile, the others
wait for that failure, and none of them hangs. Units: seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from launch.hosts.cluster import AgentTask, Message
from launch.ranks.watchdog import Hung

# Stacks take up to launch.ranks.watchdog.DUMP_S; the rest is for agents on busy machines.
ANSWER_S = 10.0


class Inquiry:
    """Reads the messages of the agents of an attempt, and asks back."""

    def __init__(self, task: AgentTask):
        self._task = task
        self._suspects: dict[int, Hung] = {}  # host -> its likeliest
        self._asked_at: float | None = None
        self._has_failed = False  # a rank or a host, by itself
        self._is_over = False

    def during(self, messages: Iterable[Message | None]) -> Iterator[Message | None]:
        """`messages`, except those of an inquiry; adds `lost` for a host that does not answer."""
        for message in messages:
            if message and message["kind"] == "suspect":
                self._hear(message)
            else:
                self._has_failed = self._has_failed or has_failed(message)
                yield message
            if self._asked_at is not None and not self._is_over:
                yield from self._judge(time.monotonic() - self._asked_at)

    def _hear(self, message: Message) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._task.send({"look": True})
        if message["hung"]:
            self._suspects[message["node"]] = Hung.of(message["hung"])

    def _judge(self, passed_s: float) -> Iterator[Message]:
        """Decide as soon as every host has answered, or has had its time."""
        unheard_s = self._task.unheard_s()
        missing = sorted(unheard_s.keys() - self._suspects.keys())
        if not self._suspects or (missing and passed_s < ANSWER_S):
            return
        self._is_over = True
        first = min(self._suspects.values(), key=lambda hung: hung.order)
        if first.only_waits and self._has_failed:
            return  # for what has failed, which ends all the others
        mute = [node for node in missing if unheard_s[node] >= passed_s] if first.only_waits else []
        for node in mute:
            yield self._task.give_up(node, "the ranks of all others wait, and it does not answer")
        if mute:
            self._task.kill()
        else:
            self._task.send({"hung": asdict(first)})


def has_failed(message: Message | None) -> bool:
    """Whether a message reports a rank or a host that ended without being asked to."""
    if message is None or message["kind"] != "end":
        return message is not None and message["kind"] in ("lost", "problem")
    return message["end"]["status"] != 0 and not message["end"]["was_stopped"]
