"""Tokenizers: training, loading, identity, and that text stays text."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from word_tokenizers import word_tokenizer

from base.errors import UserError
from data.corpus.tokenizer import (
    EOD_TOKEN,
    PROBE,
    TextTokenizer,
    byte_tokenizer,
    load_tokenizer,
    train_bpe,
)

TEXTS = [
    "the cat sat on the mat and the dog sat on the log\n" * 20,
    "when in the course of human events it becomes necessary 1234 \U0001f600 na\u00efve " * 5,
]


@pytest.fixture(scope="module")
def trained():
    return train_bpe(TEXTS, vocab_size=300)


def test_training_twice_gives_the_same_bytes(trained):
    again = train_bpe(iter(TEXTS), vocab_size=300)
    assert again.definition == trained.definition
    assert again.fingerprint() == trained.fingerprint()
    assert (trained.vocab_size, trained.eod_id) == (300, 0)
    assert train_bpe(TEXTS, vocab_size=301).fingerprint() != trained.fingerprint()


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: train_bpe(TEXTS, vocab_size=300)])
def test_text_of_any_kind_returns_from_its_ids(make):
    """NUL, tabs, vertical tab, 4-byte emoji, combining and right-to-left marks, line separators."""
    text = "a\x00b\tc\x0bd \U0001f600 e\u0301 \u200f\u05d0 \u2028\u2029\x85 \r lone \n\n  end "
    tokenizer = make()
    ids = tokenizer.encode([text, "", text])
    assert tokenizer.decode(ids[0]) == text
    assert len(ids[1]) == 0
    assert np.array_equal(ids[0], ids[2])


def test_byte_tokenizer_has_257_ids_and_a_byte_is_its_own(trained):
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    text = "caf\u00e9 \x00\x7f\u0100"
    assert tokenizer.encode([text])[0].tolist() == list(text.encode())
    every = tokenizer._tokenizer.get_vocab(with_added_tokens=False)
    assert sorted(every.values())[:256] == list(range(256))


def test_a_special_tokens_string_in_text_is_ordinary_text(trained, tmp_path):
    words = word_tokenizer(tmp_path / "w", ["[UNK]", "cat", "</s>"], eos="</s>")
    for tokenizer in (trained, byte_tokenizer(), load_tokenizer(words)):
        text = f"cat {tokenizer.eod_token} cat"
        assert tokenizer.eod_id not in tokenizer.encode([text])[0]
        assert tokenizer.count_specials(text) == 1
        assert tokenizer.count_specials("cat <|endof text|>") == 0


def test_a_stored_folder_opens_in_transformers_with_the_same_ids(trained, tmp_path):
    from transformers import AutoTokenizer

    trained.save(tmp_path / "t")
    ours = load_tokenizer(tmp_path / "t")
    assert ours.fingerprint() == trained.fingerprint()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "t")
    text = "the cat \U0001f600 sat\n"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode([text])[0].tolist()
    assert theirs.eos_token_id == ours.eod_id == 0
    assert theirs.eos_token == EOD_TOKEN
    assert theirs.decode(ours.encode([text])[0]) == text


def test_a_foreign_tokenizer_adds_pads_and_truncates_nothing(tmp_path):
    folder = word_tokenizer(tmp_path, ["[UNK]", "cat", "dog", "</s>"], eos="</s>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(["cat dog " * 5])[0].tolist() == [1, 2] * 5
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (3, 4)


@pytest.mark.parametrize("end", [{"content": "</s>"}, "</s>"])
def test_end_token_is_read_from_config_or_from_the_special_tokens_map(tmp_path, end):
    folder = word_tokenizer(tmp_path, ["[UNK]", "cat", "</s>"], eos=end)
    assert load_tokenizer(folder).eod_id == 2
    (folder / "tokenizer_config.json").write_text('{"eos_token": null}')
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    assert load_tokenizer(folder).eod_id == 2


def test_a_tokenizer_without_end_token_is_refused_and_one_can_be_named(tmp_path):
    folder = word_tokenizer(tmp_path, ["[UNK]", "cat", "end"])
    with pytest.raises(UserError, match="has no end token"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, eod_token="end").eod_id == 2
    with pytest.raises(UserError, match="'</s>' is not in its vocabulary"):
        load_tokenizer(folder, eod_token="</s>")
    with pytest.raises(UserError, match=r"tokenizer.json: not found"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_tokenizer_that_has_no_ids_for_some_text_is_refused(tmp_path):
    folder = word_tokenizer(tmp_path, ["[UNK]", "cat", "</s>"], eos="</s>")
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["model"]["unk_token"] = "[GONE]"
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(UserError, match=r"tokenizer.json: not a tokenizer .*Missing \[UNK\]"):
        load_tokenizer(folder)


def test_an_unknown_token_that_is_the_end_token_is_not_what_text_may_have(tmp_path):
    shared = load_tokenizer(word_tokenizer(tmp_path / "a", ["[UNK]", "cat"], eos="[UNK]"))
    assert shared.special_ids == {0}
    apart = load_tokenizer(word_tokenizer(tmp_path / "b", ["[UNK]", "cat", "</s>"], eos="</s>"))
    assert apart.special_ids == {2}


def test_vocabulary_size_counts_added_tokens_and_gaps(tmp_path):
    definition = json.loads(byte_tokenizer().definition)
    definition["added_tokens"].append(dict(definition["added_tokens"][0], id=400, content="<x>"))
    definition["model"]["vocab"]["<x>"] = 400
    tokenizer = TextTokenizer(json.dumps(definition), {}, EOD_TOKEN)
    assert tokenizer.vocab_size == 401


def test_the_end_token_of_a_corpus_is_no_part_of_the_tokenizers_identity(tmp_path):
    words = ["[UNK]", "cat", "dog", "</s>", "<|im_end|>"]
    folder = word_tokenizer(tmp_path / "a", words, eos="</s>")
    own, chosen = load_tokenizer(folder), load_tokenizer(folder, "<|im_end|>")
    assert own.eod_id != chosen.eod_id
    assert own.fingerprint() == chosen.fingerprint()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))
    without = load_tokenizer(folder, needs_end=False)
    assert without.eod_id is None
    assert without.fingerprint() == own.fingerprint()
    with pytest.raises(UserError, match="has no end token"):
        load_tokenizer(folder)


def test_a_fingerprint_of_an_older_corpus_is_recognized_whatever_its_end_id(tmp_path):
    """Until this change it covered the end id: [definition, probe ids, end id], as compact JSON."""
    words = ["[UNK]", "cat", "dog", "</s>", "<|im_end|>"]
    own = load_tokenizer(word_tokenizer(tmp_path / "a", words, eos="</s>"))
    other = load_tokenizer(word_tokenizer(tmp_path / "b", words[::-1], eos="</s>"))
    definition = json.loads(own.definition)
    for name in ("truncation", "padding"):
        definition.pop(name, None)
    for end_id in range(len(words)):
        what = [definition, own.encode([PROBE])[0].tolist(), end_id]
        text = json.dumps(what, sort_keys=True, separators=(",", ":"))
        recorded = hashlib.sha256(text.encode()).hexdigest()
        assert own.is_recorded_as(recorded)
        assert own.is_recorded_as(recorded[:16])  # as a checkpoint has it
        assert not other.is_recorded_as(recorded)
    assert own.is_recorded_as(own.fingerprint())
    assert not own.is_recorded_as(other.fingerprint())


def test_fingerprint_tells_apart_equal_sizes_and_ignores_truncation(tmp_path):
    first = word_tokenizer(tmp_path / "a", ["[UNK]", "cat", "dog", "</s>"], eos="</s>")
    other = word_tokenizer(tmp_path / "b", ["[UNK]", "dog", "cat", "</s>"], eos="</s>")
    assert load_tokenizer(first).vocab_size == load_tokenizer(other).vocab_size
    assert load_tokenizer(first).fingerprint() != load_tokenizer(other).fingerprint()
    shutil.copytree(first, tmp_path / "c")
    path = tmp_path / "c" / "tokenizer.json"
    definition = json.loads(path.read_text())
    definition["truncation"] = None
    path.write_text(json.dumps(definition))
    assert load_tokenizer(tmp_path / "c").fingerprint() == load_tokenizer(first).fingerprint()
