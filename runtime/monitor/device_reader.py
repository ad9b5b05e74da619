"""Reads every GPU of this host in a process of its own: `python -m runtime.monitor.device_reader`.

    standard output   lines of JSON, one reading each:
                      {"gpus": [{"index": 0, "temperature_c": 61, ...}, ...], "xids": [...]}
                      {"notice": "..."}   once, where something cannot be read

Rule: no process depends on it. A call into the driver can hang without an end, so the training
process only listens (runtime.monitor.devices), and `make doctor` waits with a time limit. A sensor
that a card lacks is absent from its reading, never zero. Ends when standard input ends. Imports no
torch; `pynvml` (nvidia-ml-py) is imported only here.

Units: degrees Celsius, W, MHz, percent, GiB, counts since the driver was loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from base.units import GIB
from runtime.monitor.device_table import XID_LINE, ailments, bus_key, xid

KERNEL_LOG = "/dev/kmsg"
MOST_LOG_LINES = 10_000  # per reading: a flood of lines must not delay it


def main(arguments: list[str]) -> int:
    """Read once, or every `--every` seconds; returns the exit status: 0, or 3 = no NVML here."""
    parser = argparse.ArgumentParser(prog="python -m runtime.monitor.device_reader")
    parser.add_argument("--every", type=float, default=0.0, help="seconds; 0 = once")
    parser.add_argument("--kernel-log", default=KERNEL_LOG)
    options = parser.parse_args(arguments)
    try:
        import pynvml as nvml
    except ImportError:
        emit({"notice": "no GPU readings: the package nvidia-ml-py is not installed"})
        return 3
    try:
        nvml.nvmlInit()
        handles = open_all(nvml)
        driver = text_of(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        emit({"notice": f"no GPU readings: NVML: {error}"})
        return 3
    log = KernelLog(options.kernel_log)
    events = XidEvents(nvml, handles)
    missing: set[str] = set()
    by_bus: dict[tuple, int] = {}  # kept, because a card that is lost does not report its address
    at = time.monotonic()
    while True:
        gpus = [read(nvml, index, handle, missing) for index, handle in enumerate(handles)]
        found = {**events.new(), **log.new()}
        by_bus |= {bus_key(gpu["bus"]): gpu["index"] for gpu in gpus if "bus" in gpu}
        emit(
            {
                "driver": driver,
                "gpus": gpus,
                "xids": [describe(key, by_bus, text) for key, text in found.items()],
            }
        )
        if missing and options.every:
            emit({"notice": f"not reported by the GPUs here: {', '.join(sorted(missing))}"})
            missing.clear()
        at = max(
            at + options.every, time.monotonic()
        )  # after a slow reading the next one is not early
        # Wait until it is time, or until the listening process has ended.
        if not options.every or wait_or_end(max(0.0, at - time.monotonic())):
            return 0


def emit(content: dict[str, Any]) -> None:
    """Print one line of JSON."""
    print(json.dumps(content), flush=True)


def text_of(value: str | bytes) -> str:
    """Text, which older versions of the package give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def wait_or_end(seconds: float) -> bool:
    """Sleep; returns True where standard input has ended meanwhile."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable)


def open_all(nvml: Any) -> list[Any]:
    """A handle of each GPU, or the error where it has none."""
    handles: list[Any] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            handles.append(error)
    return handles


class Lost(Exception):
    """The driver reports that this card is lost."""


def read(nvml: Any, index: int, handle: Any, missing: set[str]) -> dict[str, Any]:
    """The present reading of one card: only what the card reports.

    Names of sensors that the card lacks are added to `missing`, once.
    """
    card: dict[str, Any] = {"index": index}
    try:
        if isinstance(handle, nvml.NVMLError):
            raise Lost
        for name, ask in questions(nvml, handle):
            try:
                value = ask()
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                    raise Lost from None
                value = None
            except AttributeError:  # an nvidia-ml-py that does not know the question
                value = None
            if value is not None:
                card |= value if isinstance(value, dict) else {name: value}
            elif name not in ABSENT_QUIETLY and (index, name) not in REPORTED:
                REPORTED.add((index, name))
                missing.add(name)
    except Lost:
        card["is_lost"] = True
    if "slowdown_c" not in card and {"margin_c", "temperature_c"} <= card.keys():
        card["slowdown_c"] = card["temperature_c"] + card["margin_c"]
    card["ailments"] = [list(each) for each in ailments(card)]
    return card


REPORTED: set[tuple[int, str]] = set()  # (card, sensor that it lacks)
# Sensors that are new, or that only some kinds of cards have: their absence is not reported.
ABSENT_QUIETLY = ("memory_temperature_c", "margin_c", "sram", "recovery_action", "slowdown_c")


def questions(nvml: Any, handle: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(field, function that reads it); an answer that is a mapping has fields of its own."""

    def of_field(number: int) -> int | None:
        (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [number])
        return answer.value.uiVal if answer.nvmlReturn == 0 else None

    def threshold(kind: int) -> int | None:
        return nvml.nvmlDeviceGetTemperatureThreshold(handle, kind) or None

    def throttle() -> int:
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return int((ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))

    def errors(kind: int) -> int:
        return nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)

    def remapping() -> dict[str, Any]:
        corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        return {
            "remapped_rows": corrected + uncorrected,
            "remap_pending": bool(pending),
            "remap_failed": bool(failed),
        }

    def sram() -> dict[str, int]:
        status = nvml.c_nvmlEccSramErrorStatus_v1_t()
        nvml.nvmlDeviceGetSramEccErrorStatus(handle, status)
        count = status.aggregateUncParity + status.aggregateUncSecDed
        return {"sram_uncorrected_lifetime": count}

    def clock(kind: int) -> int:
        return nvml.nvmlDeviceGetClockInfo(handle, kind)

    yield "name", lambda: text_of(nvml.nvmlDeviceGetName(handle))
    yield "bus", lambda: text_of(nvml.nvmlDeviceGetPciInfo(handle).busId)
    yield "temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    yield "memory_temperature_c", lambda: of_field(nvml.NVML_FI_DEV_MEMORY_TEMP) or None
    yield "slowdown_c", lambda: threshold(nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    yield "margin_c", lambda: nvml.nvmlDeviceGetMarginTemperature(handle)
    yield "power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    yield "power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    yield "sm_clock_mhz", lambda: clock(nvml.NVML_CLOCK_SM)
    yield "memory_clock_mhz", lambda: clock(nvml.NVML_CLOCK_MEM)
    yield "utilization_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    yield "memory_used_gib", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
    yield "memory_total_gib", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total / GIB
    yield "throttle", throttle
    yield "ecc_corrected", lambda: errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)
    yield "ecc_uncorrected", lambda: errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    yield "row remapping", remapping
    yield "sram", sram
    yield "recovery_action", lambda: of_field(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
    yield "pcie_replays", lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle)


