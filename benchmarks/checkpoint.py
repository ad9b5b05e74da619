"""Seconds to save and to load the same training state: this project, DeepSpeed, bare torch.

    python -m benchmarks.checkpoint                            40 million parameters, ZeRO-1, 1 rank
    python -m benchmarks.checkpoint --zero 3 --world 2 --repeats 7 --folder /some/disk

    ours        fragments -> commit.save (digests, commit, sampled read-back); restore.load
    deepspeed   engine.save_checkpoint / load_checkpoint, which also stores the working weights
    torch       torch.save of this rank's fp32 master and moments; torch.load(weights_only=True)

Turns alternate (a b c a b c) on one engine, one disk, one thread per rank; the first round is not
counted. The one rule: a turn ends where the state is safe, and a load where training could go on.
All that was written is fsynced, files and folders (ours does so itself); before a load the weights
are spoiled and the files' pages dropped from the page cache; afterwards weights, moments and step
must equal, to the bit, those before. Times are those of the slowest rank. Writes
benchmarks/results/checkpoint-zero<stage>-<world>ranks.json and .md. Units: seconds, bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from benchmarks.processes import ROOT
from benchmarks.report import paired_ratios, quartiles, spread
from benchmarks.step import commit, machine, say
from benchmarks.workload import LR, Workload, count_targets, micro_batches, recipe_of, settled_of
from checkpoint.choose import drop_from_cache
from checkpoint.comm import Comm, Ranks
from checkpoint.commit import save
from checkpoint.restore import load
from checkpoint.state import RunState, random_states
from checkpoint.storage import sync_folder
from model.cost import num_parameters
from runtime import process
from runtime.batches import to_device
from runtime.engine import Engine, build

TIME_LIMIT_S = 900
# fp32 weights and Adam's two moments; 1 % for indexes, digests and the manifest.
MOST_BYTES_PER_PARAMETER = 12 * 1.01
WIDTH = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4)
KEYS = ("save_s", "load_s", "save_cpu_s", "load_cpu_s")
TITLES = {
    "ours": "(a) this project",
    "deepspeed": "(b) DeepSpeed save_checkpoint",
    "torch": "(c) torch.save, torch.load",
}


def main(arguments: list[str]) -> int:
    """Start the ranks, then print and write what they measured; or be one of the ranks."""
    options = parse(arguments)
    if options.rank_of is not None:
        measure(options, options.rank_of)
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=options.folder))
    load_before = os.getloadavg()
    try:
        launch(arguments, options.world, folder)
        result = json.loads((folder / "result.json").read_text())
    finally:
        shutil.rmtree(folder)
    result = {
        "command": " ".join(["python -m benchmarks.checkpoint", *arguments]),
        "commit": commit(),
        "machine": machine(),
        "load_before": [round(x, 1) for x in load_before],
        "load_after": [round(x, 1) for x in os.getloadavg()],
        "zero": options.zero,
        "world": options.world,
    } | result
    text = markdown(result)
    print(text)
    out = ROOT / f"benchmarks/results/checkpoint-zero{options.zero}-{options.world}ranks.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(text)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint")
    parser.add_argument("--millions", type=float, default=40, help="of parameters, about")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds")
    parser.add_argument("--world", type=int, choices=(1, 2), default=1, help="ranks")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=1, help="ZeRO stage")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="on the disk to measure")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def launch(arguments: list[str], world: int, folder: Path) -> None:
    """Run the ranks to their end. Raises CalledProcessError, TimeoutExpired."""
    command = [sys.executable, "-m"]
    if world > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m"]
    command += ["benchmarks.checkpoint", *arguments, f"--rank-of={folder}"]
    settings = dict(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | settings, timeout=TIME_LIMIT_S)


def workload(millions: float, world: int) -> Workload:
    """As many blocks as come nearest to `millions` of parameters; a step of few tokens."""

    def with_blocks(count: int) -> Workload:
        shape = Workload().shape | WIDTH | {"num_hidden_layers": count}
        return Workload("fp32", 1, world, seq_len=64, micro_batch=1, accumulation=1, shape=shape)

    one, two = (num_parameters(with_blocks(count).shape_object) for count in (1, 2))
    return with_blocks(max(1, 1 + round((millions * 1e6 - one) / (two - one))))


class Rank(NamedTuple):
    """What a contender needs."""

    engine: Engine
    state: RunState
    ranks: Comm


def measure(options: argparse.Namespace, folder: Path) -> None:
    """One rank: an engine after one update, then all rounds. Raises AssertionError where a load
    does not bring back what was saved."""
    work = workload(options.millions, options.world)
    recipe = recipe_of(work, zero=options.zero)
    me, settled = process.start(recipe.cluster), settled_of(recipe, options.world)
    engine = build(recipe, settled.layout, settled.config, me)
    batches = [to_device(batch, me.device) for batch in micro_batches(work, me.rank, "across")]
    engine.set_lr(LR)
    engine.train_step(batches, count_targets(work, "across"), work.tokens)
    state = RunState(1, work.tokens, 1, recipe.seed, recipe=dataclasses.asdict(recipe), data={})
    this = Rank(engine, state, Ranks(timeout_s=TIME_LIMIT_S))
    turns: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
    for number in range(options.repeats + 1):
        for name in CONTENDERS:
            seen = turn(name, this, folder / f"{number}-{name}" / "checkpoints")
            if number:  # the first round imports modules and warms the allocator
                turns[name].append(seen)
        if me.is_first:
            say(f"round {number}/{options.repeats}")
    if me.is_first:
        result = summary(turns, num_parameters(recipe.model))
        (folder / "result.json").write_text(json.dumps(result))
    process.finish()


def turn(name: str, this: Rank, folder: Path) -> dict[str, float]:
    """Save, forget, load, compare, remove; a collective."""
    engine, ranks, (save_it, load_it) = this.engine, this.ranks, CONTENDERS[name]
    before = bits(engine)
    if ranks.rank == 0:
        folder.mkdir(parents=True)
        os.sync()  # what earlier turns and other programs left must not be in this one's fsync
    save_s, save_cpu_s = timed(lambda: save_it(this, folder), ranks)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in paths)
    for path in paths:
        drop_from_cache(path)
    for fragment in engine.fragments():
        fragment.tensor.fill_(7)
    engine.after_load(0)
    assert bits(engine) != before
    load_s, load_cpu_s = timed(lambda: load_it(this, folder), ranks)
    same = ranks.exchange(bits(engine) == before, "comparison")
    assert all(same), f"{name}: loaded is not what was saved; by rank: {same}"
    if ranks.rank == 0:
        shutil.rmtree(folder.parent)
    seconds = zip(KEYS, (save_s, load_s, save_cpu_s, load_cpu_s), strict=True)
    return {"bytes": num_bytes, **dict(seconds)}


def timed(action: Callable[[], None], ranks: Comm) -> tuple[float, float]:
    """Seconds by the clock until the last rank is done, and on cores over all ranks."""
    ranks.exchange(None, "start")
    began, cpu = time.perf_counter(), time.process_time()
    action()
    cpu = time.process_time() - cpu
    all_cpu = ranks.exchange(cpu, "end")
    return time.perf_counter() - began, sum(all_cpu)


def bits(engine: Engine) -> str:
    """Digest of this rank's fp32 weights and moments, working weights and step count."""
    text = xxhash.xxh3_128(str(engine.optimizer_step()).encode())
    for fragment in engine.fragments():
        text.update(f"{fragment.name} {fragment.kind} {fragment.start}".encode())
        text.update(fragment.tensor.numpy())
    for parameter in engine.model.parameters():
        for tensor in (parameter, getattr(parameter, "ds_tensor", parameter)):
            text.update(tensor.detach().contiguous().numpy())
    return text.hexdigest()


