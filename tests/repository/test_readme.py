"""README and tutorials work from top to bottom in a clone, and so does what their commands print.

`workers/pages.py` has the convention of the pages and the sizes that a CPU can train.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from clones import background, make_clone
from pages import commands_of, cpu_sized, printed_commands
from ranks import PATIENCE, ROOT, run_command

PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted(ROOT.glob("docs/tutorial-*.md")))]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_walked_in_its_order_and_every_printed_command_too(page, tmp_path):
    clone = make_clone(tmp_path)
    if (ROOT / "corpora" / "sotu").is_dir():  # else the first run builds it
        (clone / "corpora").mkdir()
        (clone / "corpora" / "sotu").symlink_to(ROOT / "corpora" / "sotu")
    commands = commands_of((ROOT / page).read_text())
    assert commands
    done, printed = {"make test"}, []  # the suite runs this test
    for command in commands:
        if command not in done:
            printed += walk(clone, command)
            done.add(command)
    for command in printed:
        if command not in done:
            walk(clone, command, is_printed=True)
            done.add(command)
    assert any(command.startswith("make tensorboard") for command in printed)


def walk(clone: Path, command: str, is_printed: bool = False) -> list[str]:
    """Run a command in `clone`, a printed one as it is; returns the commands that it prints."""
    if command.startswith("make tensorboard"):
        serve(clone, command)
        return []
    if not command.startswith("make "):
        words = ["bash", "-c", command]
    elif "HOSTFILE=" in command or (is_printed and needs_gpus(command)):
        words = ["make", "-n", *shlex.split(command)[1:], f"PYTHON={sys.executable}"]
    else:
        words = shlex.split(command) if is_printed else cpu_sized(command)
        words.append(f"PYTHON={sys.executable}")
    began = time.monotonic()
    done = run_command(words, 240, cwd=clone, PYTHONPATH=str(clone))
    print(f"{time.monotonic() - began:6.1f} s  {command}")
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    if words[1] == "pretrain" and not is_printed:
        assert re.search(r"step +(\d+)/(\d+) ", done.stdout), done.stdout
    return printed_commands(done.stdout)


def needs_gpus(command: str) -> bool:
    """True for a training in full size, as `make recipes` and `make plan` print it."""
    return "make pretrain" in command and "recipe.yaml" not in command


def serve(clone: Path, command: str) -> None:
    """Start TensorBoard in `clone` and wait for its page."""
    (clone / "runs").mkdir(exist_ok=True)
    port = 6000 + time.time_ns() % 3000
    words = [*command.split(), f"PYTHON={sys.executable}", f"PORT={port}"]
    server = background(clone, words)
    try:
        page = b""
        for _ in range(int(120 * PATIENCE)):
            time.sleep(0.5)
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
                break
            except OSError:
                assert server.poll() is None
        assert b"TensorBoard" in page
    finally:
        subprocess.run(["kill", "-s", "TERM", "--", f"-{server.pid}"], check=False)
        server.wait(timeout=20 * PATIENCE)


def test_the_readme_begins_with_the_two_commands():
    assert commands_of((ROOT / "README.md").read_text())[:2] == ["make pretrain", "make test"]


def test_blocks_that_are_not_run_and_commands_with_gaps_are_left_out():
    page = "```bash\nmake a  # x\n```\n<!-- not run: a cluster -->\n```bash\nmake b\n```\n"
    assert commands_of(page + "```console\nmake c\n```\n\n```bash\nmake d E=1\n```\n") == [
        "make a",
        "make d E=1",
    ]
    text = 'go on with: make pretrain RECIPE=r.yaml OVERRIDES="a=1 b=2", or make x RUN=y TO=...\n'
    text += "make dryrun RANK= adds them; make sample RUN=tiny, make export RUN=tiny\n"
    assert printed_commands(text + "look at it with: make tensorboard\n") == [
        'make pretrain RECIPE=r.yaml OVERRIDES="a=1 b=2"',
        "make sample RUN=tiny",
        "make export RUN=tiny",
        "make tensorboard",
    ]


def test_make_help_names_every_command():
    done = run_command(["make", "help"], 30)
    commands_of_make = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in done.stdout.splitlines()] == commands_of_make
