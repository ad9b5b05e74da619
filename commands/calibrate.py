"""`make calibrate`: measures this machine for the planner: products by size, memory, collectives.

    python -m commands.calibrate [--out calibration.json] [--ranks "1 2 4"]
    make plan RECIPE=tiny WORLD=2 OVERRIDES="cluster.calibration=calibration.json"

    for each number of ranks: start them -> every rank measures at the same time -> one table

Rule: each measurement is the least of several, taken while all ranks work, because that is what a
run meets; a busy machine gives rates that are too low. Units: seconds, bytes, FLOPs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from base.command_line import Parser, carry_out
from base.cores import usable
from base.errors import UserError
from base.paths import ROOT
from base.units import GIB

WIDTHS = (64, 128, 256, 384, 704, 1024)
TOKENS = (128, 512, 2048)
SIZES = tuple(2**power for power in (10, 13, 16, 19, 22, 24))  # bytes of a collective
# layers, hidden, ffn, heads, sequences, tokens of each, vocabulary
DECODERS = (
    (2, 256, 704, 4, 2, 256, 8192),
    (2, 384, 1024, 6, 4, 256, 8192),
    (4, 256, 704, 4, 4, 256, 8192),
)
REPEATS = 5
LIMIT_S = 600


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m commands.calibrate`; returns the exit status."""
    parser = Parser(prog="make calibrate", description=__doc__)
    parser.add_argument("--out", default="calibration.json", help="file to write")
    parser.add_argument("--ranks", default="1 2 4", help="numbers of ranks to measure with")
    parser.add_argument("--worker", nargs=3, help="used by itself: rank, ranks, folder")
    options = parser.parse_args(arguments)
    if options.worker:
        rank, ranks, folder = options.worker
        return measure_as(int(rank), int(ranks), Path(folder))
    return carry_out(lambda: calibrate(options.out, options.ranks))


def calibrate(out: str, ranks: str) -> int:
    """Measures with every number of ranks and writes the file. Raises UserError."""
    counts = [int(word) for word in ranks.split() if word.isdigit() and int(word) > 0]
    if not counts or len(counts) != len(ranks.split()):
        raise UserError(f'RANKS={ranks!r}: give numbers of ranks, such as RANKS="1 2 4"')
    found = {}
    for count in counts:
        started = time.monotonic()
        found[str(count)] = measure_with(count)
        print(f"{count} ranks: {time.monotonic() - started:.0f} s", flush=True)
    first = found[str(counts[0])]
    content = {
        "device": first["device"],
        "peak_tflops": max(f / s for one in found.values() for f, s in one["products"]) / 1e12,
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        "base_gib": first["base_gib"],
        "ranks": found,
    }
    path = Path(out) if Path(out).is_absolute() else ROOT / out
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {path}; use it with OVERRIDES=cluster.calibration={out}")
    return 0


def measure_with(count: int) -> dict:
    """What rank 0 of `count` ranks measured. Raises UserError where a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": str(max(1, usable() // count))}
        command = [sys.executable, "-m", "commands.calibrate", "--worker"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(count), folder],
                cwd=ROOT,
                env=environment,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            statuses = [rank.wait(LIMIT_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            statuses = [1]
        finally:
            for rank in ranks:
                rank.kill()
        if any(statuses):
            raise UserError(f"measuring with {count} ranks failed or took more than {LIMIT_S} s")
        return json.loads((Path(folder) / "found.json").read_text())


def measure_as(rank: int, ranks: int, folder: Path) -> int:
    """One rank's part; rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    store = dist.FileStore(str(folder / "store"), ranks)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def least(act: Callable[[], object]) -> float:
        """Seconds of one call, the least of several rounds that all ranks begin together."""
        act()
        once = max(1e-7, timed(act, 1))
        calls = max(1, int(0.02 / once))
        together = torch.tensor([float(calls)], device=device)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        calls = int(together.item())
        best = []
        for _ in range(REPEATS):
            dist.barrier()
            best.append(timed(act, calls) / calls)
        return min(best)

    def timed(act: Callable[[], object], calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "base_gib": base_gib(),
        "products": products(least, device, dtype),
        "bytes_per_s": elementwise(least, device, dtype),
        "decoders": decoders(least, device, dtype),
        "optimizer_s": optimizer(least, device),
        **collectives(least, device, rank, ranks),
    }
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def base_gib() -> float:
    """Resident memory of a rank before it holds a model: torch, DeepSpeed and what they import."""
    import deepspeed  # noqa: F401  (a rank imports it, so its memory counts)

    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024 / GIB


