"""The facts of one host that the doctor compares. Gathered on that host, in seconds.

    quick   versions, code, variables, disk space, shared folder, addresses, a free port, GPUs;
            also removes locks that killed builds left behind, and names those of others
    full    also disk speed and compilers

Rule: this file gathers and judges nothing (launch.hosts.judge does). A fact that cannot be found
out is null, or says why. Units: GiB, MiB/s, seconds, percent.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from base.paths import CACHE, ROOT
from base.units import GIB, MIB
from launch.hosts import network
from launch.hosts.variables import watched

PACKAGES = (
    "torch", "deepspeed", "transformers", "tokenizers", "numpy", "hydra-core", "omegaconf",
    "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl", "datasets", "pyarrow",
)  # fmt: skip
CODE = ("*.py", "recipes/**/*.yaml", "ds_configs/*.json", "*/*.py", "*/*/*.py")
BUILDS = CACHE / "torch_extensions"
NOT_CODE = ("tests", "benchmarks", "runs", "corpora", ".venv", ".cache")
PROBE_MIB = 64
# A network file system may show a new file late (attribute caches last up to 60 s by default, new
# names mostly a few).
SEEN_WITHIN_S = 15.0
# A build takes a few minutes; nothing has moved for this long only where its process is gone.
STALE_S = 900.0
READER_TIMEOUT_S = 60  # a driver may take its time with the first call
NO_NVML = 3  # exit status of the reader


def gather(root: Path, node: int, ask: Mapping[str, Any], environ: Mapping[str, str]) -> dict:
    """All facts. `ask` has: shared (folder with a token), folders (corpora), is_full, port."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "machine": f"{socket.gethostname()} {boot_id()}",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": versions(),
        "code": code(root),
        "environment": watched(environ),
        "cores": os.cpu_count(),
        "memory_gib": psutil.virtual_memory().total / GIB,
        "disk": {name: free_gib(path) for name, path in places(root).items()},
        "shared": sees_shared(root, ask.get("shared"), node),
        "folders": {folder: fingerprint(root / folder) for folder in ask.get("folders", [])},
        "addresses": network.addresses(),
        "port": port(ask.get("port")),
        "gpus": gpus(),
    }
    has_gpus = bool(facts["gpus"].get("cards"))
    facts["missing_interfaces"] = network.missing_interfaces(environ, has_gpus)
    facts["locks"] = remove_stale_locks(environ)
    if ask.get("is_full"):
        facts["compilers"] = {name: shutil.which(name) for name in ("c++", "ninja", "nvcc")}
        facts["disk_mib_per_s"] = {
            name: write_speed(path) for name, path in places(root).items() if name != "/dev/shm"
        }
    return facts


def boot_id() -> str:
    """The identity of this machine since its start; the same for two names of one machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def versions() -> dict[str, str]:
    """Versions of installed packages that can change a result or a speed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def code(root: Path) -> dict[str, str]:
    """Path -> short digest of every file of this project that can change a run."""
    found = {}
    for pattern in CODE:
        for path in root.glob(pattern):
            name = path.relative_to(root)
            if name.parts[0] not in NOT_CODE and path.is_file():
                found[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return found


def places(root: Path) -> dict[str, Path]:
    """Folders that a run writes to: name -> folder that exists."""
    runs = root / "runs"
    return {
        "runs/": runs if runs.is_dir() else root,
        "temporary files": Path(tempfile.gettempdir()),
        "/dev/shm": Path("/dev/shm"),
    }


def free_gib(path: Path) -> float | None:
    """Free space for this user; None where there is no such folder."""
    try:
        return shutil.disk_usage(path).free / GIB
    except OSError:
        return None


def write_speed(path: Path) -> float | None:
    """MiB/s of one file that is written and synced; None where it cannot be written."""
    block = os.urandom(MIB)
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            began = time.perf_counter()
            for _ in range(PROBE_MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return PROBE_MIB / (time.perf_counter() - began)
    except OSError:
        return None


def sees_shared(root: Path, shared: Mapping[str, str] | None, node: int) -> str | None:
    """The reason why the shared folder is not seen as it should be; None = it is.

    Leaves a file of its own there for the launcher to find.
    """
    if not shared:
        return None
    folder = root / shared["folder"]
    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        try:
            if (folder / "launcher").read_text() == shared["token"]:
                break
            problem = f"{folder} is another one than on the launching host"
        except OSError as error:
            problem = f"{folder}: {error.strerror}"
        if time.monotonic() > deadline:
            return problem
        time.sleep(0.2)
    try:
        (folder / f"node-{node}").write_text(shared["token"])
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None


def fingerprint(corpus: Path) -> str | None:
    """Digest of a corpus's manifest; None where the folder or the manifest is missing."""
    try:
        return hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def port(wanted: int | None) -> dict[str, Any]:
    """The port of the rendezvous: the wanted one, or one that is free."""
    if wanted is not None:
        return {"number": wanted, "is_free": network.is_free(wanted)}
    return {"number": network.free_port(), "is_free": True}


def gpus() -> dict[str, Any]:
    """One reading of every GPU: {"cards": [field -> value]}, or {"problem": why there is none}.

    runtime.monitor.device_reader reads them, in a process of its own, because a call into the
    driver can hang. No cards and no problem where there is neither a driver nor a device file.
    """
    command = [sys.executable, "-m", "runtime.monitor.device_reader"]
    try:
        reader = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        return {"problem": f"{command[0]}: {error.strerror}"}
    try:
        out, err = reader.communicate(timeout=READER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        reader.kill()  # and no wait: it may be stuck in the kernel
        return {"problem": f"the driver (NVML) gave no answer in {READER_TIMEOUT_S} s"}
    lines = [json.loads(line) for line in out.splitlines()]
    if reader.returncode == NO_NVML:
        return {"problem": lines[0]["notice"]} if glob.glob("/dev/nvidia[0-9]*") else {"cards": []}
    if reader.returncode or not lines:
        last = (err.strip().splitlines() or ["nothing"])[-1]
        return {"problem": f"runtime.monitor.device_reader ended with {reader.returncode}: {last}"}
    return {"cards": [card | {"driver": lines[0].get("driver")} for card in lines[0]["gpus"]]}


def extension_folders(environ: Mapping[str, str]) -> list[Path]:
    """Folders in which torch builds extensions, one folder per operator below these.

    The first are those of runtime.engine.builds, one per environment. Where they cannot be written
    torch uses those of the home folder.
    """
    chosen = environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return [Path(chosen)]
    caches = (BUILDS, Path(os.path.expanduser("~")) / ".cache" / "torch_extensions")
    return [path for cache in caches for path in sorted(cache.glob("*")) if path.is_dir()]


def remove_stale_locks(environ: Mapping[str, str]) -> list[str]:
    """Remove lock files of builds that were killed: later runs would wait on them for ever.

    A lock is stale when nothing in its folder has changed for STALE_S. Returns a line for each
    lock: removed, or still there, in which case torch waits without a message.
    """
    notes = []
    for folder in extension_folders(environ):
        for lock in sorted(folder.glob("*/lock")):
            with contextlib.suppress(OSError):
                idle_s = time.time() - max(p.stat().st_mtime for p in lock.parent.iterdir())
                if idle_s > STALE_S:
                    lock.unlink()
                    notes.append(f"removed a lock that a killed build left behind: {lock}")
                else:
                    notes.append(
                        f"an operator is being built, or its build was killed {idle_s:.0f} s ago; a"
                        f" run that needs it waits while this lock is there: {lock}"
                    )
    return notes