def describe(key: tuple, by_bus: dict[tuple, int], text: str) -> dict[str, Any]:
    """An Xid error, with the number of its GPU where that is known."""
    bus, code = key
    return {"index": by_bus.get(bus), "code": code, "ailment": list(xid(code, text))}


class KernelLog:
    """Xid errors that the kernel logs from now on, where this user may read its log."""

    def __init__(self, path: str):
        self._file: int | None = None
        self._rest = b""
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)

    def new(self) -> dict[tuple, str]:
        """{(address on the bus, code): rest of the line} since the last call."""
        found = {}
        for _ in range(MOST_LOG_LINES if self._file is not None else 0):
            try:
                read = os.read(self._file, 8192)
            except BrokenPipeError:  # lines were overwritten before they could be read
                continue
            except OSError:  # nothing new
                break
            if not read:
                break
            *lines, self._rest = (self._rest + read).split(b"\n")
            for line in lines:
                if match := XID_LINE.search(line.decode(errors="replace")):
                    with contextlib.suppress(ValueError):
                        found[bus_key(match[1]), int(match[2])] = match[3]
        return found


class XidEvents:
    """Critical Xid errors as NVML reports them, for users who may not read the kernel's log."""

    def __init__(self, nvml: Any, handles: list[Any]):
        self._nvml, self._events = nvml, None
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            self._events = nvml.nvmlEventSetCreate()
        for handle in handles if self._events is not None else ():
            # A card without such events must not prevent those of others.
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                if not isinstance(handle, nvml.NVMLError):
                    nvml.nvmlDeviceRegisterEvents(
                        handle, nvml.nvmlEventTypeXidCriticalError, self._events
                    )

    def new(self) -> dict[tuple, str]:
        """Like `KernelLog.new`, without the text of the line."""
        found = {}
        with contextlib.suppress(self._nvml.NVMLError):  # a timeout: no more of them
            while self._events is not None and len(found) < MOST_LOG_LINES:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                key: tuple = ()  # a card that has fallen off the bus may not report its address
                with contextlib.suppress(self._nvml.NVMLError):
                    key = bus_key(text_of(self._nvml.nvmlDeviceGetPciInfo(event.device).busId))
                found[key, int(event.eventData)] = ""
        return found


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
