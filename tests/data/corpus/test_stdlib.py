"""The standard library as a text: modules in order, some held out, the default tokenizer."""

from data.corpus import sotu, stdlib
from data.corpus.corpus import open_corpus
from data.corpus.tokenizer import byte_tokenizer


def test_the_library_becomes_a_corpus_with_the_default_corpus_tokenizer(tmp_path, monkeypatch):
    documents = stdlib.read_documents()
    names = [one.name for one in documents]
    assert names == sorted(names)
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    held_out = sum(one.split == "valid" for one in documents)
    assert 0.02 < held_out / len(documents) < 0.1
    trained = []

    def train(texts):
        trained.append(texts)
        return byte_tokenizer()

    monkeypatch.setattr(stdlib, "train_bpe", train)
    monkeypatch.setattr(stdlib, "read_documents", lambda: documents[:12])
    manifest = stdlib.build(tmp_path / "c", lambda text: None)
    assert manifest["name"] == "stdlib"
    corpus = open_corpus(tmp_path / "c")
    assert sum(split.num_documents for split in corpus.splits.values()) == sum(
        bool(one.data.strip()) for one in documents[:12]
    )
    prose = [one.data.decode() for one in sotu.read_documents() if one.split == "train"]
    assert trained == [prose]