def products(least, device, dtype) -> list[list[float]]:
    """[FLOPs, seconds] of products of several sizes; of equal FLOPs the median."""
    import torch

    found = []
    for tokens in TOKENS:
        for width in WIDTHS:
            left = torch.randn(tokens, width, device=device, dtype=dtype)
            right = torch.randn(width, width, device=device, dtype=dtype)
            seconds = least(lambda left=left, right=right: left @ right)
            found.append([2.0 * tokens * width * width, seconds])
    return smooth(found)


def smooth(points: list[list[float]]) -> list[list[float]]:
    """Points in the order of FLOPs, those within a factor of 1.5 merged to their mean."""
    merged: list[list[list[float]]] = []
    for point in sorted(points):
        if merged and point[0] < 1.5 * merged[-1][0][0]:
            merged[-1].append(point)
        else:
            merged.append([point])
    return [[sum(p[i] for p in group) / len(group) for i in (0, 1)] for group in merged]


def elementwise(least, device, dtype) -> float:
    """Bytes per second of a product of two arrays that fit no cache."""
    import torch

    one, other = (torch.randn(2**22, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(one)
    seconds = least(lambda: torch.mul(one, other, out=out))
    return 3 * one.numel() * one.element_size() / seconds


def decoders(least, device, dtype) -> list[list[float]]:
    """[layers, hidden, ffn, heads, tokens, seq, vocab, seconds] of real passes of our decoder."""
    import torch

    from model.config import DecoderConfig
    from model.decoder import Decoder

    found = []
    for layers, hidden, ffn, heads, batch, length, vocab in DECODERS:
        config = DecoderConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True,
        )  # fmt: skip
        model = Decoder(config).to(device=device, dtype=dtype)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        ids = torch.randint(vocab, (batch, length), device=device)

        def act(model=model, ids=ids) -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        found.append([layers, hidden, ffn, heads, batch * length, length, vocab, least(act)])
    return found


def optimizer(least, device) -> float:
    """Seconds per parameter of AdamW's step."""
    import torch

    weights = torch.nn.Parameter(torch.randn(2**22, device=device))
    weights.grad = torch.randn_like(weights)
    adam = torch.optim.AdamW([weights], lr=1e-3)
    return least(adam.step) / weights.numel()


def collectives(least, device, rank: int, ranks: int) -> dict[str, list[list[float]]]:
    """[bytes, seconds] of gathers, and of messages around a ring."""
    import torch
    import torch.distributed as dist

    gathers, sends = [], []
    for size in SIZES if ranks > 1 else ():
        part = torch.zeros(max(1, size // 4 // ranks), device=device)
        whole = torch.zeros(part.numel() * ranks, device=device)
        gathers.append(
            [float(size), least(lambda w=whole, p=part: dist.all_gather_into_tensor(w, p))]
        )
        sent, got = torch.zeros(size // 4, device=device), torch.zeros(size // 4, device=device)

        def swap(sent=sent, got=got) -> None:
            work = dist.isend(sent, (rank + 1) % ranks)
            dist.recv(got, (rank - 1) % ranks)
            work.wait()

        sends.append([float(size), least(swap)])
    return {"collectives": gathers, "sends": sends}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
