"""Peak memory of this rank since its process began.

Rule: host memory and device memory are two numbers, never added. Units: GiB (2**30 bytes).
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from base.units import GIB


def peak_gib() -> float:
    """Peak of this rank's device, or of the host memory of its process where it has none."""
    device = peak_device_gib()
    return peak_host_gib() if device is None else device


def peak_host_gib() -> float:
    """Peak resident memory of this process.

    From VmHWM where there is /proc: getrusage's figure survives exec, so a small process started
    by a big one shows its parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.M)
        if found:
            return int(found[1]) * 1024 / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere (man getrusage)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def peak_device_gib() -> float | None:
    """Peak that torch allocated on this rank's GPU, without a synchronisation; None without one."""
    torch = sys.modules.get("torch")  # nothing can be allocated by a torch that was never imported
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.max_memory_allocated() / GIB
