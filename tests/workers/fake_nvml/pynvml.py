"""Stands for nvidia-ml-py where this folder comes first on the path: cards with scripted readings.

FAKE_NVML is the path of a JSON file: {"gpus": [{question: value or [value at reading 0, 1, ...]}]}.
The last value of a list stays. Questions that a card's script lacks are not supported. Values
"lost" and "hang" do what they say. A reading begins with the question for GPU 0's name.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_TIMEOUT = 3, 15, 10
NVML_TEMPERATURE_GPU = 0
NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
NVML_VOLATILE_ECC = 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_FI_DEV_MEMORY_TEMP, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 82, 230
nvmlEventTypeXidCriticalError = 8
MIB = 2**20


class NVMLError(Exception):
    """As in the real one: `value` is NVML's number."""

    def __init__(self, value: int):
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {3: "Not Supported", 12: "NVML Shared Library Not Found"}.get(self.value, "error")


cards: list[dict] = []
reading = -1


def ask(index: int, question: str):
    if question not in cards[index]:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    value = cards[index][question]
    if isinstance(value, list):
        value = value[min(max(reading, 0), len(value) - 1)]
    if value == "hang":
        time.sleep(3600)
    if value == "lost":
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    if value is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return value


def nvmlInit():
    path = os.environ.get("FAKE_NVML")
    if not path:
        raise NVMLError(12)
    cards[:] = json.loads(Path(path).read_text())["gpus"]


def nvmlSystemGetDriverVersion():
    return "570.124.06"


def nvmlDeviceGetCount():
    return len(cards)


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetName(index):
    global reading
    reading += index == 0
    return ask(index, "name")


def nvmlDeviceGetPciInfo(index):
    if "bus" in cards[index]:
        ask(index, "bus")
    return SimpleNamespace(busId=f"00000000:{0x3B + index:02X}:00.0".encode())


def nvmlDeviceGetTemperature(index, sensor):
    return ask(index, "temperature")


def nvmlDeviceGetTemperatureThreshold(index, kind):
    return ask(index, "slowdown")


def nvmlDeviceGetMarginTemperature(index):
    return ask(index, "margin")


def nvmlDeviceGetPowerUsage(index):
    return 1000 * ask(index, "power")


def nvmlDeviceGetEnforcedPowerLimit(index):
    return 1000 * ask(index, "power_limit")


def nvmlDeviceGetClockInfo(index, kind):
    return ask(index, {NVML_CLOCK_SM: "sm_clock", NVML_CLOCK_MEM: "memory_clock"}[kind])


def nvmlDeviceGetUtilizationRates(index):
    return SimpleNamespace(gpu=ask(index, "utilization"))


def nvmlDeviceGetMemoryInfo(index):
    return SimpleNamespace(used=ask(index, "used_mib") * MIB, total=ask(index, "total_mib") * MIB)


def nvmlDeviceGetCurrentClocksEventReasons(index):
    return ask(index, "throttle")


def nvmlDeviceGetTotalEccErrors(index, kind, counter):
    return ask(index, ("corrected", "uncorrected")[kind])


def nvmlDeviceGetRemappedRows(index):
    return (*ask(index, "remapped"),)


def nvmlDeviceGetPcieReplayCounter(index):
    return ask(index, "replays")


class c_nvmlEccSramErrorStatus_v1_t:
    aggregateUncParity = aggregateUncSecDed = 0


def nvmlDeviceGetSramEccErrorStatus(index, status):
    status.aggregateUncParity = ask(index, "sram")


def nvmlDeviceGetFieldValues(index, numbers):
    names = {NVML_FI_DEV_MEMORY_TEMP: "memory_temperature"}
    names[NVML_FI_DEV_GET_GPU_RECOVERY_ACTION] = "recovery"
    try:
        value = ask(index, names[numbers[0]])
    except NVMLError as error:
        if error.value == NVML_ERROR_GPU_IS_LOST:
            raise
        return [SimpleNamespace(nvmlReturn=error.value)]
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=value))]


def nvmlEventSetCreate():
    return object()


def nvmlDeviceRegisterEvents(index, kind, events):
    if cards[index].get("xid_events") is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)


def nvmlEventSetWait_v2(events, timeout):
    for index, card in enumerate(cards):
        pending = card.get("xid_events") or []
        if pending and pending[0][0] <= reading:
            return SimpleNamespace(device=index, eventData=pending.pop(0)[1])
    raise NVMLError(NVML_ERROR_TIMEOUT)
