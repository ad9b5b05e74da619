"""base/exits.py: every command of the Makefile refuses with one status and lines that say why."""

from __future__ import annotations

import importlib

import pytest
from source_tree import PACKAGES, commands_of_make

from base.exits import DO_NOT_RETRY

OURS = {
    command: module
    for command, module in commands_of_make().items()
    if module.split(".")[0] in PACKAGES
}
# What each command is asked that cannot be.
ASKED = {
    "pretrain": "--nproc=many -- recipe=tiny",
    "doctor": "--hostfile=/nowhere",
    "show": "nobody",
    "layouts": "nobody",
    "plan": "nobody",
    "budget": "--gpu-hours=many",
    "plan-check": "--rows=/nowhere",
    "dryrun": "nobody",
    "knobs": "--find=xyzzy",
    "status": "nobody",
    "events": "nobody",
    "stop": "nobody",
    "goodput": "nobody",
    "checkpoints": "nobody",
    "verify": "nobody",
    "rewind": "nobody --step=1",
    "branch": "nobody --step=1 --to=x",
    "merge": "nobody --steps=1 --to=x",
    "history": "nobody",
    "reproduce": "nobody",
    "export": "nobody",
    "sample": "nobody",
    "corpus": "--in= --out= --tokenizer=",
    "corpus-import": "--in= --out=x --tokenizer=",
    "corpus-verify": "/nowhere",
    "corpus-info": "/nowhere",
    "tokenizer": "--in=/nowhere --vocab=300 --out=/dev/null",
    "compare": "--runs=nobody",
    "profile": "--run=nobody",
    "replay": "nobody --step=1",
    "audit": "nobody",
    "audit-diff": "nobody nobody",
    "tensorboard": "--run=nobody",
}
TAKES_NOTHING = {"recipes", "runs"}


def test_every_command_is_in_the_table():
    assert set(OURS) == set(ASKED) | TAKES_NOTHING


@pytest.mark.parametrize("command", ASKED)
def test_a_command_refuses_with_93(command, capsys, monkeypatch):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    main = importlib.import_module(OURS[command]).main
    for words in (ASKED[command].split(), ["--no-such-option"]):
        try:
            status = main(words)
        except SystemExit as left:
            status = left.code
        said = capsys.readouterr()
        assert status == DO_NOT_RETRY, said
        assert all(line.startswith("refused: ") for line in said.err.splitlines()), said
        assert "refused: " in said.err
