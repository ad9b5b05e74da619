"""`make knobs`, and: every knob is read by some code."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from base.paths import ROOT
from commands import knobs
from recipes.check import knob_names
from recipes.faults import Alerts, Health
from recipes.output_knobs import Log
from recipes.schema import Cluster, Data, Model, Optim, Parallel, Recipe, Source, Watch

CODE = (
    "data", "model", "parallel", "checkpoint", "record", "runtime", "plan", "launch", "compare",
    "commands", "pretrain.py",
)  # fmt: skip
CLASSES = (Recipe, Model, Data, Source, Optim, Health, Alerts, Cluster, Parallel, Log, Watch)


def source_files() -> list[Path]:
    found = []
    for name in CODE:
        path = ROOT / name
        found += [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    return found


@pytest.fixture(scope="module")
def reads() -> set[str]:
    """Names that code outside recipes/ takes from an object: `x.name`, or getattr(x, "name")."""
    names = set()
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                names |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return names


@pytest.mark.parametrize("cls", CLASSES)
def test_every_knob_is_read_by_some_code(cls, reads):
    unread = [field.name for field in dataclasses.fields(cls) if field.name not in reads]
    assert not unread


def test_every_knob_says_what_it_means_and_in_which_unit():
    for name, field in knob_names().items():
        assert field.metadata["meaning"], name
    assert knob_names()["seq_len"].metadata["unit"] == "tokens"


def test_find_looks_in_names_and_meanings(capsys):
    assert knobs.main(["--find", "lr"]) == 0
    out = capsys.readouterr().out
    assert "optim.lr" in out
    assert "peak learning rate" in out
    assert "required" in out
    assert knobs.main(["--find", "model.vocab_size"]) == 0
    assert "integer; 2 to 2^31 - 1; required\n" in capsys.readouterr().out
    assert "micro_batch" not in out
    assert knobs.main(["--find", "bucket"]) == 0
    assert "ds.zero_optimization.reduce_bucket_size" in capsys.readouterr().out


def test_everything_is_listed_once():
    names = [row.name for row in knobs.all_rows()]
    assert len(names) == len(set(names))
    assert {"run", "data.sources.NAME.weight", "ds.bf16.immediate_grad_update"} <= set(names)
    assert "ds.gradient_clipping" not in names  # optim.clip owns it


@pytest.mark.parametrize("width", [60, 80, 200])
def test_lines_are_as_wide_as_the_terminal_and_knobs_stand_in_groups(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert knobs.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(width, max(len(row.name) for row in knobs.all_rows()) + 2)
    headings = [line.partition(":")[0] for line in lines if line and line[0] != " " and ":" in line]
    assert headings[:2] == ["RUN", "MODEL"]
    assert {"DATA", "OPTIM", "CHECKPOINT", "DS"} < set(headings)
    assert len(headings) == len(set(headings))
    text = " ".join(" ".join(lines).split())
    assert "(model=NAME takes a file of recipes/model/: llama-125m," in text
    for row in knobs.all_rows():
        assert f"  {row.name}\n" in "\n".join(lines) + "\n" or f"  {row.name} " in "\n".join(lines)
        assert " ".join(row.meaning.split()) in text, row.name


def test_types_are_named_as_people_know_them():
    kinds = {row.name: row.kind for row in knobs.all_rows()}
    assert kinds["batch_tokens"] == "integer, or list of [step, tokens]"
    assert kinds["data.skip.advance"] == "list of [first, end]"
    assert kinds["optim.lr"] == "number"
    assert kinds["compile"] == "true or false"
    assert kinds["steps"] == "integer, or null"
    assert kinds["ds.zero_optimization.reduce_bucket_size"] == "integer"
    assert not [name for name, kind in kinds.items() if "Any" in kind or "None" in kind]


def test_nothing_found_is_said_and_fails(capsys):
    assert knobs.main(["--find", "xyzzy"]) == 93
    assert "xyzzy" in capsys.readouterr().err
