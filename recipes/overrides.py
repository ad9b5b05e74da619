"""Overrides of a command line: Hydra's grammar, and plain text where a knob takes text.

    "optim.lr=1e-3"  "~data.sources.web"  "model=llama-1b"  -> choices, Override objects, problems

A knob that takes text also takes what Hydra's grammar does not know, such as `run=a=b` or
`data.tokenizer=texts#2`; the text is then the value as it was typed.

Rule: an override that cannot be taken is refused with the form that works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from base.errors import UserError
from base.values import did_you_mean
from recipes.check import is_text

GROUPS = ("model", "data", "optim", "cluster")
PLAIN = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
BLANKS = re.compile(r"^([+~]*[\w.-]+)\s+=\s*")  # `knob = value` in quotes
LISTS = ("allow", "alerts.command", "parallel.bounds")  # knobs that take a plain list
# Settings of the DeepSpeed JSON that a knob of the recipe owns, and its blocks.
OWNED_BY_KNOBS = {
    "zero_optimization.stage": "zero",
    "gradient_clipping": "optim.clip",
    "train_batch_size": "batch_tokens",
    "train_micro_batch_size_per_gpu": "micro_batch",
}
BLOCKS = (
    "zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "activation_checkpointing",
    "comms_logger", "flops_profiler", "pipeline", "communication_data_type", "aio", "amp",
    "gradient_accumulation_steps", "wall_clock_breakdown", "zero_allow_untested_optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class Override:
    """One override of a value; `text` is what was typed after the equals sign."""

    key: str
    value: Any
    text: str
    is_removal: bool


@dataclass(frozen=True)
class Parsed:
    """A command line: config group choices, overrides of values, problems and warnings."""

    choices: list[str]
    overrides: list[Override]
    problems: list[str]
    warnings: list[str]


def parse(texts: Sequence[str], options_of: Callable[[str], list[str]]) -> Parsed:
    """Parse overrides; `options_of` gives the names of the options of a config group.

    The later one of two overrides of one key counts, with a warning.
    """
    choices: dict[str, str] = {}
    overrides: dict[str, Override] = {}
    problems, warnings = [], []
    for given in texts:
        text = BLANKS.sub(r"\1=", given.strip())
        try:
            override = _read(text, options_of)
        except ValueError as refusal:
            problems.append(str(refusal))
            continue
        key = override.key
        is_choice = key in GROUPS and isinstance(override.value, str)
        chosen: dict[str, Any] = choices if is_choice else overrides
        if key in chosen:
            warnings.append(f"{key} is given twice; {text} replaces the earlier one")
        chosen.pop(key, None)  # the later one also comes later
        chosen[key] = text.lstrip("+") if is_choice else override
    return Parsed(list(choices.values()), list(overrides.values()), problems, warnings)


def _read(text: str, options_of: Callable[[str], list[str]]) -> Override:
    """One override. Raises ValueError with a line that has the reason and the form that works."""
    plain = PLAIN.fullmatch(text)
    takes_text = plain is not None and is_text(plain[1])
    try:
        parsed = OverridesParser.create().parse_override(text)
        value = parsed.value()
        str(value)  # Python refuses to print integers of thousands of digits
    except (HydraException, ValueError) as error:
        if takes_text:
            return Override(plain[1], plain[2].strip(), plain[2], is_removal=False)
        reason = f"is malformed ({one_line(error)}); {_form(text, plain)}"
        raise ValueError(f"override {text!r} {reason}") from None
    if line := _refusal(parsed, value, text, takes_text, options_of):
        raise ValueError(line)
    typed = text.partition("=")[2]
    return Override(parsed.key_or_group, value, typed, parsed.is_delete())


def _form(text: str, plain: re.Match[str] | None) -> str:
    """The form in which an override that Hydra's grammar refuses can be given."""
    if plain is None or not plain[2]:
        return "write knob=value, without blanks beside the ="
    if "${" in plain[2]:
        return f"put a nested interpolation in single quotes: {plain[1]}='{plain[2].strip()}'"
    if text.isascii():
        return "write knob=value"
    return "write knob=value, with texts that hold letters beyond ASCII in single quotes"


