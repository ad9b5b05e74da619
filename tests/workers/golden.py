"""The golden curve: the first 100 losses of the tiny recipe, in full precision.

    python tests/workers/golden.py        records it again, after an intended change of the numbers

Equal to the bit where the fingerprint - torch, CPU capability, threads - is the recorded one; else
to 1e-5, because kernels differ in their last bits and the steps amplify that (with AVX-512 kernels
to 4e-4 within 100 steps). PINNED keeps a newer CPU to the kernels of AVX2, so that the curve is the
same to the bit there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from clones import make_clone
from ranks import ROOT, run_command

FILE = Path(__file__).with_name("golden_tiny.json")
STEPS, THREADS = 100, 2
# For torch, MKL and oneDNN. Each is ignored by a CPU that has less.
PINNED = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
TIMEOUT_S = 900


def fingerprint() -> dict[str, str | int]:
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__,
        "cpu": "AVX2" if capability.startswith("AVX") else capability,  # what PINNED makes of it
        "threads": THREADS,
    }


def losses(folder: Path) -> list[float]:
    """Train the tiny recipe in a clone below `folder`.

    The corpus of this checkout is shared, unless an older version built it: such a corpus keeps its
    meaning, and gives another curve.
    """
    clone = make_clone(folder)
    manifest = ROOT / "corpora" / "sotu" / "manifest.json"
    if manifest.is_file() and "begin_policy" in json.loads(manifest.read_text(encoding="utf-8")):
        (clone / "corpora").symlink_to(ROOT / "corpora")
    words = ["recipe=tiny", "run=golden", f"stop_after={STEPS}", "eval_tokens=0"]
    command = [
        sys.executable,
        "-m",
        "commands.pretrain",
        "--",
        *words,
        f"cluster.threads={THREADS}",
    ]
    done = run_command(
        command, TIMEOUT_S, cwd=clone, PYTHONPATH=str(clone), OMP_NUM_THREADS=str(THREADS), **PINNED
    )
    assert done.returncode == 0, done.stdout
    lines = (clone / "runs" / "golden" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> None:
    with TemporaryDirectory() as folder:
        found = losses(Path(folder))
    content = {"fingerprint": fingerprint(), "losses": found}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{FILE}: {found[0]} ... {found[-1]}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
