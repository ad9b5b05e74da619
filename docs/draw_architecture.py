"""Draws docs/architecture.svg: the rooms of this repository and which room imports which.

    python docs/draw_architecture.py

    source files -> imports of each -> room x room -> boxes on a diagonal, one dot for each arrow

Rule: the picture is a function of the imports in the source files alone. A test draws it again and
compares it with the committed file. Units: pixels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "workers")]

from source_tree import PACKAGES, imports, sources  # noqa: E402

PICTURE = ROOT / "docs" / "architecture.svg"
ENTRY = "pretrain"  # pretrain.py: a file beside the rooms; commands start it as a process
STEP_X, STEP_Y, BOX_WIDTH, BOX_HEIGHT = 74, 46, 104, 30
LEFT, TOP, RIGHT = 20, 50, 360
INK, FAINT, BOX, DOT, TEXT = "#222222", "#cccccc", "#e8eef5", "#4477aa", "#555555"


def arrows() -> dict[str, set[str]]:
    """Map each room, and the entry, to the rooms that it imports."""
    names = (*PACKAGES, ENTRY)
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in sources():
        own = path.relative_to(ROOT).with_suffix("").parts[0]
        if own in found:
            firsts = {name.partition(".")[0] for name in imports(path)}
            found[own] |= firsts.intersection(names) - {own}
    return found


def folders(room: str) -> str:
    """Names of the folders of a room, as one text."""
    if room == ENTRY:
        return "the training program: prepare, then the loop"
    inside = sorted(path.parent.name for path in (ROOT / room).glob("*/__init__.py"))
    return "  ".join(f"{name}/" for name in inside)


def drawing() -> str:
    """Return the picture as SVG.

    Each room is a box on the diagonal. A dot in its row marks an import: it lies in the column of
    the room that is imported.
    """
    found = arrows()
    order = list(found)
    width = LEFT + STEP_X * (len(order) - 1) + BOX_WIDTH + RIGHT
    height = TOP + STEP_Y * len(order) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 28, "A dot: the room of this row imports the room of this column.", TEXT),
    ]
    # Lines first, so that boxes and dots cover them.
    middles = {name: (LEFT + STEP_X * i + BOX_WIDTH // 2, TOP + STEP_Y * i + BOX_HEIGHT // 2)
               for i, name in enumerate(order)}  # fmt: skip
    for name in order:
        x, y = middles[name]
        users = [middles[other][1] for other in order if name in found[other]]
        used = [middles[other][0] for other in found[name]]
        if users:
            lines.append(line(x, y, x, max(users)))
        if used:
            lines.append(line(min(used), y, x, y))
    # Boxes, dots and the folders of each room.
    for name in order:
        x, y = middles[name]
        left, top = x - BOX_WIDTH // 2, y - BOX_HEIGHT // 2
        shown = f"{name}.py" if name == ENTRY else f"{name}/"
        lines += [
            f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"'
            f' fill="{BOX}" stroke="{INK}"/>',
            text(x, y + 5, shown, INK, ' text-anchor="middle"'),
            text(x + BOX_WIDTH // 2 + 12, y + 5, folders(name), TEXT),
        ]
        lines += [
            f'<circle cx="{middles[other][0]}" cy="{y}" r="5" fill="{DOT}"/>'
            for other in order
            if other in found[name]
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def line(x: int, y: int, to_x: int, to_y: int) -> str:
    """One thin line."""
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{FAINT}"/>'


def text(x: int, y: int, words: str, color: str, more: str = "") -> str:
    """One line of text."""
    return f'<text x="{x}" y="{y}" fill="{color}"{more}>{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
    print(f"drawn: {PICTURE.relative_to(ROOT)}")
