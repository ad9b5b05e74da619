"""Judges a set of hosts by the facts of each: pure functions.

    facts of every host -> problems (the start is refused) and warnings, each with host and key

Rule: hosts are compared with each other, and the one that differs is named. The value that most
hosts have counts as right; where two hosts differ, the value of the first. Units: seconds, GiB,
MiB/s.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from base.values import counted, listed

# Leases, time stamps and certificates; two clocks kept by NTP are a hundredth of this apart.
MAX_SKEW_S = 2.0
LEAST_GIB = {"temporary files": 0.1, "/dev/shm": 0.06}
SLOW_DISK = 4  # times slower than the median of the hosts
HOT_C = 15  # this close to its slowdown temperature, a card that idles is hot
BUSY_SHARE = 0.1  # of a GPU's memory, before anything of ours runs
Facts = Mapping[str, Any]


@dataclass
class Findings:
    """Lines for a person: `problems` refuse the start, `warnings` do not."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Need:
    """What the run needs of each host: ranks, device (the recipe's), free space of runs/."""

    per_host: int = 1
    device: str = "auto"
    free_gib: float = 0.0


def judge(facts: Mapping[str, Facts], skews_s: Mapping[str, float], need: Need) -> Findings:
    """All problems and warnings at once. `facts` and `skews_s` are by host, in their order."""
    found = Findings()
    if not facts:
        return found
    first = next(iter(facts))
    found.warnings += same_machine(facts)
    found.problems += odd_ones("python", {host: f["python"] for host, f in facts.items()})
    found.problems += odd_ones("system", {host: f["system"] for host, f in facts.items()})
    way_out = "install the same versions everywhere"
    found.problems += odd_keys("packages", facts, "", "is not installed", way_out)
    found.problems += odd_code(facts)
    way_out = "set it where the run is started, or remove it on that host"
    found.problems += odd_keys("environment", facts, "variable ", "is not set", way_out)
    found.problems += odd_clocks(skews_s)
    found.problems += folders(facts)
    found.problems += space(facts, need)
    found.problems += ports(first, facts[first])
    found.problems += [
        f"{host}: {line}; unset it to have one found"
        for host, f in facts.items()
        for line in f["missing_interfaces"]
    ]
    if need.device != "cpu":
        of_gpus = gpus(facts, need)
        found.problems += of_gpus.problems
        found.warnings += of_gpus.warnings
    found.warnings += slow_disks(facts)
    return found


def odd_ones(key: str, values: Mapping[str, Any], way_out: str = "") -> list[str]:
    """One line for each host whose value is not the common one."""
    common = common_value(values)
    holders = [host for host, value in values.items() if value == common]
    shown = listed(holders, 1)
    end = f"; {way_out}" if way_out else ""
    return [
        f"{host}: {key} {text(value)}, but {text(common)} on {shown}{end}"
        for host, value in values.items()
        if value != common
    ]


def common_value(values: Mapping[str, Any]) -> Any:
    """The value that most hosts have; where several are equally common, the first host's."""
    counts = Counter(map(repr, values.values()))
    best = max(counts.values())
    return next(value for value in values.values() if counts[repr(value)] == best)


def text(value: Any) -> str:
    """A value as text for a person; a password in a URL is masked."""
    shown = "(none)" if value is None else str(value)
    return re.sub(r"://[^/@\s]+@", "://***@", shown)[:120]


def odd_keys(
    section: str, facts: Mapping[str, Facts], prefix: str, absent: str, way_out: str
) -> list[str]:
    """`odd_ones` for every key of a section."""
    keys = sorted({key for f in facts.values() for key in f[section]})
    return [
        line
        for key in keys
        for line in odd_ones(
            f"{prefix}{key}",
            {
                host: text(f[section][key]) if key in f[section] else absent
                for host, f in facts.items()
            },
            way_out,
        )
    ]


def odd_code(facts: Mapping[str, Facts]) -> list[str]:
    """Hosts whose files of this project differ, with the names of the files."""
    common = common_value({host: f["code"] for host, f in facts.items()})
    lines = []
    for host, f in facts.items():
        changed = sorted(
            name for name in {*common, *f["code"]} if common.get(name) != f["code"].get(name)
        )
        if changed:
            shown = ", ".join(changed[:5]) + (" ..." if len(changed) > 5 else "")
            lines.append(
                f"{host}: code differs from the other hosts' in {counted(len(changed), 'file')}"
                f" ({shown}); share one folder, or check out the same commit"
            )
    return lines


def same_machine(facts: Mapping[str, Facts]) -> list[str]:
    """A warning where two names mean one machine, as tests do on purpose."""
    names: dict[str, list[str]] = {}
    for host, f in facts.items():
        names.setdefault(f["machine"], []).append(host)
    return [
        f"{' and '.join(hosts)} are one machine ({f.split()[0]}) and share its GPUs and cores"
        for f, hosts in names.items()
        if len(hosts) > 1
    ]


def odd_clocks(skews_s: Mapping[str, float]) -> list[str]:
    """Hosts whose clock is away from the median of all hosts and the launching one."""
    if not skews_s:
        return []
    middle = statistics.median([0.0, *skews_s.values()])
    return [
        f"{host}: clock is {abs(skew - middle):.0f} s {'ahead' if skew > middle else 'behind'}"
        f" (at most {MAX_SKEW_S:.0f} s is allowed); set it right (chronyc tracking, timedatectl)"
        for host, skew in skews_s.items()
        if abs(skew - middle) > MAX_SKEW_S
    ]


