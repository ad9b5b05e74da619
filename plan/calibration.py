"""What `make calibrate` measured on a machine, as the rates that the planner uses.

    calibration file: for each number of ranks on the machine
        products     [[FLOPs, seconds], ...] of one matrix product, all ranks at the same time
        collectives  [[bytes, seconds], ...] of an all-gather, bytes of its larger side
        sends        [[bytes, seconds], ...] of a message to the next rank
        decoders     [[layers, hidden, ffn, heads, tokens, seq, vocab, seconds], ...] of a real pass

Rule: everything is measured while all ranks of the machine work, so cores, caches and links that
they share are in the numbers. What a pass takes beyond its products is put on its memory-bound
work. Units: seconds, bytes, FLOPs.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from base.errors import UserError
from base.paths import ROOT
from plan.machine import Machine

Table = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Rates:
    """Measurements with one number of ranks at work."""

    products: Table
    collectives: Table
    sends: Table
    bytes_per_s: float  # of elementwise work
    bytes_multiple: float  # of the least bytes, so that real passes take what they took
    optimizer_s: float  # seconds per parameter of a step

    def product_s(self, flops: float) -> float:
        """Seconds of one matrix product."""
        return interpolated(self.products, flops)

    def collective_s(self, bytes_: float) -> float:
        """Seconds of one all-gather or reduce-scatter."""
        return interpolated(self.collectives, bytes_) if self.collectives else 0.0

    def send_s(self, bytes_: float) -> float:
        """Seconds of one message."""
        return interpolated(self.sends, bytes_) if self.sends else 0.0


def interpolated(table: Table, x: float) -> float:
    """y at x: between points a power law; below the first constant, above the last proportional."""
    if x <= table[0][0]:
        return table[0][1]
    if x >= table[-1][0]:
        return table[-1][1] * x / table[-1][0]
    index = bisect_left([point[0] for point in table], x)
    (x0, y0), (x1, y1) = table[index - 1], table[index]
    share = math.log(x / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share


def calibrated_machine(given: str, ranks: int) -> tuple[Machine, list[str]]:
    """The machine of a calibration file for `ranks` on one host. Raises UserError."""
    path = Path(given) if Path(given).is_absolute() else ROOT / given
    try:
        content = json.loads(path.read_text())
        counts = sorted(int(count) for count in content["ranks"])
        chosen = next((count for count in counts if count >= ranks), counts[-1])
        measured = content["ranks"][str(chosen)]
        rates = rates_of(measured)
        machine = Machine(
            gpu=content["device"],
            peak_tflops=content["peak_tflops"],
            matmul_tflops=max(flops / seconds for flops, seconds in rates.products) / 1e12,
            memory_gib=content["memory_gib"] / max(ranks, 1),
            memory_gb_s=rates.bytes_per_s / 1e9,
            multiprocessors=1,
            link_gb_s=1.0,
            domain=max(counts),
            gpus_per_node=max(counts),
            nic_gb_s=1.0,
            is_measured=True,
            base_gib=content["base_gib"],
            rates=rates,
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
        raise UserError(
            f"cluster.calibration={given}: {path} is no calibration file ({error!r}); make one with"
            " `make calibrate`"
        ) from None
    assumed = [f"rates measured on {content['device']} with {chosen} ranks at work ({path.name})"]
    if chosen != ranks:
        assumed.append(f"{ranks} ranks on one host were not measured; those of {chosen} stand in")
    return machine, assumed


def rates_of(measured: dict) -> Rates:
    """Rates with the multiple of memory-bound work that the measured passes ask for."""
    tables = {
        name: tuple(sorted((float(x), float(y)) for x, y in measured[name]))
        for name in ("products", "collectives", "sends")
    }
    plain = Rates(**tables, bytes_per_s=measured["bytes_per_s"], bytes_multiple=1.0,
                  optimizer_s=measured["optimizer_s"])  # fmt: skip
    found = [multiple_of(plain, *map(float, one)) for one in measured["decoders"]]
    return Rates(**tables, bytes_per_s=plain.bytes_per_s, optimizer_s=plain.optimizer_s,
                 bytes_multiple=statistics.median(found))  # fmt: skip


def multiple_of(
    rates: Rates, layers: float, hidden: float, ffn: float, heads: float, tokens: float,
    seq: float, vocab: float, seconds: float,
) -> float:  # fmt: skip
    """How many times the least bytes a real pass seems to move, its products taken off."""
    from plan.compute_time import block_s, products_s
    from plan.constants import Constants
    from plan.workload import Job, Shape

    shape = Shape(int(vocab), int(hidden), int(ffn), int(layers), int(heads), int(heads))
    job = Job(shape, int(seq), int(tokens // seq), 1, precision="fp32", sequence=False)
    machine = Machine("measured", 1, 1, 1, rates.bytes_per_s / 1e9, 1, 1, 1, 1, 1,
                      is_measured=True, rates=rates)  # fmt: skip
    block = block_s(job, machine, Constants())
    head = sum(products_s(tokens, hidden, vocab, machine, Constants()))
    arithmetic = layers * (sum(block["matmul"]) + sum(block["attention"])) + head
    least = layers * sum(block["memory_bound"]) + tokens * vocab * 16 / rates.bytes_per_s
    return max(0.5, (seconds - arithmetic) / least)
