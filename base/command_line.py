"""What the commands have in common: their words, and how they refuse.

The one rule: overrides come as words of their own, or as one text (`make` passes OVERRIDES so), and
mean the same. Whatever a command cannot read or do as it was asked ends with lines `refused: ...`
and
the same status (base.exits).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from base.errors import UserError
from base.exits import DO_NOT_RETRY, FAILED, FINISHED
from base.values import split_words


class Parser(argparse.ArgumentParser):
    """A command line that is refused as anything else is."""

    def error(self, message: str) -> NoReturn:
        """Of argparse, which would print all options and end with a status of its own."""
        sys.exit(refuse(UserError(message)))


def add_words(parser: argparse.ArgumentParser, nargs: str, help: str) -> None:
    """Let `parser` take words and `--overrides`; `words_of` reads both."""
    parser.add_argument("--overrides", default="", help="more of them, as one text")
    parser.add_argument("words", nargs=nargs, help=help)


def words_of(options: argparse.Namespace) -> list[str]:
    """All words, those of `--overrides` last. Raises UserError for a quote that does not end."""
    return [*options.words, *split_words("OVERRIDES", options.overrides)]


def count_of(variable: str, text: str, least: int = 0) -> int:
    """A count from a variable of make. Raises UserError where it is none, or below `least`."""
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) >= least):
        raise UserError(f"{variable}={text[:80]}: give a number, such as {variable}=80")
    return int(text)


def refuse(error: UserError) -> int:
    """Print every problem; returns the exit status."""
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
