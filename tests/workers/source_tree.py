"""Finds the source files of the repository, their imports, and the commands of the Makefile."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from ranks import ROOT

# The rooms in their order: each imports only from itself and from rooms before it.
ROOMS = (
    "base", "recipes", "model", "parallel", "data", "checkpoint", "record", "runtime", "plan",
    "launch", "compare", "commands",
)  # fmt: skip
PACKAGES = tuple(room for room in ROOMS if (ROOT / room).is_dir())


def sources() -> list[Path]:
    folders = [ROOT / name for name in (*PACKAGES, "benchmarks", "tests")]
    return [ROOT / "pretrain.py", *(path for f in folders for path in sorted(f.rglob("*.py")))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of all imports of a file, at any place in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (node.module, *(f"{node.module}.{name.name}" for name in node.names))
    return tuple(found)


@functools.cache
def commands_of_make() -> dict[str, str]:
    """Map each command of the Makefile to the module of ours that it runs."""
    found = {}
    for command, recipe in re.findall(
        r"^([a-z-]+):.*?## .*?\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    ):
        module = re.search(r"-m ([\w.]+)", recipe)
        if module:
            found[command] = module.group(1)
    return found


def is_under(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")
