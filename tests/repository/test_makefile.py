"""Makefile: each command reads the variables that it says, and others are refused."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from ranks import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)
# Read by make itself, which chooses the interpreter by it.
ALWAYS = {"PYTHON"}


def defined(name: str) -> str:
    """The text of a variable of the Makefile, with its continued lines."""
    found = re.search(rf"^{name} :?= ?((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert found, name
    return found.group(1)


def read_by(target: str) -> set[str]:
    """The variables that the Makefile says a command reads."""
    return set(defined(f"READ_BY_{target}").replace("$(PLACES)", defined("PLACES")).split())


def in_recipe(target: str) -> set[str]:
    """The variables that the lines of a command use."""
    lines = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE).group(1)
    lines = lines.replace("$(PLACE)", defined("PLACE")).replace(
        "$(ARGUMENTS)", defined("ARGUMENTS")
    )
    known = defined("KNOWN").replace("$(PLACES)", defined("PLACES")).replace("\\", "").split()
    return set(re.findall(r"\b[A-Z_]+\b", lines)) & set(known) - ALWAYS


def make(*words: str, **variables: str) -> subprocess.CompletedProcess:
    command = ["make", "-n", *words, f"PYTHON={sys.executable}"]
    return subprocess.run(
        command, cwd=ROOT, env={"PATH": "/usr/bin:/bin", **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_command_declares_the_variables_that_it_reads(target):
    assert read_by(target) == in_recipe(target)


def test_every_variable_that_is_known_is_read_by_a_command():
    known = set(defined("KNOWN").replace("$(PLACES)", defined("PLACES")).replace("\\", "").split())
    assert known - ALWAYS == {name for target in TARGETS for name in read_by(target)}


@pytest.mark.parametrize("target", TARGETS)
def test_the_list_of_commands_names_only_variables_that_they_read(target):
    line = re.search(rf"^{target}:.*## (.*)$", MAKEFILE, re.MULTILINE).group(1)
    named = set(re.findall(r"\b([A-Z_]{2,})=", line))
    assert named <= read_by(target)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["knobs", "NPROC=2"], "make knobs does not read NPROC, only FIND PYTHON; leave it out"),
        (["status", "A=1", "B=2"], "does not read A B, only PYTHON RECIPE RUN; leave them out"),
        (["pretrain", "RUN=x"], "does not read RUN"),
        (["pretrain", "HOSTFILE="], "HOSTFILE= is empty: a shell variable that is not set?"),
        (["rewind", "RUN= ", "STEP=3"], "RUN= is empty"),
        (["layouts", "ALL=yes"], "ALL=yes: give 1 to switch it on, or 0"),
        (["help", "NPROC=1"], "make help does not read NPROC"),
    ],
)
def test_a_variable_that_would_be_ignored_is_refused(words, part):
    done = make(*words)
    assert done.returncode == 2
    assert part in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["sample", "PROMPT="],
        ["show", "OVERRIDES=", "NPROC=8", "HOSTFILE=hosts"],
        ["pretrain", "WORLD=2"],
        ["verify", "RUN=x", "ALL=0"],
        ["status", "RECIPE=tiny"],  # RUN is named after it
        ["show", "knobs", "FIND=lr", "WORLD=2"],  # each is read by one of the two
    ],
)
def test_variables_that_are_read_are_taken(words):
    done = make(*words)
    assert done.returncode == 0, done.stdout
    assert ("--all" in done.stdout) is False


def test_the_rank_of_a_cluster_in_the_shell_is_not_the_rank_of_a_dry_run():
    assert '--rank "0"' in make("dryrun", RANK="3").stdout
    assert '--rank "3"' in make("dryrun", "RANK=3").stdout