def folders(facts: Mapping[str, Facts]) -> list[str]:
    """Hosts that do not see the folders that all must share."""
    lines = []
    for host, f in facts.items():
        if f["shared"]:
            lines.append(
                f"{host}: folder is not shared: {f['shared']}; the project must lie on storage that"
                " all hosts see under one path, because every rank writes its checkpoint there"
            )
    names = {name for f in facts.values() for name in f["folders"]}
    for name in sorted(names):
        digests = {host: f["folders"].get(name) for host, f in facts.items()}
        lines += [
            f"{host}: folder {name} has no corpus (manifest.json); copy it there, or share it"
            for host, digest in digests.items()
            if digest is None
        ]
        there = {host: digest for host, digest in digests.items() if digest is not None}
        if there:
            lines += odd_ones(f"corpus {name}", there, "copy the same corpus to all hosts")
    return lines


def space(facts: Mapping[str, Facts], need: Need) -> list[str]:
    """Hosts with too little free space."""
    least = LEAST_GIB | {"runs/": need.free_gib}
    return [
        f"{host}: {place} has {free:.2f} GiB free, {least[place]:.2f} GiB are needed"
        + (" for two checkpoints" if place == "runs/" else "")
        for host, f in facts.items()
        for place, free in f["disk"].items()
        if free is not None and free < least[place]
    ]


def ports(first: str, facts: Facts) -> list[str]:
    """A problem where the port of the rendezvous is busy on the first host."""
    port = facts["port"]
    if port["is_free"]:
        return []
    return [
        f"{first}: port {port['number']} (MASTER_PORT) is busy; unset it to have a free one"
        " chosen, or name another"
    ]


def gpus(facts: Mapping[str, Facts], need: Need) -> Findings:
    """GPUs that are missing, different, ailing or in use."""
    broken = {host: f["gpus"]["problem"] for host, f in facts.items() if "problem" in f["gpus"]}
    problems = [f"{host}: GPUs: {problem}" for host, problem in broken.items()]
    cards = {host: f["gpus"]["cards"] for host, f in facts.items() if host not in broken}
    if need.device == "auto" and not any(cards.values()):
        return Findings(problems)
    warnings = []
    for host, here in cards.items():
        if len(here) < need.per_host:
            problems.append(
                f"{host}: GPUs {len(here)}, but NPROC={need.per_host}; a card may have fallen off"
                " the bus (dmesg), or start fewer ranks on each host"
            )
        for card in here:
            problems += [f"{host}: {line}, or leave the host out (EXCLUDE)" for line in ills(card)]
            warnings += [f"{host}: GPU {card['index']}: {line}" for line in not_idle(card)]
    warnings += [
        f"{line}; a card may have fallen off the bus (dmesg)"
        for line in odd_ones("GPUs", {host: len(here) for host, here in cards.items()})
    ]
    for key in ("name", "driver"):
        kinds = {
            host: ", ".join(sorted({str(card.get(key)) for card in here}))
            for host, here in cards.items()
            if here
        }
        problems += odd_ones(f"GPU {key}", kinds) if kinds else []
    return Findings(problems, warnings)


def ills(card: Facts) -> list[str]:
    """The ailments of a GPU, with what to do about each."""
    return [f"GPU {card['index']}: {text}; {action}" for _, action, text in card["ailments"]]


def not_idle(card: Facts) -> list[str]:
    """Signs that a GPU is in use, or hot, before anything of ours runs on it."""
    found = []
    used, total = card.get("memory_used_gib"), card.get("memory_total_gib")
    if used and total and used > BUSY_SHARE * total:
        found.append(f"{used:.1f} of {total:.1f} GiB are in use by another process")
    heat, limit = card.get("temperature_c"), card.get("slowdown_c")
    if heat is not None and limit is not None and heat >= limit - HOT_C:
        found.append(f"{heat} C before the start; its clocks go down at {limit} C")
    return found


def ailing(cards: Sequence[Facts], ranks: int, environ: Mapping[str, str]) -> list[str]:
    """Problems of the GPUs that ranks of one machine use.

    Each rank uses the next GPU that CUDA_VISIBLE_DEVICES shows. Where that variable has no numbers
    (names such as GPU-5fc1), any GPU may be one of them.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    order = [str(card["index"]) for card in cards] if visible is None else visible.split(",")
    used = [number.strip() for number in order if number.strip()][:ranks]
    is_known = all(number.lstrip("-").isdecimal() for number in used)  # -1 hides all
    return [
        f"{line}, or leave it out (CUDA_VISIBLE_DEVICES=)"
        for card in cards
        if not is_known or str(card["index"]) in used
        for line in ills(card)
    ]


def cards_of(facts: Facts) -> list[dict[str, Any]]:
    """The GPUs that a host shows."""
    return facts["gpus"].get("cards", [])


def slow_disks(facts: Mapping[str, Facts]) -> list[str]:
    """Hosts whose disks write far slower than those of the others."""
    lines = []
    for place in ("runs/", "temporary files"):
        speeds = {
            host: f["disk_mib_per_s"][place]
            for host, f in facts.items()
            if f.get("disk_mib_per_s", {}).get(place)
        }
        if len(speeds) < 2:
            continue
        middle = statistics.median(speeds.values())
        lines += [
            f"{host}: {place} writes {speed:.0f} MiB/s, the median of the hosts is {middle:.0f}"
            for host, speed in speeds.items()
            if speed * SLOW_DISK < middle
        ]
    return lines


def compilers(facts: Mapping[str, Facts]) -> list[str]:
    """Hosts that lack what torch needs to build something."""
    return [
        f"{host}: no {name} in PATH; torch.compile and DeepSpeed's operators need it"
        for host, f in facts.items()
        for name in ("c++", "ninja")
        if f.get("compilers") and not f["compilers"].get(name)
    ]


def names(hosts: Sequence[str], most: int = 4) -> str:
    """Up to `most` names, and the number of the others."""
    return listed(hosts, most)
