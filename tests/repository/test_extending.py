"""docs/extending.md: its patches apply, name the files that they change, and train.

One copy of the project gets all patches; one small run uses all four extensions.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
from clones import make_clone, start
from ranks import ROOT, run_command

from record.records import read_metrics

PAGE = ROOT / "docs" / "extending.md"
PATCHES = sorted((ROOT / "docs" / "extending").glob("*.patch"))
EXTENDED = [
    "run=extended", "steps=4", "checkpoint.interval=2", "eval_every=2", "eval_tokens=500",
    "data=arithmetic", "model.vocab_size=257", "optim=rmsprop", "model.hidden_act=mish",
]  # fmt: skip


def changed_files(patch: Path) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the project with every patch applied."""
    clone = make_clone(tmp_path_factory.mktemp("extended"))
    for patch in PATCHES:
        done = run_command(["git", "apply", str(patch)], 60, cwd=clone)
        assert done.returncode == 0, done.stdout
    return clone


def test_each_patch_is_linked_and_each_file_that_it_changes_is_named():
    page = PAGE.read_text()
    linked = set(re.findall(r"\]\((\S+\.patch)\)", page))
    assert {f"extending/{patch.name}" for patch in PATCHES} == linked
    assert len(PATCHES) == 4
    for patch in PATCHES:
        for name in changed_files(patch):
            folder = f"{Path(name).parent}/"
            assert f"`{name}`" in page or f"`{folder}`" in page, (patch.name, name)


def test_the_extensions_train_resume_on_another_layout_and_export(clone):
    done = start(clone, *EXTENDED, "stop_after=2")
    assert done.returncode == 0, done.stdout
    done = start(clone, *EXTENDED, "zero=3", nproc=2)
    assert done.returncode == 0, done.stdout
    lines = read_metrics(clone / "runs" / "extended")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] < lines[0]["loss"]
    for line in lines:
        assert line["scalars"]["loss/perplexity"] == pytest.approx(math.exp(line["loss"]), 1e-5)
    manifest = json.loads((clone / "corpora" / "arithmetic" / "manifest.json").read_text())
    assert manifest["name"] == "arithmetic"
    command = ["make", "export", "RUN=extended", "OUT=out", f"PYTHON={sys.executable}"]
    made = run_command(command, 300, cwd=clone)
    assert made.returncode == 0, made.stdout
    assert json.loads((clone / "out" / "config.json").read_text())["hidden_act"] == "mish"
