"""The token that precedes each document: its own begin token, or the end of the one before."""

import json

import numpy as np
import pytest
from text_inputs import build, json_lines, write_files
from word_tokenizers import word_tokenizer

from data.corpus.build_report import report_lines
from data.corpus.corpus import BEGIN_SHARED, BEGIN_STORED, open_corpus
from data.corpus.tokenizer import load_tokenizer

WORDS = ["[UNK]", "cat", "dog", "<s>", "</s>", "<cls>"]
CAT, DOG, BEGIN, END, TEMPLATE = 1, 2, 3, 4, 5


def tokenizer_of(folder, bos=None, template=None, eos="</s>"):
    """A tokenizer with a begin token in its configuration, its template, both or neither."""
    word_tokenizer(folder, WORDS, eos=eos)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "bos_token": bos}))
    if template:
        from tokenizers import Tokenizer, processors

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens([template])
        pair = (template, tokenizer.token_to_id(template))
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{template} $A", special_tokens=[pair]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def ids_of(folder):
    found = open_corpus(folder).splits["train"]
    return found.read(np.array([0]), found.num_tokens)[0].tolist()


@pytest.mark.parametrize(
    ("tokenizer", "words", "begin", "ids"),
    [
        # By default a tokenizer's own begin token is stored, wherever it is named.
        ({"bos": "<s>"}, [], BEGIN, [BEGIN, CAT, END, BEGIN, DOG, END]),
        ({"template": "<s>"}, [], BEGIN, [BEGIN, CAT, END, BEGIN, DOG, END]),
        ({"bos": "<s>", "template": "<cls>"}, [], 5, [TEMPLATE, CAT, END, TEMPLATE, DOG, END]),
        ({"bos": "<s>"}, ["bos=true"], BEGIN, [BEGIN, CAT, END, BEGIN, DOG, END]),
        # Where there is none, or it is not wanted, or it is the end token, the end token precedes.
        ({}, [], END, [CAT, END, DOG, END]),
        ({"bos": "</s>"}, [], END, [CAT, END, DOG, END]),
        ({"bos": "<s>"}, ["bos=false"], END, [CAT, END, DOG, END]),
    ],
)
def test_what_precedes_a_document_is_written_in_the_corpus(tmp_path, tokenizer, words, begin, ids):
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines(["cat", "dog"])})
    manifest = build(source, tmp_path / "c", *words, tokenizer=tokenizer_of(tmp_path, **tokenizer))
    corpus = open_corpus(tmp_path / "c")
    assert ids_of(tmp_path / "c") == ids
    assert corpus.begin_id == manifest["begin_id"] == begin
    assert corpus.is_begin_shared is (begin == END)
    policy = BEGIN_SHARED if begin == END else BEGIN_STORED
    assert f"  begin id {begin}: {policy}" in report_lines(tmp_path / "c", manifest)


def test_a_build_that_goes_on_with_another_begin_token_starts_its_units_again(tmp_path):
    """The begin id is in every document, so finished units of another one are not used."""
    bad = {"x.jsonl": json_lines(["cat"]), "y.jsonl": b"no json\n"}
    source = write_files(tmp_path / "in", bad)
    tokenizer = tokenizer_of(tmp_path / "t", bos="<s>")
    with pytest.raises(Exception, match=r"y\.jsonl:1"):
        build(source, tmp_path / "c", tokenizer=tokenizer)
    write_files(tmp_path / "in", {"y.jsonl": json_lines(["dog"])})
    build(source, tmp_path / "c", tokenizer=tokenizer_of(tmp_path / "u"))
    assert ids_of(tmp_path / "c") == [CAT, END, DOG, END]
