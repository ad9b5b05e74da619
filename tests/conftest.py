"""Fixtures shared by tests: small corpora, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
from short_documents import write_short_documents


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory) -> Path:
    """See `write_short_documents`."""
    return write_short_documents(tmp_path_factory.mktemp("corpora") / "short")
