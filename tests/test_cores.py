"""recipes/cores.py: the quota of a container counts, not the cores of its machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipes.cores import usable


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
