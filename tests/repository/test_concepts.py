"""docs/concepts.svg is what its script draws, and the bubble in it is the formula's."""

from __future__ import annotations

import importlib.util
import re

from ranks import ROOT


def test_the_picture_is_drawn_by_its_script_and_its_bubble_is_the_formulas(tmp_path):
    spec = importlib.util.spec_from_file_location("concepts", ROOT / "docs" / "draw_concepts.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kept, script.OUT = script.OUT.read_text(), tmp_path / "concepts.svg"
    script.main()
    assert script.OUT.read_text() == kept
    grey = float(re.search(r'width="([\d.]+)" height="28" fill="#eeeeee"', kept)[1])
    busy = script.MICRO_BATCHES * 3 * 15  # a forward and a backward of twice its length, 15 wide
    stages = script.STAGES - 1
    assert (grey - busy) / grey == stages / (script.MICRO_BATCHES + stages)
    assert f"{stages} of {script.MICRO_BATCHES + stages} in the picture" in (
        ROOT / "docs" / "concepts.md"
    ).read_text().replace("\n  ", " ")