def save_ours(this: Rank, folder: Path) -> None:
    pieces, local = this.engine.fragments(), {"random": random_states()}
    report = save(folder.parent, 1, pieces, this.state.as_dict(), this.ranks, local=local)
    assert report.ok, report.problem


def load_ours(this: Rank, folder: Path) -> None:
    loaded = load(folder.parent, this.engine.fragments(), this.ranks)
    this.engine.after_load(RunState.from_dict(loaded.state).optimizer_step)


def save_deepspeed(this: Rank, folder: Path) -> None:
    this.engine.ds.save_checkpoint(folder, tag="step")  # ends with a barrier
    paths = sorted(folder.rglob("*"), key=lambda path: (path.stat().st_size, path.name))
    files = [path for path in paths if path.is_file()]
    for path in files[this.ranks.rank :: this.ranks.world]:
        sync_file(path)
    for path in [folder, *(set(paths) - set(files))]:
        sync_folder(path)


def load_deepspeed(this: Rank, folder: Path) -> None:
    path, _ = this.engine.ds.load_checkpoint(folder, tag="step")
    assert path is not None


def save_torch(this: Rank, folder: Path) -> None:
    path = folder / f"{this.ranks.rank}.pt"
    tensors = [fragment.tensor for fragment in this.engine.fragments()]
    torch.save({"step": this.engine.optimizer_step(), "tensors": tensors}, path)
    sync_file(path)
    sync_folder(folder)


