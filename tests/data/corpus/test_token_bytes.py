"""data.corpus.token_bytes: bytes of the tokens against those of the text, by kind of tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from data.corpus.token_bytes import token_bytes
from data.corpus.tokenizer import TextTokenizer, byte_tokenizer, train_bpe

TEXTS = [
    "A plain line, as most documents have.",
    "  two spaces first, caf\u00e9 \u4e2d\u6587 \U0001f600\n\n\ttab\r\n",
    "x",
]


def byte_level_with_added_tokens() -> TextTokenizer:
    tokenizer = Tokenizer.from_str(train_bpe(TEXTS * 5, 280).definition)
    tokenizer.add_tokens(["    ", "caf\u00e9"])  # GPT-NeoX has runs of spaces as added tokens
    return TextTokenizer(tokenizer.to_str(), {}, "<|endoftext|>")


def byte_fallback() -> TextTokenizer:
    """Like Llama 2: a space before each document, taken away by the decoder; bytes as tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"abcdefghilmnopstuvxAl,.", "\u2581", "\u2581a", "li", "\u00e9"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("\u2581", "a"), ("l", "i")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TextTokenizer(tokenizer.to_str(), {"bos_token": "<s>"}, "</s>")


def count(tokenizer: TextTokenizer, text: str) -> int | None:
    """Bytes of a document's targets, its end included."""
    sizes = token_bytes(tokenizer)
    ids = [tokenizer.eod_id, *tokenizer.encode([text])[0], tokenizer.eod_id]
    return sizes.count(np.array([ids[:-1]]), np.array([ids[1:]]), {tokenizer.eod_id})


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "make",
    [byte_tokenizer, lambda: train_bpe(TEXTS * 5, 300), byte_level_with_added_tokens,
     byte_fallback],
    ids=["bytes", "bpe", "added", "fallback"],
)  # fmt: skip
def test_the_bytes_of_a_documents_tokens_are_those_of_its_text(make, text):
    assert count(make(), text) == len(text.encode())


def test_a_target_without_label_has_no_bytes_and_a_document_inside_a_row_begins_anew():
    """Two documents in one row, by hand: 'a b' and 'a'; the first target is masked."""
    tokenizer = byte_fallback()
    first, second = (tokenizer.encode([text])[0].tolist() for text in ("a b", "a"))
    assert len(first) == 3  # a space with a, a space, b
    end = tokenizer.eod_id
    ids = np.array([[end, *first, end, *second, end]])
    labels = ids[:, 1:].copy()
    sizes = token_bytes(tokenizer)
    assert sizes.count(ids[:, :-1], labels, {end}) == len("a b") + len("a")
    labels[0, 0] = -100
    assert sizes.count(ids[:, :-1], labels, {end}) == len(" b") + len("a")


def test_text_that_the_vocabulary_does_not_have_has_no_known_number_of_bytes():
    words = {"[UNK]": 0, "[END]": 1, "plain": 2, "line": 3, "##s": 4, "a": 5}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    made = TextTokenizer(tokenizer.to_str(), {}, "[END]")
    assert count(made, "a plain lines") == len("a plain lines")
    assert count(made, "a plain tree") is None
