"""Time limits of tests grow with the slowness of the machine."""

from __future__ import annotations

import re

import patience
import pytest
from ranks import PATIENCE, ROOT

# A limit of a connection, of a product's knob, or of a helper that multiplies by itself.
SCALED_ELSEWHERE = ("urlopen", "create_connection")


def test_limits_grow_with_the_time_that_fixed_work_takes(monkeypatch):
    assert patience.factor(patience.IDLE_S) == patience.factor(1.2 * patience.IDLE_S) == 1.0
    assert patience.factor(4 * patience.IDLE_S) == pytest.approx(6.0)
    assert patience.factor(1e9) == patience.MOST
    monkeypatch.setenv(patience.VARIABLE, "2.5")
    assert patience.patience() == 2.5
    monkeypatch.delenv(patience.VARIABLE)
    monkeypatch.setattr(patience, "measured_s", lambda: 2 * patience.IDLE_S)
    assert patience.patience() == 3.0
    monkeypatch.setattr(patience, "measured_s", lambda: 1 / 0)  # measured once
    assert patience.patience() == 3.0


def test_the_limit_of_a_test_is_multiplied(request):
    limit_s = float(request.config.getini("timeout")) * PATIENCE
    assert request.node.get_closest_marker("timeout").args[0] == limit_s


def test_no_limit_in_a_test_stays_as_it_is_on_a_slow_machine():
    """`timeout=30`, `communicate(timeout=30)`, `monotonic() + 30`: each times PATIENCE."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if any(name in line for name in SCALED_ELSEWHERE) or path.name == "test_patience.py":
                continue
            if re.search(r"\btimeout=\d|monotonic\(\) \+ [\w.]+(?! \*|[\w.])", line) and (
                "* PATIENCE" not in line
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong
