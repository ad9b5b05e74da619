"""Documents that a file names for validation, by their text or by their id.

    {"text": "..."} or {"id": "..."} a line, or a bare id a line

Rule: a text is held out, not a row: every document with the same text as a named document is held
out with it, so no text is on both sides. Memory: the named documents only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from base.errors import UserError
from data.corpus.documents import Document, clean_text
from data.text.assemble import Done, batches, digest_words
from data.text.reading import load_json
from data.text.settings import Settings


def held_digests(settings: Settings, units: Sequence[Done]) -> tuple[np.ndarray, int]:
    """Digests of the texts that settings.held_out names, uint64 (n, 2), and the number of its
    entries that are not in the input.

    Raises UserError where a line is neither a text nor an id, or where the input has none of them.
    """
    none = np.empty((0, 2), dtype=np.uint64)
    if not settings.held_out:
        return none, 0
    texts, ids = read_entries(Path(settings.held_out), settings)
    named = np.frombuffer(b"".join(sorted(texts)), dtype="<u8").reshape(-1, 2)
    wanted, found_texts, found_ids, digests = pa.array(sorted(ids), pa.string()), set(), set(), []
    for unit in units:
        for batch in batches(unit.folder):
            words = digest_words(batch)
            near = np.isin(words[:, 0], named[:, 0])
            found_texts |= {row.tobytes() for row in words[near]} & texts
            column = batch.column(batch.schema.get_field_index("id"))
            mine = pc.is_in(column, value_set=wanted).to_numpy(zero_copy_only=False)
            digests.append(words[mine])
            found_ids.update(column.filter(pa.array(mine)).to_pylist())
    if texts | ids and not (found_texts or found_ids):
        raise UserError(
            f"held_out={settings.held_out}: none of its {len(texts)} texts and {len(ids)} ids is "
            "in the input; correct the file or the names of the fields (text=, id=)"
        )
    every = np.concatenate([none, named, *digests])
    return np.unique(every, axis=0), len(texts) + len(ids) - len(found_texts) - len(found_ids)


def read_entries(path: Path, settings: Settings) -> tuple[set[bytes], set[str]]:
    """(digests of texts, ids) of a file. Raises UserError with file and line."""
    texts, ids, id_field = set(), set(), settings.id or "id"
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{path}:{number}"
            try:
                text = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8").strip()
                entry = load_json(text) if text.startswith("{") else {id_field: text}
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: is neither JSON nor an id: {error}") from None
            if not text:
                continue
            if isinstance(entry.get(settings.text), str):
                cleaned = clean_text(Document(place, entry[settings.text]), Counter())
                if cleaned is not None:
                    texts.add(xxhash.xxh3_128_digest(cleaned.encode()))
            elif entry.get(id_field) is not None:
                value = entry[id_field]
                ids.add(value if isinstance(value, str) else json.dumps(value, default=str))
            else:
                raise UserError(
                    f"{place}: has neither a text in {settings.text!r} nor an id in {id_field!r}"
                )
    if ids and not settings.id:
        raise UserError(
            f"held_out={path}: holds ids; name the field of the input that holds the id: "
            "OVERRIDES=id=..."
        )
    return texts, ids
