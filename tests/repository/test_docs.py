"""Commands, files and messages that docs/ names exist; commands without a cluster are run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from clones import make_clone
from pages import commands_of
from ranks import ROOT, run_command

DOCS = sorted((ROOT / "docs").glob("*.md"))
# test_readme.py walks the tutorials.
PAGES = [page for page in DOCS if not page.name.startswith("tutorial-")]
COMMANDS = [command for page in PAGES for command in commands_of(page.read_text())]
MAKE = [command for command in COMMANDS if command.startswith("make ")]
RUN = [command for command in MAKE if command.split()[1] in ("doctor", "show")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    clone = make_clone(tmp_path_factory.mktemp("docs"))
    (clone / "hosts").write_text("localhost slots=8\n")
    return clone


def test_there_are_pages_and_commands():
    names = {page.name for page in DOCS}
    assert {"clusters.md", "troubleshooting.md", "stages.md"} <= names
    assert len(MAKE) >= 8


@pytest.mark.parametrize("command", MAKE)
def test_make_takes_every_command(clone, command):
    done = run_command([*shlex.split(command), "-n", f"PYTHON={sys.executable}"], 30, cwd=clone)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("command", RUN)
def test_a_command_that_needs_no_cluster_works(clone, command):
    words = [*shlex.split(command), f"PYTHON={sys.executable}"]
    words = [re.sub(r"^NPROC=\d+$", "NPROC=1", word) for word in words]
    done = run_command(words, 120, cwd=clone, PYTHONPATH=str(clone))
    assert done.returncode == 0, done.stdout


def test_files_that_commands_and_pages_name_are_there():
    for page in DOCS:
        text = page.read_text()
        for name in re.findall(r"`((?:launch|runtime|recipes|ds_configs)/[\w./]+)`", text):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
        for name in re.findall(r"\]\((\w+\.md)\)", text):
            assert (ROOT / "docs" / name).exists(), f"{page.name}: {name}"
    for command in COMMANDS:
        for name in re.findall(r"launch/[\w.]+", command):
            assert (ROOT / name).exists(), command


def test_the_readme_leads_to_every_page_and_promises_name_tests_that_are_there():
    readme = (ROOT / "README.md").read_text()
    linked = set(re.findall(r"\]\((docs/\S+\.md)\)", readme))
    assert {f"docs/{page.name}" for page in DOCS} == linked
    promises = (ROOT / "docs" / "promises.md").read_text()
    held_by = set(re.findall(r"`(test_\w+\.py)`", promises))
    assert len(held_by) > 40
    assert not [name for name in held_by if not list((ROOT / "tests").rglob(name))]


def test_messages_that_the_troubleshooting_page_explains_are_the_programs():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    code = "\n".join(
        path.read_text()
        for folder in ("launch", "record", "runtime", "commands")
        for path in (ROOT / folder).rglob("*.py")
    )
    for words in (
        "cannot be reached over any of",
        "is in use by another",
        "ranks did not come within",
        "in a row added no step and no checkpoint",
        "not fit, and no spare is left",
        "nothing was heard of it for",
    ):
        assert words in page
        assert words in code
