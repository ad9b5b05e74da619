"""Interpolations ${...} of a recipe: which are allowed, and their values.

    DictConfig -> refusals of resolvers, then PlainValues

A recipe is resolved once, by the launcher, and every rank and every restart gets the result
(`recipes.composed_file`). An environment variable is therefore read on the launcher's host only. A
value that is one variable, `${oc.env:NAME}`, is read as if it was typed as `knob=value`, so it can
be a number, true, null or a list.

Rule: two compositions of one recipe in one environment are equal. Resolvers that depend on the time
or the machine, and resolvers that nobody here knows, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse

from recipes.check import is_text
from recipes.overrides import one_line, typed_value

CONSTANT = (
    "oc.env", "oc.select", "oc.decode", "oc.create", "oc.deprecated", "oc.dict.keys",
    "oc.dict.values",
)  # fmt: skip
ONE_VARIABLE = re.compile(r"\s*\$\{\s*oc\.env\s*:[^${}]*\}\s*")


def refusals(content: Any, origins: dict[str, str], path: str = "") -> Iterator[str]:
    """One line for each value that uses a resolver which is not constant.

    `content`: nested plain values with interpolations as text. `origins`: knob -> its file.
    """
    if isinstance(content, dict):
        for key, value in content.items():
            yield from refusals(value, origins, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list):
        for item in content:
            yield from refusals(item, origins, path)
    elif isinstance(content, str) and "${" in content:
        other = next((name for name in resolvers(content) if name not in CONSTANT), None)
        if other is not None:
            where = f" ({origins[path]})" if path in origins else ""
            yield (
                f"{path}={content}{where}: the resolver {other} may give another value in another"
                " process, and all ranks and restarts of a run must have the same; write the value"
                " itself, or pass it in the environment: ${oc.env:NAME}"
            )


def resolvers(text: str) -> list[str]:
    """Names of the resolvers in a text, ${name:...}; [] where its grammar is broken."""
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, OmegaConfGrammarParser.InterpolationResolverContext):
            found.append(node.resolverName().getText())
        for index in range(node.getChildCount()):
            walk(node.getChild(index))

    try:
        walk(parse(text))
    except OmegaConfBaseException:  # reported where the value is resolved
        return []
    return found


@dataclass
class PlainValues:
    """The values of a composed tree, and the reasons why knobs have none."""

    values: dict[str, Any]
    missing: list[str]  # knobs left at `???`
    broken: dict[str, str]  # knob -> why its interpolation cannot be resolved
    typed_keys: list[str]  # dotted names whose last part is a key that is no text


def plain_values(tree: DictConfig) -> PlainValues:
    """The resolved values of a composed tree. Keys that are no text are turned into text."""
    found = PlainValues({}, [], {}, [])

    def walk(node: Any, path: str) -> Any:
        if not isinstance(node, DictConfig):
            return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_list(node) else node
        result = {}
        written = OmegaConf.to_container(node, resolve=False)
        for key in node:
            full = f"{path}.{key}" if path else str(key)
            if not isinstance(key, str):
                found.typed_keys.append(full)
            if OmegaConf.is_missing(node, key):
                found.missing.append(full)
                continue
            try:
                value = walk(node[key], full)
            except OmegaConfBaseException as error:
                found.broken[full] = _unresolved(written[key], error)
                continue
            if isinstance(value, dict) and not value and written[key] and full.startswith("ds."):
                continue  # a block of which nothing is left: what it lacks is reported already
            is_variable = isinstance(value, str) and ONE_VARIABLE.fullmatch(str(written[key]))
            result[str(key)] = typed_value(value) if is_variable and not is_text(full) else value
        return result

    found.values = walk(tree, "")
    return found


def _unresolved(written: Any, error: Exception) -> str:
    """The reason why a knob's ${...} has no value."""
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", one_line(error))
    return (
        f"{written} has no value ({reason.strip(chr(34))}); name a knob that the recipe or an"
        " override sets (a default cannot be named), or an environment variable that is set:"
        " ${oc.env:NAME}"
    )
