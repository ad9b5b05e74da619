"""The losses of the tiny recipe are those of the golden curve (golden.py)."""

from __future__ import annotations

import json

import golden
import pytest

from data.corpus.build import ensure
from recipes.schema import Source


@pytest.mark.timeout(golden.TIMEOUT_S + 60)
def test_the_golden_curve_is_kept(tmp_path):
    ensure(Source(corpus="corpora/sotu", build="sotu"), golden.ROOT)
    recorded = json.loads(golden.FILE.read_text())
    found = golden.losses(tmp_path / "clone")
    if recorded["fingerprint"] == golden.fingerprint():
        assert found == recorded["losses"]
    else:
        assert found == pytest.approx(recorded["losses"], rel=1e-5)
    assert len(found) == golden.STEPS
    assert found[-1] < found[0] - 2