def _refusal(
    parsed: Any, value: Any, text: str, takes_text: bool, options_of: Callable[[str], list[str]]
) -> str | None:
    """The refusal of an override that could be parsed and cannot be taken, or None."""
    key, typed = parsed.key_or_group, text.partition("=")[2]
    if not all(key.split(".")):
        return f"override {text!r} is malformed (no name before =); {_form(text, None)}"
    if is_hydra(key):
        return f"override {text!r}: hydra settings are not used; runs go to runs/<run> (run=NAME)"
    if parsed.package is not None or "/" in key:
        return f"override {text!r}: write group=name or knob=value, without @ and /"
    if parsed.is_sweep_override():
        if key in LISTS:
            return f"override {text!r}: a list has brackets; write {key}=[{typed}]"
        quoted = f"; text with a comma goes in quotes: {key}='{typed}'" if takes_text else ""
        return f"override {text!r} has several values; one run takes one value per knob{quoted}"
    if key in GROUPS and parsed.is_delete():
        return f"override {text!r}: a config group option is replaced by {key}=NAME, not removed"
    if key in GROUPS and isinstance(value, str) and value not in options_of(key):
        near = did_you_mean(value, options_of(key))
        known = ", ".join(options_of(key))
        return f"{key}={value}: no such config group option{near} There are: {known}"
    if key in LISTS and isinstance(value, str) and "${" not in value:
        return f"override {text!r}: a list has brackets; write {key}=[{typed}]"
    return _deepspeed_key(key, text)


def _deepspeed_key(key: str, text: str) -> str | None:
    """The way out for a setting of the DeepSpeed JSON that was given without `ds.`, or None."""
    if key in OWNED_BY_KNOBS:
        knob = OWNED_BY_KNOBS[key]
        value = "TOKENS" if knob == "batch_tokens" else text.partition("=")[2]
        return f"override {text!r}: a knob of the recipe sets this for DeepSpeed: {knob}={value}"
    if key.partition(".")[0] not in BLOCKS:
        return None
    return f"override {text!r}: a key of the DeepSpeed JSON is given as ds.{text.lstrip('+~')}"


def is_hydra(key: str) -> bool:
    """True where a key belongs to Hydra's own configuration."""
    return re.split(r"[./@]", key, maxsplit=1)[0] == "hydra"


def typed_value(text: str) -> Any:
    """The value of a text as if it was typed as `knob=text`; the text where it is none."""
    if "${" in text:
        return text
    try:
        parsed = OverridesParser.create().parse_override(f"x={text}")
        return text if parsed.is_sweep_override() else parsed.value()
    except (HydraException, ValueError):
        return text


def sweep_values(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Key -> the overrides of a sweep: `zero=1,2` is {"zero": ["zero=1", "zero=2"]}.

    Hydra's grammar: lists with commas, choice(...), range(...). Raises UserError with all problems.
    """
    parser = OverridesParser.create()
    found: dict[str, list[str]] = {}
    problems = []
    for override in overrides:
        try:
            parsed = parser.parse_override(override)
            key = parsed.key_or_group
            if parsed.is_sweep_override() and not parsed.is_discrete_sweep():
                raise ValueError("its values cannot be counted")
            if parsed.is_sweep_override():
                values = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
            else:
                values = [override]
        except (HydraException, ValueError) as error:
            problems.append(
                f"sweep {override!r} is malformed ({one_line(error)}); write knob=1,2,3"
            )
            continue
        if key in found:
            problems.append(f"sweep {key} is given twice; put all its values behind one {key}=")
        repeated = sorted({value for value in values if values.count(value) > 1})
        problems += [f"sweep {override!r}: {value} stands there twice" for value in repeated]
        found[key] = values
    if problems:
        raise UserError(*problems)
    return found


def one_line(error: Exception) -> str:
    """The first paragraph of a library's message, as one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or its defaults list leads back to itself"
    text = str(error).split("\n    full_key")[0].split("\nSee https")[0]
    cause = error.__cause__ or error.__context__
    if not text.strip() and isinstance(cause, Exception):
        return one_line(cause)
    return " ".join(text.split()) or type(error).__name__
