"""Errors that a user can put right.

Messages have one line for each problem: the knob, its value, the rule and the way out. Commands
print them as `refused: ...` (base.command_line) and end with one exit status (base.exits).
"""

from __future__ import annotations

import re

# A name or a value may contain a line break; a problem must stay one line.
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _escaped(found: re.Match[str]) -> str:
    return repr(found.group())[1:-1]


class UserError(ValueError):
    """An error that a user can put right.

    `problems` has one line each, with the knob, its value, the rule and the way out.
    """

    def __init__(self, *problems: str):
        self.problems = [CONTROL.sub(_escaped, problem) for problem in problems]
        super().__init__("\n".join(self.problems))


class Shared(UserError):
    """A UserError that every rank raises in the same way; one of them prints it."""
