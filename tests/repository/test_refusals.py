"""What needs no torch is refused before torch is imported: a slip costs a second, not ten.

Imports are measured, not time, so that a busy machine changes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from base.exits import DO_NOT_RETRY

ROOT = Path(__file__).parents[2]
NOTHING = "not-there"
# A slip for each command, as make passes it on.
SLIPS = {
    "audit": [[NOTHING]],
    "audit_diff": [["--", NOTHING, NOTHING]],
    "budget": [["--gpu-hours=x"], ["--gpu-hours=100", f"--cluster={NOTHING}"]],
    "branch": [["--step=1", "--to=b", "--", NOTHING]],
    "merge": [["--steps=1", "--to=b", "--", NOTHING]],
    "checkpoints": [[NOTHING]],
    "compare": [["--runs", f"{NOTHING} {NOTHING}"], ["--recipe", NOTHING, "--sweep=zero=1,2"]],
    "corpus": [["--in", NOTHING, "--out", NOTHING, "--tokenizer", NOTHING]],
    "corpus_import": [["--in", NOTHING, "--out", NOTHING, "--tokenizer", NOTHING]],
    "corpus_info": [[NOTHING]],
    "corpus_verify": [[NOTHING]],
    "doctor": [[f"--hostfile={NOTHING}"]],
    "dryrun": [["--rank=0", "--", NOTHING]],
    "events": [[NOTHING]],
    "export": [[NOTHING], [NOTHING, "--dtype=fp8"]],
    "goodput": [[NOTHING]],
    "history": [[NOTHING]],
    "knobs": [["--nothing"]],
    "layouts": [["--", NOTHING]],
    "plan": [["--", NOTHING]],
    "plan_check": [[f"--rows={NOTHING}"]],
    "pretrain": [[f"recipe={NOTHING}"]],
    "profile": [["--run", NOTHING]],
    "recipes": [],  # takes no arguments
    "replay": [["--step=1", "--", NOTHING]],
    "reproduce": [[NOTHING]],
    "rewind": [[NOTHING, "--step=1"]],
    "runs": [["--nothing"]],
    "sample": [[NOTHING], [NOTHING, "--top-p=3"]],
    "show": [[NOTHING]],
    "status": [[NOTHING]],
    "stop": [[NOTHING]],
    "tensorboard": [[f"--run={NOTHING}"]],
    "tokenizer": [["--in", NOTHING, "--vocab=300"]],
    "verify": [[NOTHING]],
}


def test_every_command_refuses_a_slip_before_it_imports_torch():
    files = {path.stem for path in (ROOT / "commands").glob("*.py")} - {"__init__"}
    assert files == set(SLIPS), "a command needs a slip here, too"
    cases = [(module, arguments) for module, some in SLIPS.items() for arguments in some]
    worker = ROOT / "tests" / "workers" / "refusals.py"
    done = subprocess.run(
        [sys.executable, str(worker), json.dumps(cases)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(cases)
    assert {name: one for name, one in found.items() if one != [DO_NOT_RETRY, []]} == {}
