"""docs/architecture.md and docs/glossary.md: the picture is that of the code, names exist."""

from __future__ import annotations

import importlib.util
import re

from ranks import ROOT
from source_tree import PACKAGES

PAGE = (ROOT / "docs" / "architecture.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
WALKS = ("A knob", "A batch", "A save and a load", "A failed rank")


def test_the_picture_is_what_the_script_draws_from_the_imports():
    path = ROOT / "docs" / "draw_architecture.py"
    spec = importlib.util.spec_from_file_location("draw_architecture", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    is_same = script.PICTURE.read_text() == script.drawing()
    assert is_same, "the imports have changed: python docs/draw_architecture.py"
    found = script.arrows()
    assert found["commands"] >= {"base", "recipes", "launch", "compare"}
    assert found["base"] == set()
    assert "runtime" in found["pretrain"]


def test_every_walk_names_files_that_exist():
    for title in WALKS:
        walk = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        names = re.findall(r"`([\w/]+\.(?:py|yaml))`", walk)
        assert len(names) >= 8, title
        assert not [name for name in names if not (ROOT / name).is_file()], title


def test_every_room_is_in_the_table_of_rooms():
    rooms = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert rooms == list(PACKAGES)


def test_each_term_of_the_glossary_has_one_sentence_and_the_terms_are_sorted():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", GLOSSARY, re.MULTILINE)[1:]
    terms = [term for term, _ in rows]
    assert len(terms) >= 30
    assert terms == sorted(terms, key=str.lower)
    assert len(set(terms)) == len(terms)
    for term, meaning in rows:
        assert meaning.endswith("."), term
        assert ". " not in meaning, term
