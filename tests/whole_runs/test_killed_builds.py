"""A killed build of a corpus is resumed, gives the same bytes and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time

from digests import digest
from ranks import PATIENCE, ROOT
from text_inputs import GOOD, build, json_lines, write_files

# Every call that makes something durable is a place where the build is killed before it.
KILLED = """
import os, pathlib, sys
import pandas  # pyarrow looks for it; here once, not again in every child
sys.path[:0] = ["tests/workers"]
from digests import digest
from text_inputs import build
from data.text import unit
unit.BATCH_CHARS = 300
source, root = sys.argv[1], pathlib.Path(sys.argv[2])
words = ("valid=0.2", "max_bad=5", "shard_mib=1")

def attempt(out, left, *more):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    def hooked(plain):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), 9)
            return plain(*args, **kwargs)
        return call
    os.replace = hooked(os.replace)
    os.fsync = hooked(lambda fd: None)  # a kill loses nothing that was written; only power does
    try:
        build(source, out, *words, *more)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

# In input order and shuffled, by turns.
SHUFFLES = ((), ("shuffle=3",))
for which, more in enumerate(SHUFFLES):
    assert attempt(root / f"whole{which}", 10**9, *more) == 0
expected = [digest(root / f"whole{which}") for which in (0, 1)]
assert expected[0] != expected[1]
# Killed before the call number `first`, then every EVERY calls: together at every call there is.
# EVERY is more than a shard takes, so that each attempt gets something done.
EVERY, kills = 20, 0
for first in range(EVERY):
    out, left, more = root / f"c{first}", first, SHUFFLES[first % 2]
    while (status := attempt(out, left, *more)) == -9:
        kills, left = kills + 1, EVERY
        assert kills < 500
    assert status == 0 and digest(out) == expected[first % 2], first
left = {p.name for p in root.iterdir() if not p.name.endswith(".lock")}
assert left == {*(f"c{n}" for n in range(EVERY)), "whole0", "whole1"}, left
print(kills)
"""


def test_a_build_killed_at_any_point_resumes_to_identical_bytes(tmp_path):
    text = json_lines(GOOD[:20] + GOOD[5:9]) + b"{broken\n"
    source = write_files(tmp_path / "in", {"a.jsonl": text})
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280 * PATIENCE, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


SLOW = """
import sys
sys.path[:0] = ["tests/workers"]
from data.text import ingest, unit_plan
unit_plan.UNIT_BYTES = 20000
from commands import corpus
sys.exit(corpus.main(sys.argv[1:]))
"""


def test_workers_of_a_killed_build_end_and_the_next_one_uses_what_they_finished(tmp_path):
    texts = [f"{i} " + "some words to tokenize " * 200 for i in range(400)]
    source = write_files(tmp_path / "in", {"x.jsonl": json_lines(texts)})
    command = [sys.executable, "-c", SLOW, "--in", str(source), "--tokenizer", "bytes"]
    command += ["valid=0.01", "--workers", "2", "--out"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "c")], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    work = tmp_path / ".c.work" / "units"
    end = time.monotonic() + 150 * PATIENCE
    while sum(not p.name.endswith(".tmp") for p in (work.iterdir() if work.is_dir() else ())) < 5:
        assert time.monotonic() < end, "no unit was finished in time"
        time.sleep(0.005)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30 * PATIENCE)
    while any(os.path.exists(f"/proc/{pid}") and is_running(pid) for pid in children):
        assert time.monotonic() < end, "workers outlive their parent"
        time.sleep(0.02)
    assert not (tmp_path / "c").exists()
    done = subprocess.run(
        [*command, str(tmp_path / "c")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "units are finished" in done.stderr
    assert "400 rows: 4" in done.stdout or "400 rows: 39" in done.stdout
    build(source, tmp_path / "d", "valid=0.01")
    assert digest(tmp_path / "c") == digest(tmp_path / "d")


def is_running(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
