"""Two gloo ranks save and load together; then rank 0 calls save alone."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist
from ranks import PATIENCE
from small_fragments import blank, cut_flat, full_tensors

from checkpoint.comm import RankComm
from checkpoint.load.restoring import load
from checkpoint.save.commit import save


def main(out: Path, run: Path) -> None:
    """Write the results to the file `out`."""
    dist.init_process_group("gloo")
    comm = RankComm(timeout_s=3 * PATIENCE)
    fragments = cut_flat(full_tensors({"w": (9, 5)}), comm.world)[comm.rank]
    report = save(run, 4, fragments, {}, comm)
    loaded = load(run, blank(fragments), comm)
    reports = comm.exchange([report.ok, report.problem], "test")
    steps = comm.exchange(loaded.step, "test")
    if comm.rank == 0:
        began, message = time.perf_counter(), ""
        try:
            save(run, 5, fragments, {}, comm)
        except RuntimeError as error:
            message = str(error)
        waited_s = time.perf_counter() - began
        seen = dict(reports=reports, loaded=steps, alone=message, waited_s=waited_s)
        out.write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


main(Path(sys.argv[1]), Path(sys.argv[2]))
