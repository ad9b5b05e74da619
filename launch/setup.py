"""Makes the virtual environment, or checks the interpreter that the user chose.

    python3 launch/setup.py .venv             make or refresh the environment
    python launch/setup.py --check [tests]    check this interpreter, install nothing

It runs before anything is installed, so it uses the standard library alone. Rule: a torch that is
already there is never replaced. States: no environment -> being filled -> file `ready`. A set-up
that was interrupted has no such file; the next call continues it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import re
import subprocess
import sys
import threading
import time
import venv
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements.txt"

# The newest torch whose CPU build is small; anything else is the user's own choice, see PYTHON=.
TORCH = "torch==2.13.0"
OLDEST_PYTHON = (3, 11)
REFUSED = 93  # base.exits.DO_NOT_RETRY: another try would end alike
# Lines of pip that say what it does, and how long it may say nothing.
STEPS = re.compile(
    r"\s*(Collecting|Downloading|Building|Preparing|Installing|Successfully|ERROR)\b"
)
SILENCE_S = 10.0
SHOWN_ON_FAILURE = 20


def main(arguments: list[str]) -> int:
    """Run one of the two commands above; returns the exit status."""
    if sys.version_info < OLDEST_PYTHON:
        return _fail(
            f"Python {sys.version.split()[0]} at {sys.executable} is older than 3.11; choose"
            " another one: make PYTHON=/path/to/python3.11 ..."
        )
    if arguments[0] == "--check":
        return check(for_tests="tests" in arguments)
    try:
        return make_venv(Path(arguments[0]))
    except OSError as error:  # a read-only project, a full disk
        return _fail(
            f"{error.filename}: {error.strerror}; the environment is made beside the project, or"
            " name an interpreter that has what requirements.txt lists: PYTHON=..."
        )


def make_venv(folder: Path) -> int:
    """Create `folder`, install what is missing, and mark it `ready`."""
    if launched_by_cluster():
        return _fail(
            "this process was started by torchrun or SLURM and nothing is installed then; run"
            " `make help`'s other commands once on a login node, or name an interpreter: PYTHON=..."
        )
    folder.mkdir(exist_ok=True)
    with alone(folder):
        return fill(folder)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let two first calls at once fill `folder` one after the other."""
    with open(folder / "setup.lock", "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log(f"another process is filling {folder}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fill(folder: Path) -> int:
    """Install what is missing in `folder`, unless another process has just done it."""
    ready = folder / "ready"
    wanted = max(path.stat().st_mtime for path in (REQUIREMENTS, Path(__file__)))
    if ready.exists() and ready.stat().st_mtime >= wanted:
        return 0
    ready.unlink(missing_ok=True)
    python = folder / "bin" / "python"
    if not python.exists():
        _log(f"making {folder} with Python {sys.version.split()[0]}")
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        _log(f"installing {TORCH} (CPU build where the index has one)")
        if not _pip(python, TORCH):
            return 1
    _log("installing requirements.txt (some hundred MB; a few minutes on a slow link)")
    if not _pip(python, "-r", str(REQUIREMENTS)):
        return 1
    ready.touch()
    _log("ready")
    return 0


def check(for_tests: bool) -> int:
    """Check that this interpreter has torch and the packages of requirements.txt; name the others.

    Only tests need what stands below the line `# tests`.
    """
    lines = REQUIREMENTS.read_text().splitlines()
    lines = lines if for_tests else lines[: lines.index("# tests")]
    wanted = [line.split("#")[0].strip() for line in lines]
    lacking = []
    for line in ["torch>=2.11", *filter(None, wanted)]:
        name = re.match(r"[\w-]+", line).group()
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(line)
    if not lacking:
        return 0
    quoted = " ".join(f"'{line}'" for line in lacking)
    return _fail(
        f"PYTHON={sys.executable} lacks {', '.join(lacking)}; an interpreter given with PYTHON= is"
        f" used as it is. Install them: {sys.executable} -m pip install {quoted}\n"
        "or leave PYTHON out: a virtual environment is then made in .venv"
    )


def launched_by_cluster() -> bool:
    """Whether torchrun or SLURM's srun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_ID" in os.environ


def _pip(python: Path, *what: str) -> bool:
    """Install packages and show what pip does; False where it failed."""
    options = ["--disable-pip-version-check", "--progress-bar", "off"]
    began, lines = time.monotonic(), deque(["starting"], maxlen=SHOWN_ON_FAILURE)
    process = subprocess.Popen(
        [str(python), "-m", "pip", "install", *options, *what],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    reader = threading.Thread(target=_show, args=(process.stdout, lines, began), daemon=True)
    reader.start()
    while reader.is_alive():
        reader.join(SILENCE_S)
        if reader.is_alive():
            _log(f"{time.monotonic() - began:4.0f} s  still at: {lines[-1][:90]}")
    if process.wait() == 0:
        return True
    print("\n".join(lines), file=sys.stderr)
    _log(
        f"pip could not install {' '.join(what)}; its last lines are above. The next try goes on"
        " here"
    )
    return False


def _show(output: Iterable[str], lines: deque[str], began: float) -> None:
    """Keep the last lines of pip, and print those that say what it does."""
    for line in output:
        if line.strip():
            lines.append(line.strip())
        if STEPS.match(line):
            _log(f"{time.monotonic() - began:4.0f} s  {line.strip()[:90]}")


def _log(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def _fail(text: str) -> int:
    """Refuse, as every command does: the user can put it right."""
    print(f"refused: {text}", file=sys.stderr, flush=True)
    return REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
