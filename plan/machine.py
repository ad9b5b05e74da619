"""A cluster as the planner sees it: one GPU, its memory, and the links of its host and network.

    published/gpus.csv (data sheets)  <-  recipes/cluster/*.yaml or a row of published runs

Rule: GB/s and GB are powers of ten, GiB is 2**30 bytes; the field's name says which. Card makers
print "80 GB" for 80 GiB, of which torch sees about 79.2.
"""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from functools import cache

from base.errors import UserError
from base.paths import ROOT
from base.units import GIB
from base.values import did_you_mean

PUBLISHED = ROOT / "plan" / "published"
PEAK_WITHOUT_MEASURE = 0.80  # of the peak, where no matmul was measured (A100 0.87, H100 0.80)
HOST_GIB_PER_GPU = 128.0  # the smallest host with eight A100 or H100 that is sold has 1 TiB
HOST_SHARE = 0.9  # of a host's memory: system, file cache
VISIBLE = 0.99  # of a card's memory: the driver keeps the rest


@dataclass(frozen=True)
class Machine:
    """One kind of GPU in one kind of network."""

    gpu: str
    peak_tflops: float  # dense bf16
    matmul_tflops: float  # a large matmul alone, measured
    memory_gib: float
    memory_gb_s: float
    multiprocessors: int  # 1: no waves to fill (a CPU)
    link_gb_s: float  # one direction, inside the scale-up domain, per GPU
    domain: int  # GPUs that the fast links join; may span hosts
    gpus_per_node: int
    nic_gb_s: float  # per GPU, one direction
    calibrated: str = ""  # which sustained rate of `constants` was fitted on it; "" = none
    price_per_hour: float | None = None  # of one GPU
    mtbf_hours: float | None = None  # of all GPUs of the run together
    host_memory_gib: float | None = None  # of one host; None: HOST_GIB_PER_GPU for each GPU

    @property
    def is_newer_than_ampere(self) -> bool:
        """Whether matrix products have instructions that older attention kernels do not use."""
        return self.gpu.startswith(("H", "GH", "B", "GB"))

    @property
    def usable_bytes(self) -> float:
        """Bytes that torch can allocate on one GPU."""
        return self.memory_gib * GIB * VISIBLE

    @property
    def usable_host_bytes(self) -> float:
        """Bytes that the ranks of one host can allocate in its memory."""
        whole = self.host_memory_gib or HOST_GIB_PER_GPU * self.gpus_per_node
        return whole * GIB * HOST_SHARE


@cache
def known_gpus() -> dict[str, Machine]:
    """Name -> data sheet of every GPU in published/gpus.csv."""
    found = {}
    with open(PUBLISHED / "gpus.csv", newline="") as file:
        for row in csv.DictReader(file):
            peak = float(row["peak_tflops"])
            whole = {
                name: int(row[name]) for name in ("multiprocessors", "domain", "gpus_per_node")
            }
            real = {
                name: float(row[name])
                for name in ("memory_gib", "memory_gb_s", "link_gb_s", "nic_gb_s")
            }
            found[row["gpu"]] = Machine(
                gpu=row["gpu"],
                peak_tflops=peak,
                matmul_tflops=float(row["matmul_tflops"] or PEAK_WITHOUT_MEASURE * peak),
                calibrated=row["calibrated"],
                **whole,
                **real,
            )
    return found


# Names that other people use for a GPU of the list. A bare "A100" is taken as the larger one.
ALIASES = {
    "A100": "A100-80GB",
    "A100-SXM": "A100-80GB",
    "A100-SXM4-80GB": "A100-80GB",
    "A100-SXM4-40GB": "A100-40GB",
    "H100": "H100-SXM",
    "H100-80GB": "H100-SXM",
    "H100-SXM5": "H100-SXM",
    "H800": "H100-SXM",
    "H200-SXM": "H200",
    "V100": "V100-32GB",
    "V100-SXM": "V100-32GB",
    "B200-SXM": "B200",
    "MI250X": "MI250X-GCD",
}


def machine_of(gpu: str, **changes) -> Machine:
    """The data sheet of a GPU, with some fields replaced. Raises UserError for an unknown name."""
    known = known_gpus()
    name = gpu if gpu in known else ALIASES.get(gpu, gpu)
    if name not in known:
        near = did_you_mean(name, known)
        raise UserError(f"gpu={gpu} is not in plan/published/gpus.csv{near}")
    return dataclasses.replace(known[name], **changes)
