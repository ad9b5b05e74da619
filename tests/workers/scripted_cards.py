"""Environment of the fake NVML library in fake_nvml/, for tests of GPU monitoring."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ranks import ROOT

FAKE = ROOT / "tests" / "workers" / "fake_nvml"


HEALTHY = {
    "name": "NVIDIA H200",
    "temperature": 61,
    "memory_temperature": 70,
    "slowdown": 87,
    "power": 640,
    "power_limit": 700,
    "sm_clock": 1830,
    "memory_clock": 3201,
    "utilization": 98,
    "used_mib": 90_000,
    "total_mib": 143_771,
    "throttle": 0x4,
    "corrected": 2,
    "uncorrected": 0,
    "remapped": [[1, 0, 0, 0]],
    "sram": 0,
    "recovery": 0,
    "replays": 3,
    "xid_events": [],
}


def script(folder: Path, *changes: dict) -> dict[str, str]:
    """Environment in which NVML shows one GPU for each mapping: healthy, with the given changes."""
    path = folder / "cards.json"
    path.write_text(json.dumps({"gpus": [HEALTHY | change for change in changes]}))
    return {"FAKE_NVML": str(path), "PYTHONPATH": f"{FAKE}{os.pathsep}{ROOT}"}
