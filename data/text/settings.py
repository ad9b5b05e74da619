"""The knobs of `make corpus`: how the text of the inputs is treated.

Rule: every knob but `engine` is part of the corpus's identity; the same input under other settings
is another corpus. Written as OVERRIDES="knob=value ...".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from base.errors import UserError
from base.values import as_float, as_int
from data.corpus.tokenizer import TextTokenizer
from data.text.filters import Filters

KINDS = ("jsonl", "parquet", "text")


@dataclass(frozen=True)
class Settings:
    """One corpus build. `unit_part` is what the work on a unit depends on."""

    text: str = field(default="text", metadata={"meaning": "field or column that holds the text"})
    id: str | None = field(default=None, metadata={"meaning": "field or column with a name"})
    kind: str | None = field(
        default=None, metadata={"meaning": f"of all inputs: {', '.join(KINDS)}"}
    )
    document: str = field(
        default="file",
        metadata={"meaning": "how text files are cut: file, blank, line, or the text between two"},
    )
    eod: str | None = field(default=None, metadata={"meaning": "end token, if not the eos_token"})
    bos: bool | None = field(
        default=None,
        metadata={
            "meaning": "true: each document begins with the begin token; false: with the end token"
            " of the one before; default: true where the tokenizer has a begin token of its own"
        },
    )
    valid: float | None = field(
        default=None, metadata={"meaning": "share of documents held out, by hash; default 0.01"}
    )
    held_out: str | None = field(
        default=None, metadata={"meaning": "file of texts (JSON lines) or ids that are held out"}
    )
    duplicates: str = field(default="drop", metadata={"meaning": "drop (the first stays) or keep"})
    min_chars: int = field(default=0, metadata={"meaning": "shorter documents are dropped"})
    max_chars: int | None = field(default=None, metadata={"meaning": "longer ones are dropped"})
    min_letters: float = field(default=0.0, metadata={"meaning": "least share of letters"})
    max_digits: float = field(default=1.0, metadata={"meaning": "largest share of digits"})
    max_symbols: float = field(default=1.0, metadata={"meaning": "largest share of symbols"})
    bad_bytes: str = field(
        default="stop", metadata={"meaning": "bytes that are not UTF-8: stop, or replace by U+FFFD"}
    )
    max_bad: int = field(
        default=0, metadata={"meaning": "bad lines to put aside before stopping; -1: any number"}
    )
    engine: str = field(
        default="auto", metadata={"meaning": "tokenizers, gigatoken, or auto: what is installed"}
    )
    shuffle: int | None = field(
        default=None, metadata={"meaning": "seed of a random order of all documents"}
    )
    shard_mib: int = field(default=512, metadata={"meaning": "MiB of tokens in a shard"})

    @property
    def filters(self) -> Filters:
        return Filters(
            self.min_chars, self.max_chars, self.min_letters, self.max_digits, self.max_symbols
        )

    @property
    def valid_fraction(self) -> float:
        """Share held out by hash: as given, else 1 in 100, or none where a file says which."""
        if self.valid is not None:
            return self.valid
        return 0.0 if self.held_out else 0.01

    def is_begin_stored(self, tokenizer: TextTokenizer) -> bool:
        """True where each document begins with the tokenizer's begin id on disk."""
        return tokenizer.begin_id != tokenizer.eod_id if self.bos is None else self.bos

    def unit_part(self) -> dict:
        """Settings that the tokens of a unit depend on; the others act later."""
        later = ("valid", "held_out", "duplicates", "shuffle", "shard_mib", "max_bad", "engine")
        return {key: value for key, value in asdict(self).items() if key not in later}


def read_settings(arguments: Iterable[str]) -> Settings:
    """Settings of `make corpus` from `knob=value` arguments. Raises UserError with all problems."""
    settings = read_knobs(Settings, arguments, "make corpus")
    check_settings(settings)
    return settings


def read_knobs(kind: type, arguments: Iterable[str], command: str):
    """A dataclass of knobs from `knob=value` arguments. Raises UserError with all problems."""
    known = {one.name: one for one in fields(kind)}
    values, problems = {}, []
    for argument in arguments:
        name, found, value = argument.partition("=")
        if not found or name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}=?" if near else f"known: {', '.join(known)}"
            problems.append(f"{argument}: is not knob=value with a knob of `{command}`; {hint}")
        elif name in values:
            problems.append(f"{argument}: {name} is given twice")
        else:
            try:
                values[name] = _value(name, str(known[name].type), value)
            except ValueError as error:
                problems.append(f"{name}={value}: {error}")
    if problems:
        raise UserError(*problems)
    return kind(**values)


def knob_lines(kind: type) -> str:
    """Every knob of a dataclass with default and meaning, for --help."""
    return "\n".join(
        f"  {one.name}={one.default if one.default is not None else ''}  {one.metadata['meaning']}"
        for one in fields(kind)
    )


def check_settings(settings: Settings) -> None:
    """Raises UserError with every value that is out of its range."""
    problems = []
    choices = {
        "duplicates": ("drop", "keep"),
        "bad_bytes": ("stop", "replace"),
        "engine": ("auto", "tokenizers", "gigatoken"),
        "kind": (None, *KINDS),
    }
    for name, allowed in choices.items():
        value = getattr(settings, name)
        if value not in allowed:
            text = ", ".join(str(one) for one in allowed if one)
            problems.append(f"{name}={value}: is not one of {text}")
    for name in ("min_letters", "max_digits", "max_symbols"):
        if not 0 <= getattr(settings, name) <= 1:
            problems.append(f"{name}={getattr(settings, name)}: is not a share in [0, 1]")
    if not 0 <= settings.valid_fraction < 1:
        problems.append(f"valid={settings.valid}: is not a share in [0, 1) of the documents")
    if settings.min_chars < 0 or (settings.max_chars or settings.min_chars) < settings.min_chars:
        problems.append(
            f"min_chars={settings.min_chars}, max_chars={settings.max_chars}: expected 0 <= least "
            "<= most"
        )
    if settings.max_bad < -1:
        problems.append(f"max_bad={settings.max_bad}: is not 0 or more, nor -1 for any number")
    if not 0 <= (settings.shuffle or 0) < 2**63:
        problems.append(f"shuffle={settings.shuffle}: is not a seed from 0 to 2**63 - 1")
    if not 1 <= settings.shard_mib <= 1 << 20:
        problems.append(f"shard_mib={settings.shard_mib}: is not in 1 to {1 << 20}")
    for name in ("text", "document"):
        if not getattr(settings, name):
            problems.append(f"{name}=: is empty")
    if settings.held_out and not Path(settings.held_out).is_file():
        problems.append(f"held_out={settings.held_out}: there is no such file")
    if problems:
        raise UserError(*problems)


def _value(name: str, kind: str, value: str):
    if kind.startswith("bool"):
        if value.lower() not in ("true", "false", "1", "0"):
            raise ValueError("is neither true nor false")
        return value.lower() in ("true", "1")
    if kind.startswith("int"):
        return as_int(value)
    if kind.startswith("float"):
        return as_float(value)
    if name == "document":
        return value.encode().decode("unicode_escape") if "\\" in value else value
    return value
