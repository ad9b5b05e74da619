"""Builds DeepSpeed's operators once on a host, before ranks wait: `python -m runtime.engine.ops`.

Rule: it builds only the operators that the files in ds_configs/ can ask for. That is pinned host
memory (zero3_offload) alone, because the optimizer is torch's own. A first build takes minutes, in
which the ranks of a run would wait for one another and seem to hang. Exit status: 0 = built or
there already, 1 = an operator cannot be built.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from base.errors import UserError


def main() -> int:
    """Build the operators that are missing and print the time; returns the exit status."""
    from runtime.engine import builds
    from runtime.process.process import have_home

    have_home()
    builds.prepare()
    from deepspeed.ops.op_builder import PinMemoryBuilder

    from runtime.engine.deepspeed_import import quiet

    quiet()
    return build({"pin_memory": PinMemoryBuilder()})


def build(builders: Mapping[str, Any]) -> int:
    """Load each operator, which compiles it at the first time; returns the exit status."""
    status = 0
    for name, builder in builders.items():
        began = time.monotonic()
        try:
            builder.load(verbose=False)
        except (
            RuntimeError,
            OSError,
            ImportError,
            UserError,
        ) as error:  # of compilers, linkers, locks
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            print(f"failed: operator {name} cannot be built: {reason}", file=sys.stderr)
            status = 1
        else:
            print(f"operator {name}: ready ({time.monotonic() - began:.0f} s)")
    return status


if __name__ == "__main__":
    sys.exit(main())