def load_torch(this: Rank, folder: Path) -> None:
    state = torch.load(folder / f"{this.ranks.rank}.pt", weights_only=True, mmap=False)
    for fragment, stored in zip(this.engine.fragments(), state["tensors"], strict=True):
        fragment.tensor.copy_(stored)
    this.engine.after_load(state["step"])


CONTENDERS = {
    "ours": (save_ours, load_ours),
    "deepspeed": (save_deepspeed, load_deepspeed),
    "torch": (save_torch, load_torch),
}


def sync_file(path: Path) -> None:
    """fsync."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def summary(turns: dict[str, list[dict]], parameters: int) -> dict[str, Any]:
    """Quartiles of each contender, and of its times over ours round by round: above 1 = ours is
    faster. Raises AssertionError where ours stores more than it may."""
    found = {}
    for name, seen in turns.items():
        found[name] = {"bytes_per_parameter": seen[0]["bytes"] / parameters}
        for key in KEYS:
            theirs = [turn[key] for turn in seen]
            found[name][key] = quartiles(theirs)
            ratios = paired_ratios([turn[key] for turn in turns["ours"]], theirs)
            found[name][f"{key}_over_ours"] = quartiles(ratios)
    size = found["ours"]["bytes_per_parameter"]
    assert size <= MOST_BYTES_PER_PARAMETER, f"{size:.3f} bytes per parameter"
    return {"parameters": parameters, "contenders": found, "turns": turns}


def markdown(result: dict[str, Any]) -> str:
    """The report."""
    rounds = len(result["turns"]["ours"])
    lines = ["# Checkpoint benchmark", "", f"`{result['command']}` at commit {result['commit']}."]
    lines += ["", *(f"- {key}: {value}" for key, value in result["machine"].items())]
    lines += [
        f"- load average {result['load_before']} before, {result['load_after']} after",
        "",
        f"{result['parameters']:,} parameters in fp32 with AdamW, ZeRO-{result['zero']},"
        f" {result['world']} ranks of one thread, {rounds} rounds in turns; median [quartiles]."
        " x (a) is the time over that of (a) in the same round: above 1 = this project is faster."
        " Everything fsynced; page cache dropped before loads (a virtual disk's host may still"
        " cache); after each load weights, moments and step equal those before, to the bit.",
        "",
        "| contender | bytes/parameter | save s | x (a) | load s | x (a) | CPU s save, load |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seen in result["contenders"].items():
        cells = [TITLES[name], f"{seen['bytes_per_parameter']:.3f}"]
        for key in KEYS[:2]:
            cells += [spread(seen[key], ".2f"), spread(seen[f"{key}_over_ours"], ".2f")]
        cells.append(f"{seen['save_cpu_s'][1]:.2f}, {seen['load_cpu_s'][1]:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    ratios = [result["contenders"]["deepspeed"][f"{key}_over_ours"][1] for key in KEYS[:2]]
    verdict = "met" if min(ratios) >= 1 else "missed"
    return "\n".join([*lines, "", f"Goal (no slower than DeepSpeed, median): {verdict}."]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
