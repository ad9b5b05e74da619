"""data.stream.stream and what it imports: a loader starts without torch."""

from __future__ import annotations

import subprocess
import sys

from ranks import PATIENCE


def test_the_loader_needs_no_torch():
    modules = "data.stream.stream, data.stream.ledger, data.corpus.build"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60 * PATIENCE)
