"""docs/own-data.md: its commands work in their order, its table has every knob."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys

from clones import make_clone
from pages import commands_of
from ranks import ROOT, run_command
from text_inputs import json_lines, write_files

from data.corpus.sotu import read_documents
from data.text.settings import Settings

TEXT = (ROOT / "docs" / "own-data.md").read_text()


def test_its_commands_work_one_after_the_other(tmp_path):
    clone = make_clone(tmp_path)
    paragraphs = [p for d in read_documents()[:60] for p in d.data.decode().split("\n") if p]
    half = len(paragraphs) // 2
    files = {"a.jsonl": json_lines(paragraphs[:half]), "b.jsonl": json_lines(paragraphs[half:])}
    write_files(clone / "texts", files)
    write_files(clone / "corpora", {"sotu/tokenizer/x": ""})
    (clone / "corpora" / "sotu" / "tokenizer" / "x").unlink()
    commands = commands_of(TEXT)
    assert len(commands) == 6
    for command in commands:
        words = [*shlex.split(command), f"PYTHON={sys.executable}"]
        if words[1] == "pretrain":
            words = [
                w + " stop_after=2 eval_tokens=0" if w.startswith("OVER") else w for w in words
            ]
        done = run_command(words, 240, cwd=clone, PYTHONPATH=str(clone))
        assert done.returncode == 0, done.stdout
        if words[1] == "tokenizer":  # stands for the default corpus, which others build
            (clone / "corpora" / "sotu" / "tokenizer").rmdir()
            (clone / "corpora" / "sotu" / "tokenizer").symlink_to(clone / "corpora/my-tokenizer")
    assert "step 2/2" in re.sub(" +", " ", done.stdout) or (clone / "runs" / "mine").is_dir()


def test_its_table_has_every_knob_with_its_default():
    table = re.search(r"\| knob \|.*?\n\n", TEXT, re.DOTALL).group()
    named = re.findall(
        r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:] if line)
    )
    knobs = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert named == list(knobs)
    for line in table.strip().splitlines()[2:]:
        names, defaults = (cell.strip() for cell in line.split("|")[1:3])
        for name, shown in zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=True):
            value = knobs[name]
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                assert float(shown) == value
            elif isinstance(value, str):
                assert shown.strip("`") == value
