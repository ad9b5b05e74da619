"""Tokenizers: train one, open any Hugging Face folder, encode, identify.

Rule: text is text. The string of a special token inside a document is encoded as ordinary
characters. The end of a document (EOD) is appended by id, and a tokenizer without an end token is
refused.

Units: ids from 0; `vocab_size` is the largest possible id + 1, added tokens included.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from base.errors import UserError
from data.corpus.shard_writer import PublishedFile

EOD_TOKEN = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 8192

# The ids of this text distinguish tokenizers whose files look alike. Add a new probe if needed, but
# never edit this one: it is part of every fingerprint.
PROBE = (
    "The quick brown fox, 3.14159 and 1,000,000\n\n\tdef f(x):  return x\r\n"
    "na\u00efve \u4e2d\u6587 \U0001f600 e\u0301 \u200f<|endoftext|></s>[UNK] \x00"
)

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


class TextTokenizer:
    """A tokenizer and the token that ends a document, made by `train_bpe`, `byte_tokenizer` or
    `load_tokenizer`.

    The end token is a choice of the corpus and no part of the tokenizer's identity. eod_token: None
    only where the tokenizer is identified and encodes no corpus.
    """

    def __init__(self, definition: str, config: dict, eod_token: str | None):
        self.definition, self.config, self.eod_token = definition, config, eod_token
        self._tokenizer = Tokenizer.from_str(definition)
        # A stored truncation would cut each document in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eod_id = None if eod_token is None else self._id_of(eod_token)
        bos_token = _token_text(config.get("bos_token"))
        self.bos_id = self._tokenizer.token_to_id(bos_token) if bos_token else None
        added = self._tokenizer.get_added_tokens_decoder()
        specials = [t.content for t in added.values() if t.special]
        self._specials = re.compile(
            "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)"
        )
        parsed = json.loads(definition)
        unknown = parsed["model"].get("unk_token")
        self.unk_id = self._tokenizer.token_to_id(unknown) if unknown else None
        # Ids that no text may have. Text may have the unknown token, unless that is the end token.
        ends = {self.eod_id} - {None}
        self.special_ids = {i for i, t in added.items() if t.special} | ends
        self.special_ids -= {self.unk_id} - ends
        self.normalizer = parsed.get("normalizer")
        self.begin_id = self._begin_id()
        self.encode([PROBE])  # raises where some text has no id, and there is no unknown token

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int64 (n,), without any token added."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def pieces(self) -> dict[int, tuple[str, bool]]:
        """Id -> (its string in the vocabulary, True for an added token)."""
        added = self._tokenizer.get_added_tokens_decoder()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return {number: (piece, number in added) for piece, number in vocabulary.items()}

    def count_specials(self, text: str) -> int:
        """Number of strings in the text that look like special tokens."""
        return sum(1 for _ in self._specials.finditer(text))

    def fingerprint(self) -> str:
        """SHA-256 of the definition and of the ids it gives the probe text.

        The library's version is recorded beside it, not in it: an upgrade that changes no id must
        not refuse a corpus.
        """
        return hashlib.sha256(self._identity()).hexdigest()

    def is_recorded_as(self, fingerprint: str) -> bool:
        """True where a fingerprint, or its first digits, is this tokenizer's.

        Fingerprints of older corpora include the end id that the corpus chose; every id is tried.
        """
        if self.fingerprint().startswith(fingerprint):
            return True
        start = hashlib.sha256(self._identity().removesuffix(b"]"))
        for eod_id in range(self.vocab_size):
            whole = start.copy()
            whole.update(b",%d]" % eod_id)
            if whole.hexdigest().startswith(fingerprint):
                return True
        return False

    def _identity(self) -> bytes:
        definition = json.loads(self.definition)
        definition.pop("truncation", None)
        definition.pop("padding", None)
        probe = self.encode([PROBE])[0].tolist()
        return json.dumps([definition, probe], sort_keys=True, separators=(",", ":")).encode()

    def save(self, folder: Path) -> None:
        """Write a folder that `load_tokenizer` and transformers' AutoTokenizer open."""
        folder.mkdir(parents=True, exist_ok=True)
        config = dict(self.config, eos_token=self.eod_token) if self.eod_token else self.config
        text = json.dumps(config, indent=1, sort_keys=True, ensure_ascii=False)
        for name, content in ((TOKENIZER_FILE, self.definition), (CONFIG_FILE, text + "\n")):
            file = PublishedFile(folder / name)
            file.write(content.encode())
            file.publish()

    def _begin_id(self) -> int | None:
        """The id that begins a document: the first id of the template, else bos, else the end."""
        plain = self._tokenizer.encode(PROBE, add_special_tokens=False).ids
        whole = self._tokenizer.encode(PROBE, add_special_tokens=True).ids
        if whole[:1] != plain[:1] and whole[:1]:
            return whole[0]
        return self.eod_id if self.bos_id is None else self.bos_id

    def _id_of(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise UserError(
                f"tokenizer: the end token {token!r} is not in its vocabulary; name one that is"
            )
        return found


def train_bpe(
    texts: Iterator[str] | Sequence[str], vocab_size: int = DEFAULT_VOCAB_SIZE
) -> TextTokenizer:
    """Train a byte-level BPE: id 0 ends a document, ids 1 to 256 are the bytes, then merges.

    Deterministic: the same texts in the same order give the same tokenizer.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer.to_str(), _new_config(), EOD_TOKEN)


def byte_tokenizer() -> TextTokenizer:
    """A tokenizer of 257 ids, for tests: a byte is its own id, 256 ends a document.

    It encodes every text, and a text has as many ids as bytes.
    """
    # GPT-2's printable stand-ins: printable bytes for themselves, the others from U+0100 on, in
    # order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable} | {
        b: chr(256 + i) for i, b in enumerate(others)
    }
    tokenizer = _byte_level(
        models.BPE(vocab={char: byte for byte, char in stand_in.items()}, merges=[])
    )
    tokenizer.add_special_tokens([EOD_TOKEN])
    return TextTokenizer(tokenizer.to_str(), _new_config(), EOD_TOKEN)


def load_tokenizer(
    folder: Path, eod_token: str | None = None, needs_end: bool = True
) -> TextTokenizer:
    """Open a Hugging Face tokenizer folder (`tokenizer.json`).

    eod_token: the end token, by default the eos_token. needs_end: False to identify a tokenizer
    that may have none. Raises UserError where the file is missing, or where there is no end token.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise UserError(
            f"{path}: not found; a tokenizer is a folder with {TOKENIZER_FILE} (a fast tokenizer)"
        )
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / CONFIG_FILE)
    eod_token = eod_token or _token_text(config.get("eos_token"))
    if not eod_token and needs_end:
        raise UserError(
            f"{folder}: the tokenizer has no end token (eos_token in {CONFIG_FILE}); the end of "
            "a document could not be marked: name one of its tokens as the end token (eod=...)"
        )
    try:
        return TextTokenizer(path.read_text(encoding="utf-8"), config, eod_token or None)
    except UserError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise UserError(f"{path}: not a tokenizer that can be opened: {error}") from None


def open_tokenizer(name: str, eod_token: str | None = None) -> TextTokenizer:
    """The tokenizer of a folder, of a tokenizer.json in it, of a corpus, or `bytes`."""
    if name == "bytes":
        return byte_tokenizer()
    path = Path(name)
    if path.name == TOKENIZER_FILE:
        path = path.parent
    elif not (path / TOKENIZER_FILE).is_file() and (path / "tokenizer").is_dir():
        path = path / "tokenizer"
    return load_tokenizer(path, eod_token)


def library_version() -> str:
    """The library that encodes, for the record."""
    return f"tokenizers {tokenizers.__version__}"


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _new_config() -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOD_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }


def _token_text(token: str | dict | None) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise UserError(f"{CONFIG_FILE}: a special token is {text!r}, expected text")
    return text


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected an object")
    return {key: value for key, value in found.items() if value is not None}
