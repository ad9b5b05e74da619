"""Draws docs/concepts.svg: which part of the work and of the state each rank has, axis by axis.

    python docs/draw_concepts.py

Four panels: the ZeRO stages (state over 4 ranks), tensor parallelism (one matrix), context
parallelism (one sequence), and the pipeline's timetable (1F1B: 4 stages, 8 micro-batches).
"""

from __future__ import annotations

from pathlib import Path

OUT = Path(__file__).with_name("concepts.svg")
RANKS, STAGES, MICRO_BATCHES = 4, 4, 8
COLORS = {"weights": "#4c78a8", "gradients": "#f58518", "optimizer": "#54a24b"}
FORWARD, BACKWARD, IDLE = "#9ecae9", "#e4a87a", "#eeeeee"


def box(x: float, y: float, width: float, height: float, fill: str, text: str = "") -> str:
    """A rectangle with a centred text."""
    drawn = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"'
        ' stroke="white"/>'
    )
    if text:
        drawn += label(x + width / 2, y + height / 2 + 4, text, "middle")
    return drawn


def label(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{text}</text>'


def zero(x: float, y: float) -> list[str]:
    """State of 4 ranks in each ZeRO stage; a full bar is the state of the whole model."""
    drawn = [label(x, y, "ZeRO: what each of 4 ranks keeps", size=15)]
    for row, (name, sharded) in enumerate(
        [("none", 0), ("ZeRO-1", 1), ("ZeRO-2", 2), ("ZeRO-3", 3)]
    ):
        top = y + 20 + row * 46
        drawn.append(label(x, top + 20, name))
        for rank in range(RANKS):
            left = x + 60 + rank * 82
            widths = {"weights": 12.0, "gradients": 12.0, "optimizer": 48.0}
            order = ["optimizer", "gradients", "weights"][:sharded]
            at = left
            for kind, full in widths.items():
                width = full / RANKS if kind in order else full
                drawn.append(box(at, top, width, 30, COLORS[kind]))
                at += width
    for number, (kind, color) in enumerate(COLORS.items()):
        drawn += [
            box(x + 60 + number * 100, y + 210, 14, 14, color),
            label(x + 80 + number * 100, y + 222, kind),
        ]
    return drawn


def tensor(x: float, y: float) -> list[str]:
    """One matrix of a layer over 2 tensor ranks."""
    drawn = [label(x, y, "Tensor: each matrix over the GPUs of a host", size=15)]
    drawn += [box(x, y + 20, 70, 40, "#dddddd", "x"), label(x + 80, y + 45, "times")]
    drawn += [box(x + 125, y + 20, 70, 40, "#4c78a8", "rank 0")]
    drawn += [box(x + 195, y + 20, 70, 40, "#9ecae9", "rank 1"), label(x + 275, y + 45, "columns")]
    drawn += [
        box(x, y + 75, 70, 20, "#4c78a8", "rank 0"),
        box(x, y + 95, 70, 20, "#9ecae9", "rank 1"),
    ]
    drawn += [label(x + 80, y + 100, "rows of the next matrix; then one sum over the ranks")]
    return drawn


def context(x: float, y: float) -> list[str]:
    """One sequence over 4 context ranks."""
    drawn = [label(x, y, "Context: each sequence over ranks", size=15)]
    for rank in range(RANKS):
        drawn.append(
            box(x + rank * 88, y + 20, 88, 30, ["#4c78a8", "#9ecae9"][rank % 2], f"rank {rank}")
        )
    drawn.append(label(x, y + 70, "keys and values travel; weights are the same on all of them"))
    return drawn


def pipeline(x: float, y: float) -> list[str]:
    """The timetable of 1F1B: a backward takes twice a forward."""
    drawn = [label(x, y, "Pipeline: 4 stages, 8 micro-batches; grey is the bubble", size=15)]
    unit, ends = 15, {}
    for stage in range(STAGES):
        warm = min(STAGES - stage - 1, MICRO_BATCHES)
        order = [("f", n) for n in range(warm)]
        for n in range(MICRO_BATCHES - warm):
            order += [("f", warm + n), ("b", n)]
        order += [("b", n) for n in range(MICRO_BATCHES - warm, MICRO_BATCHES)]
        ends[stage] = order
    done: dict[tuple[str, int, int], int] = {}
    clock, at = [0] * STAGES, [0] * STAGES
    slots: list[tuple[int, int, str, int]] = []
    while any(at[stage] < len(ends[stage]) for stage in range(STAGES)):
        for stage in range(STAGES):
            while at[stage] < len(ends[stage]):
                kind, number = ends[stage][at[stage]]
                needs = (kind, stage + (-1 if kind == "f" else 1), number)
                is_first = stage == (0 if kind == "f" else STAGES - 1)
                if not is_first and needs not in done:
                    break
                begin = max(clock[stage], 0 if is_first else done[needs])
                clock[stage] = done[kind, stage, number] = begin + (1 if kind == "f" else 2)
                slots.append((stage, begin, kind, number))
                at[stage] += 1
    for stage in range(STAGES):
        drawn.append(label(x, y + 40 + stage * 30, f"stage {stage}"))
        drawn.append(box(x + 60, y + 20 + stage * 30, max(clock) * unit, 28, IDLE))
    for stage, begin, kind, number in slots:
        width, color = (unit, FORWARD) if kind == "f" else (2 * unit, BACKWARD)
        left = x + 60 + begin * unit
        drawn.append(box(left, y + 20 + stage * 30, width, 28, color, str(number + 1)))
    return drawn


def main() -> None:
    """Write the picture."""
    parts = [*zero(20, 30), *tensor(440, 30), *context(440, 180), *pipeline(20, 290)]
    OUT.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 450" font-family="sans-serif"'
        ' font-size="12"><rect width="860" height="450" fill="white"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )
    print(f"drawn: {OUT}")


if __name__ == "__main__":
    main()
