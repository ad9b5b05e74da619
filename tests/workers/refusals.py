"""Runs each command in a process of its own that must refuse, and reports what it had imported.

One parent process forks them all, so that the interpreter starts once.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

HEAVY = ("torch", "transformers", "deepspeed")


def refuse(module: str, arguments: list[str]) -> tuple[object, list[str]]:
    """Run a command; (its exit status, heavy packages that were imported)."""
    try:
        status = importlib.import_module(f"commands.{module}").main(arguments)
    except SystemExit as end:
        status = end.code
    return status, [name for name in HEAVY if name in sys.modules]


def main(cases: list[tuple[str, list[str]]]) -> None:
    """Print {"command arguments": [status, imported]} as JSON."""
    found = {}
    for module, arguments in cases:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.write(write, json.dumps(refuse(module, arguments)).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            text = file.read()
        os.waitpid(child, 0)
        found[" ".join([module, *arguments])] = json.loads(text) if text else None
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
