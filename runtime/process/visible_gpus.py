"""GPUs that this host shows, found without torch and without the driver's library."""

from __future__ import annotations

import glob
import os
import re


def visible_gpus() -> list[str]:
    """Device files of NVIDIA GPUs, unless CUDA_VISIBLE_DEVICES hides them all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    return sorted(
        path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)
    )
