"""`make sample`: the text of a run is that of its export; it ends at the context."""

from __future__ import annotations

import pytest
from saved_models import trained
from transformers import LlamaForCausalLM

from checkpoint.export import export
from commands import sample
from data.corpus.tokenizer import byte_tokenizer


@pytest.fixture
def run(tmp_path):
    """A run with one checkpoint, and the tokenizer of its corpus."""
    byte_tokenizer().save(tmp_path / "corpus" / "tokenizer")
    trained(tmp_path / "run", data={"sources": {"a": {"corpus": str(tmp_path / "corpus")}}})
    return tmp_path / "run"


def said(capsys, *words):
    assert sample.main([str(word) for word in words]) == 0
    return capsys.readouterr()


def test_a_run_and_its_export_give_the_same_text_and_nothing_is_written(run, tmp_path, capsys):
    export(run, tmp_path / "out", dtype="fp32", tokenizer=tmp_path / "corpus" / "tokenizer")
    before = sorted(run.rglob("*"))
    for words in (["--prompt=The"], ["--seed=3"], ["--temperature=0"], ["--top-p=0.5"]):
        from_run = said(capsys, run, *words, "--tokens=20").out
        assert from_run == said(capsys, tmp_path / "out", *words, "--tokens=20").out
    assert sorted(run.rglob("*")) == before


def test_seed_temperature_and_top_p_change_the_text_and_repeat_it(run, capsys):
    texts = {
        words: said(capsys, run, "--prompt=The", "--tokens=30", *words.split()).out
        for words in ("--seed=0", "--seed=1", "--seed=0 --temperature=9", "--seed=0 --top-p=0.01")
    }
    assert len(set(texts.values())) == 4
    greedy = {said(capsys, run, "--temperature=0", f"--seed={seed}").out for seed in (1, 2)}
    assert len(greedy) == 1
    assert said(capsys, run, "--prompt=The", "--tokens=30", "--seed=0").out == texts["--seed=0"]


def test_text_ends_at_the_context_and_a_longer_prompt_is_refused(run, capsys):
    found = said(capsys, run, "--prompt", "x" * 60, "--tokens=100", "--temperature=9")
    assert len(found.out.encode()) > 60
    assert "stopped at the model's context of 64 tokens" in found.err
    assert said(capsys, run, "--prompt", "x" * 60, "--tokens=2").err == ""
    assert sample.main([str(run), "--prompt", "x" * 64]) == 93
    assert "PROMPT has 64 tokens, and the model was trained on sequences of 64" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("begin_id", [7, 256])
def test_a_prompt_begins_a_document_as_in_the_training(tmp_path, capsys, monkeypatch, begin_id):
    """The begin token comes first in a run and its export; an empty prompt is that token alone."""
    byte_tokenizer().save(tmp_path / "corpus" / "tokenizer")
    trained(
        tmp_path / "run",
        data={"sources": {"a": {"corpus": str(tmp_path / "corpus")}}},
        data_state={"begin_id": begin_id, "end_id": 256},
    )
    out = tmp_path / "out"
    export(tmp_path / "run", out, dtype="fp32", tokenizer=tmp_path / "corpus" / "tokenizer")
    seen = []
    plain = LlamaForCausalLM.generate

    def watched(self, ids, **settings):
        seen.append(ids[0].tolist())
        return plain(self, ids, **settings)

    monkeypatch.setattr(LlamaForCausalLM, "generate", watched)
    for folder in (tmp_path / "run", out):
        for prompt in ("The", "", "x" * 62, "x" * 63):
            said(capsys, folder, f"--prompt={prompt}", "--tokens=1")
    whole = [[begin_id, *b"The"], [begin_id], [begin_id, *b"x" * 62], [*b"x" * 63]]
    assert seen == whole + whole  # where the begin token has no room, the prompt is whole
