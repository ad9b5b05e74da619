"""compare/tensorboard_names.py: short names of curves, each training once."""

from __future__ import annotations

import json
import subprocess

import pytest
from ranks import ROOT

from compare.tensorboard_names import link, named


@pytest.fixture
def runs(tmp_path):
    """A run with two rewinds, a branch, and a comparison of two variants with its runs."""
    for name in (
        "tiny/tensorboard/segment-00",
        "tiny/tensorboard/segment-01-after-80",
        "tiny/tensorboard/segment-02-after-80",
        "branch/tensorboard/segment-03-after-40",
        "by-lr/tensorboard/optim.lr=1e-3",
        "by-lr/tensorboard/optim.lr=2e-3",
        "by-lr/tensorboard/report",
        "by-lr.lr-0.001.r1/tensorboard/segment-00",
        "by-lr.lr-0.001.r2/tensorboard/segment-00",
        "by-lr.lr-0.002.r1/tensorboard/segment-00",
        "by-lr.mine/tensorboard/segment-00",
        "empty",
    ):
        (tmp_path / name).mkdir(parents=True)
    slugs = [{"slug": "lr-0.001"}, {"slug": "lr-0.002"}]
    (tmp_path / "by-lr" / "comparison.json").write_text(json.dumps({"variants": slugs}))
    return tmp_path


def test_names_are_short_and_the_runs_of_a_comparison_are_not_shown_twice(runs):
    found = {name: str(path.relative_to(runs)) for name, path in named(runs).items()}
    assert found == {
        "tiny": "tiny/tensorboard/segment-00",
        "tiny (after rewind to 80)": "tiny/tensorboard/segment-01-after-80",
        "tiny (after rewind to 80, segment 2)": "tiny/tensorboard/segment-02-after-80",
        "branch": "branch/tensorboard/segment-03-after-40",
        "by-lr: lr=1e-3": "by-lr/tensorboard/optim.lr=1e-3",
        "by-lr: lr=2e-3": "by-lr/tensorboard/optim.lr=2e-3",
        "by-lr: report": "by-lr/tensorboard/report",
        "by-lr.mine": "by-lr.mine/tensorboard/segment-00",
    }


def test_a_comparison_of_runs_that_existed_adds_only_its_report(runs):
    before = set(named(runs))
    for comparison in ("tiny-vs-branch", "by-lr.lr-0.001.r1-vs-tiny"):
        for name in ("tiny", "branch", "report"):
            (runs / comparison / "tensorboard" / name).mkdir(parents=True)
        content = {"kind": "runs", "runs": ["tiny", "branch"]}
        (runs / comparison / "comparison.json").write_text(json.dumps(content))
    added = {"tiny-vs-branch: report", "by-lr.lr-0.001.r1-vs-tiny: report"}
    assert set(named(runs)) - before == added
    assert set(named(runs, "tiny-vs-branch")) == {"tiny", "branch", "report"}


def test_one_run_or_comparison_alone(runs):
    assert set(named(runs, "by-lr")) == {"lr=1e-3", "lr=2e-3", "report"}
    assert set(named(runs, "by-lr.lr-0.001.r1")) == {"by-lr.lr-0.001.r1"}
    assert len(named(runs, "tiny")) == 3


def test_a_damaged_comparison_hides_nothing(runs):
    (runs / "by-lr" / "comparison.json").write_text("{")
    assert "by-lr.lr-0.001.r1" in named(runs)


def test_links_follow_runs_that_come_and_go(runs, tmp_path_factory):
    place = tmp_path_factory.mktemp("links")
    link(place, named(runs))
    assert (place / "tiny").resolve() == runs / "tiny/tensorboard/segment-00"
    (runs / "new/tensorboard/segment-00").mkdir(parents=True)
    wanted = named(runs)
    del wanted["tiny"]
    link(place, wanted)
    assert {path.name for path in place.iterdir()} == set(wanted)


@pytest.mark.parametrize(
    ("command", "option"), [("tensorboard", "--run=$RUN"), ("status", '"$RUN"')]
)
def test_make_hands_on_the_run_that_was_asked_for(command, option):
    base = ["make", "-n", "-s", command, "PYTHON=/usr/bin/python3"]
    asked = subprocess.run(
        [*base, "RUN=mine"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert option in asked.stdout
    plain = subprocess.run(base, cwd=ROOT, capture_output=True, text=True, check=True)
    assert option not in plain.stdout
