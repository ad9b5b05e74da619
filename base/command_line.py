"""The arguments that all commands take, and the one way in which they refuse.

Overrides come as arguments of their own or as one text (`make` passes OVERRIDES so); both mean the
same. A command that cannot read its arguments, or cannot do what it was asked, prints lines
`refused: ...` and ends with the same exit status (base.exits).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from base.errors import UserError
from base.exits import DO_NOT_RETRY, FAILED, FINISHED
from base.values import split_arguments


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are refusals like those of the commands."""

    def error(self, message: str) -> NoReturn:
        """Refuse; argparse would print all options and end with an exit status of its own."""
        sys.exit(refuse(UserError(message)))


def add_overrides(parser: argparse.ArgumentParser, nargs: str, help: str) -> None:
    """Let `parser` take arguments and `--overrides`; `arguments_of` reads both."""
    parser.add_argument("--overrides", default="", help="more of them, as one text")
    parser.add_argument("arguments", nargs=nargs, help=help)


def arguments_of(options: argparse.Namespace) -> list[str]:
    """All arguments, those of `--overrides` last. Raises UserError for a quote without its end."""
    return [*options.arguments, *split_arguments("OVERRIDES", options.overrides)]


def count_of(variable: str, text: str, least: int = 0) -> int:
    """The count in a variable of make. Raises UserError for no count, or one below `least`."""
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) >= least):
        raise UserError(f"{variable}={text[:80]}: give a number, such as {variable}=80")
    return int(text)


def refuse(error: UserError) -> int:
    """Print every problem and return the exit status of a refusal."""
    for problem in error.problems:
        print(f"refused: {problem}", file=sys.stderr)
    return DO_NOT_RETRY


def carry_out(act: Callable[[], int]) -> int:
    """Run a command's work and return its exit status.

    A UserError is printed as a refusal. An output that was closed (`make events | head`) and Ctrl-C
    end the command without a traceback.
    """
    try:
        return act()
    except UserError as error:
        return refuse(error)
    except BrokenPipeError:
        sys.stderr.close()
    except OSError as error:  # a file system that went away
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        pass
    return FINISHED
