"""Fixtures shared by tests, and time limits that fit the machine (see workers/patience.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from namespaces import why_no_ssh, why_not
from patience import VARIABLE
from ranks import PATIENCE
from short_documents import write_short_documents


def pytest_report_header() -> list[str]:
    """First lines of the suite: the factor of all time limits, and tests that cannot run here."""
    lines = [f"time limits: x {PATIENCE:g}, as busy as this machine is now ({VARIABLE}=N sets it)"]
    reason = why_not() or why_no_ssh()
    if reason:
        lines.append(f"tests of several hosts: SKIPPED, {reason}")
    return lines


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply the time limit of every test by PATIENCE."""
    usual = float(config.getini("timeout"))
    for item in items:
        own = item.get_closest_marker("timeout")
        limit_s = own.args[0] if own and own.args else usual
        item.add_marker(pytest.mark.timeout(limit_s * PATIENCE), append=False)


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory) -> Path:
    """See `write_short_documents`."""
    return write_short_documents(tmp_path_factory.mktemp("corpora") / "short")


@pytest.fixture(autouse=True)
def same_environment():
    """No test leaves variables to the next one: a RANK left behind makes the next run wait."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
