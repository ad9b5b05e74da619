"""States and errors of GPUs, with their meaning and what to do: tables, and pure functions.

Rule: these tables are the only place with this knowledge. The run (runtime.monitor.device_alarms)
and `make doctor` (launch.hosts.facts, through runtime.monitor.device_reader) read the same tables.
Limits are those that a card reports of itself; none is written here. Imports nothing but the
standard library.

Sources: NVIDIA's NVML reference (clocks event reasons, recovery actions), its catalog of Xid errors
and its guide to memory errors of A100 and later; Stas Bekman's ml-engineering (lifetime SRAM
errors). Units: degrees Celsius, counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

IGNORE = "ignore"
RESTART = "restart the run"
RESET = "reset the GPU"
DRAIN = "drain the host"
RMA = "replace the card"

# Bits of NVML's clocks event (throttle) reasons.
THROTTLE = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
# Reasons that make a busy card slow through a fault. A power cap is normal operation.
BAD_THROTTLE = {
    0x8: "clocks are halved or worse: heat, power supply or a board fault",
    0x20: "it is too hot: look at fans, air flow, coolant and its neighbours",
    0x40: "it is too hot, clocks are halved or worse: look at fans, air flow, coolant",
    0x80: "the power supply asks for it: look at supply, cables and the rack's power",
}
# A card with more uncorrected SRAM errors than this in its lifetime will have more.
MOST_SRAM_ERRORS = 4

# Xid -> (action, meaning)
XIDS = {
    13: (RESTART, "graphics engine exception; mostly the program, sometimes the card"),
    31: (RESTART, "memory page fault; mostly the program"),
    43: (IGNORE, "a program was stopped on the GPU; see its own error"),
    45: (IGNORE, "a program was cleaned up after an earlier error"),
    48: (RESET, "double-bit ECC error"),
    61: (RESET, "internal micro-controller breakpoint"),
    62: (RESET, "internal micro-controller halt"),
    63: (RESET, "a memory row was remapped; reset when convenient, the run may go on"),
    64: (RMA, "a memory row could not be remapped"),
    74: (DRAIN, "NVLink error; where it repeats, look at the link and the board"),
    79: (DRAIN, "the GPU has fallen off the bus"),
    92: (DRAIN, "many single-bit ECC errors; run the field diagnostic"),
    94: (RESTART, "contained ECC error: only the program that hit it is affected"),
    95: (RESET, "uncontained ECC error: every program on the card is affected"),
    109: (RESET, "context switch timeout"),
    119: (RESET, "the GPU's system processor does not answer"),
    120: (RESET, "error of the GPU's system processor"),
    140: (RESET, "unrecovered ECC error"),
    143: (DRAIN, "the GPU could not be initialised"),
    154: (DRAIN, "the driver changed the recovery action; the line says to what"),
}
XID_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)[, ]*(.*)")

# NVML's recovery actions -> what to do; 0 is none.
RECOVERY = {
    1: (RESET, "the driver asks for a reset"),
    2: (DRAIN, "the driver asks for a reboot of the host"),
    3: (DRAIN, "the driver asks to drain peer-to-peer traffic"),
    4: (DRAIN, "the driver asks to drain and reset"),
    5: (DRAIN, "the driver asks to recover the NVLink domain"),
    6: (RESET, "the driver asks for a reset of the bus"),
    7: (DRAIN, "the driver asks for a reboot of the host"),
}


class Ailment(NamedTuple):
    """One trouble of a card. `what` is its kind; two of one kind are the same trouble."""

    what: str
    action: str
    text: str


def throttle_names(bits: int) -> list[str]:
    """Names of the reasons that hold clocks down."""
    known = [name for bit, name in THROTTLE.items() if bits & bit]
    rest = bits & ~sum(THROTTLE)
    return known + ([f"unknown 0x{rest:x}"] if rest else [])


def ailments(card: Mapping[str, Any]) -> list[Ailment]:
    """Troubles of a card by one reading; each is a reason not to start a run on it."""
    found = []
    if card.get("is_lost"):
        found.append(Ailment("lost", DRAIN, "the GPU is lost: it has fallen off the bus"))
    if card.get("remap_failed"):
        found.append(Ailment("remap_failed", RMA, "a memory row could not be remapped"))
    if card.get("remap_pending"):
        text = "a memory row waits for a reset to be remapped"
        found.append(Ailment("remap_pending", RESET, text))
    if card.get("sram_uncorrected_lifetime", 0) > MOST_SRAM_ERRORS:
        count = card["sram_uncorrected_lifetime"]
        text = f"{count} uncorrected SRAM errors in its lifetime, more than {MOST_SRAM_ERRORS}"
        found.append(Ailment("sram", RMA, text))
    if card.get("ecc_uncorrected"):
        text = f"{card['ecc_uncorrected']} uncorrected memory errors since the driver was loaded"
        found.append(Ailment("ecc", RESET, text))
    if action := card.get("recovery_action"):
        words = RECOVERY.get(action, (DRAIN, f"the driver asks for recovery action {action}"))
        found.append(Ailment("recovery", *words))
    return found


def xid(code: int, text: str = "") -> Ailment:
    """The meaning of an Xid error. `text` is the rest of the kernel's line."""
    action, meaning = XIDS.get(code, (RESTART, "see NVIDIA's catalog of Xid errors"))
    said = f" ({text.strip()[:200]})" if code == 154 and text.strip() else ""
    return Ailment(f"xid {code}", action, f"Xid {code}: {meaning}{said}")


def bus_key(bus: str) -> tuple[int, int, int]:
    """(domain, bus, device) of a PCI address as the kernel or NVML writes it. Raises ValueError."""
    parts = bus.partition(".")[0].split(":")
    domain, number, device = parts if len(parts) == 3 else ("0", *parts)
    return int(domain, 16), int(number, 16), int(device, 16)
