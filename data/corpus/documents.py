"""Document rules: from bytes or text to the text that is tokenized. All kinds of input share them.

    bytes -> UTF-8 (bad bytes: stop, or U+FFFD) -> byte order mark removed -> CRLF to LF
          -> lone surrogates to U+FFFD -> empty or blank: dropped
          -> everything else kept as it is, NUL and control characters too

Rule: nothing is changed or dropped without being counted; the counts and the policy are written to
the manifest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from base.errors import UserError

LONG_TEXT_CHARS = 1 << 20

# The policy in the manifest. A changed rule must change a word here, and with it the corpus id.
POLICY = {
    "encoding": "utf-8",
    "byte_order_mark": "removed",
    "newlines": "crlf to lf",
    "lone_surrogates": "replaced by U+FFFD",
    "blank_documents": "dropped",
    "special_token_strings": "encoded as ordinary text",
    "long_documents": f"tokenized in pieces of {LONG_TEXT_CHARS} characters, cut after a newline",
}

BAD_BYTES = ("stop", "replace")

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """One document before tokenizing: its origin, its bytes (or text), its split.

    In a name that is not UTF-8 text, as a file name may be, U+FFFD replaces the bad bytes.
    """

    name: str
    data: bytes | str
    split: str = "train"

    def __post_init__(self):
        object.__setattr__(self, "name", _SURROGATE.sub("\ufffd", self.name))


def clean_text(document: Document, counts: Counter, bad_bytes: str = "stop") -> str | None:
    """The text to tokenize, or None for a dropped document; updates `counts` under the names of
    POLICY.

    bad_bytes: "stop" raises UserError for invalid UTF-8, "replace" puts U+FFFD and counts the
    document.
    """
    if bad_bytes not in BAD_BYTES:
        raise UserError(f"bad_bytes={bad_bytes!r} is not one of {', '.join(BAD_BYTES)}")
    text = document.data
    if isinstance(text, bytes):
        text = _decoded(document.name, text, counts, bad_bytes)
    if text.startswith("\ufeff"):
        text = text[1:]
        counts["byte_order_mark"] += 1
    if "\r\n" in text:
        counts["newlines"] += text.count("\r\n")
        text = text.replace("\r\n", "\n")
    text, replaced = _SURROGATE.subn("\ufffd", text)
    if replaced:
        counts["lone_surrogates"] += replaced
    if not text or text.isspace():
        counts["blank_documents"] += 1
        return None
    return text


def pieces_of(text: str, limit: int = LONG_TEXT_CHARS) -> Iterator[str]:
    """The text in pieces of at most `limit` characters, cut after the last newline that fits, else
    at the limit.
    """
    start = 0
    while len(text) - start > limit:
        cut = text.rfind("\n", start, start + limit) + 1 or start + limit
        yield text[start:cut]
        start = cut
    yield text[start:]


def _decoded(name: str, data: bytes, counts: Counter, bad_bytes: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if bad_bytes == "stop":
            raise UserError(
                f"{name}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8; "
                "convert the file, or build with bad_bytes=replace"
            ) from None
        counts["bad_bytes"] += 1
        return data.decode("utf-8", errors="replace")
