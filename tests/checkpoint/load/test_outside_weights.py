"""Weights from outside: the tokenizer they were trained with, whatever end token a corpus chose."""

from types import SimpleNamespace

import pytest
from word_tokenizers import word_tokenizer

from base.errors import UserError
from checkpoint.load.outside_weights import check_tokenizer
from data.corpus.corpus import open_corpus
from data.corpus.corpus_writer import write_text_corpus
from data.corpus.documents import Document
from data.corpus.tokenizer import load_tokenizer

WORDS = ["[UNK]", "cat", "sat", "<|endoftext|>", "<|im_end|>"]


def corpus_of(folder, tokenizer):
    documents = [Document("d", "cat sat " * 40)]
    write_text_corpus(folder, documents, tokenizer, fields={"name": "x"}, valid="none")
    return SimpleNamespace(uids=["x"], corpora=[open_corpus(folder)])


def test_an_end_token_chosen_for_the_corpus_makes_no_other_tokenizer(tmp_path):
    """CKP-34: a chat model's tokenizer ends with im_end, pretraining documents with endoftext."""
    folder = word_tokenizer(tmp_path / "weights", WORDS, eos="<|im_end|>")
    stream = corpus_of(tmp_path / "c", load_tokenizer(folder, "<|endoftext|>"))
    assert stream.corpora[0].eod_id == 3
    check_tokenizer(folder, stream)
    words = ["[UNK]", "sat", "cat", *WORDS[3:]]
    other = word_tokenizer(tmp_path / "other", words, eos="<|im_end|>")
    with pytest.raises(UserError, match=r"data.sources.x was made with another one"):
        check_tokenizer(other, stream)
