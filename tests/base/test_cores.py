"""base/cores.py: the quota of a container counts, not the cores of its machine."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from base.cores import OPEN_FILES, allow_open_files, usable


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/", {"cpu.max": "max 100000\n"}, 8),
        ("0::/a/b", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a", {"cpu.max": "5000 100000\n", "a/cpu.max": "9900000 100000\n"}, 1),
        ("2:cpu,cpuacct:/j", {"cpu/j/cpu.cfs_quota_us": "300000\n",
                              "cpu/j/cpu.cfs_period_us": "100000\n"}, 3),
        ("2:cpu:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("4:memory:/", {"cpu.max": "100000 100000\n"}, 8),
        (None, {}, 8),
    ],
)  # fmt: skip
def test_the_smallest_limit_counts(tmp_path, monkeypatch, group, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    if group is not None:
        write(tmp_path / "proc/self/cgroup", group + "\n")
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert usable(tmp_path) == cores


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 4096), 4096),
        ((1024, 2**20), OPEN_FILES),
        ((1024, resource.RLIM_INFINITY), OPEN_FILES),
        ((2**18, 2**20), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_the_soft_limit_of_open_files_is_raised_and_never_lowered(monkeypatch, limits, wanted):
    made = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: made.append(pair))
    allow_open_files()
    assert made == ([] if wanted is None else [(wanted, limits[1])])
